"""Calibrating the labels of a finished output, from the scores that stand in it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.config import SamplingConfig, ScoreCalibration
from batchgen.data.output.directory import OutputDir
from batchgen.data.output.parts import read_part
from batchgen.engine.core import EngineCore
from batchgen.engine.request import Request
from batchgen.errors import EngineError, UsageError
from batchgen.job.inputs import JobInputs
from batchgen.job.scores import log_probabilities
from batchgen.prompts.encoder import PromptEncoder
from batchgen.prompts.limits import IdArray
from batchgen.prompts.row_sampling import sampling_columns
from batchgen.prompts.source import Source
from batchgen.sampling import SamplingParams
from batchgen.structured.calibration import (
    FloatArray,
    content_free_offsets,
    normalised,
    prior_offsets,
)

# What a row's text columns are replaced by (Zhao et al. 2021).
_WITHOUT_CONTENT = ("N/A", "", "[MASK]")
_KEY = "sampling.score_calibration=content_free"


class Calibration:
    """How the job's labels are calibrated, and what that takes.

    Attributes:
        asks_model: the model has to score prompts without content.
    """

    def __init__(self, sampling: SamplingConfig, inputs: JobInputs) -> None:
        """Look whether it can be done.

        Raises:
            UsageError: prompts without content cannot be made.
        """
        self.asks_model = sampling.score_calibration is ScoreCalibration.content_free
        self._sampling = sampling
        self._inputs = inputs
        self._choices = tuple(sampling.score_choices)
        self._prompts = _content_free_prompts(inputs) if self.asks_model else []
        self._content_free: FloatArray | None = None

    def ask(self, engine: EngineCore) -> None:
        """Let an engine that has nothing else to do score the prompts without content.

        Raises:
            EngineError: none of them could be scored.
        """
        if not self.asks_model:
            return
        tree = self._inputs.grammars.tree(self._choices)
        nodes = list(zip(tree.paths, tree.next_tokens, strict=True))
        requests = [
            Request.create(
                number * len(nodes) + node,
                [*prompt.tolist(), *path],
                SamplingParams(max_tokens=1),
                max_model_len=self._inputs.limits.max_model_len,
                scored_tokens=next_tokens,
            )
            for number, prompt in enumerate(self._prompts)
            for node, (path, next_tokens) in enumerate(nodes)
        ]
        for _ in engine.run(requests):
            pass
        starts = range(0, len(requests), len(nodes))
        rows = [requests[start : start + len(nodes)] for start in starts]
        good = [row for row in rows if all(request.error is None for request in row)]
        if not good:
            raise EngineError(f"{_KEY}: no prompt without content could be scored")
        self._content_free = np.array([log_probabilities(tree, row) for row in good])

    def apply(self, output: OutputDir) -> dict[str, object]:
        """Change ``label``, ``label_score`` and ``label_scores`` of rows with the job's choices.

        Only ``label_logprobs`` is looked at, so that doing it twice is doing it once.

        Args:
            output: complete and locked.

        Returns:
            What was done, for the summary: kind, offsets, and shares of the labels.

        Raises:
            OutputError: the disk does not take the change.
        """
        kind, choices = self._sampling.score_calibration, self._choices
        if kind is ScoreCalibration.none:
            return {}
        tables = (read_part(part, ["label_logprobs"]) for part in output.parts)
        scores = np.concatenate([_scores(table, choices)[1] for table in tables])
        offsets = self._offsets(scores)
        output.rewrite(lambda table: _calibrated(table, choices, offsets))
        labels = normalised(scores, offsets).argmax(axis=1)
        shares = np.bincount(labels, minlength=len(choices)) / max(1, len(labels))
        figures = {
            "kind": kind.value,
            "offsets": dict(zip(choices, offsets.tolist(), strict=True)),
            "shares": dict(zip(choices, shares.tolist(), strict=True)),
        }
        return {"score_calibration": figures}

    def _offsets(self, scores: FloatArray) -> FloatArray:
        if self._content_free is not None:
            return content_free_offsets(self._content_free)
        count = len(self._choices)
        return prior_offsets(scores, np.array(self._sampling.score_prior or [1 / count] * count))


def _content_free_prompts(inputs: JobInputs) -> list[IdArray]:
    """Render the template with texts that say nothing in place of a row's."""
    renderer, schema = inputs.renderer, inputs.source.schema
    if renderer.source is not Source.TEMPLATE:
        raise UsageError(f"{_KEY} needs prompt.template or prompt.template_file")
    own = set(sampling_columns(schema))
    fields = [schema.field(name) for name in renderer.columns if name not in own]
    nulls = [None] * len(_WITHOUT_CONTENT)
    columns = [
        pa.array(_WITHOUT_CONTENT if _is_text(field.type) else nulls, field.type)
        for field in fields
    ]
    rows = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
    encoder = PromptEncoder(renderer, inputs.tokenizer, inputs.limits)
    encoded = encoder.encode(renderer.render(rows))
    prompts = [each for each in encoded if isinstance(each, np.ndarray)]
    if not prompts:
        raise UsageError(f"{_KEY}: the template cannot be rendered without content: {encoded[0]}")
    return prompts


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _scores(table: pa.Table, choices: Sequence[str]) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Give the rows that were scored over the job's choices, and their [N, C] scores."""
    column = table.column("label_logprobs").combine_chunks()
    starts = column.offsets.to_numpy()
    rows = np.flatnonzero(np.diff(starts) == len(choices))
    at = starts[rows, None] + np.arange(len(choices))
    keys = column.keys.to_numpy(zero_copy_only=False)[at].reshape(-1, len(choices))
    same = (keys == np.array(choices, dtype=object)).all(axis=1)
    return rows[same], column.items.to_numpy(zero_copy_only=False)[at[same]]


def _calibrated(table: pa.Table, choices: Sequence[str], offsets: FloatArray) -> pa.Table:
    rows, scores = _scores(table, choices)
    probabilities = normalised(scores, offsets)
    best = probabilities.argmax(axis=1)
    changed = {
        "label": [choices[index] for index in best],
        "label_score": probabilities.max(axis=1, initial=0.0).tolist(),
        "label_scores": [list(zip(choices, each, strict=True)) for each in probabilities.tolist()],
    }
    for name, values in changed.items():
        column = table.column(name).to_pylist()
        for row, value in zip(rows.tolist(), values, strict=True):
            column[row] = value
        at, field = table.schema.get_field_index(name), table.schema.field(name)
        table = table.set_column(at, field, pa.array(column, field.type))
    return table
