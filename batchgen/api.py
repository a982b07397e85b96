"""The engine from Python: ``from batchgen import Engine``, for notebooks and tests.

It is the engine of the command, with the same prompts, plan, scheduler, pool and account of
every row; only input and output are Python objects instead of Parquet. What is to be kept, to
resume or to be larger than memory is a job for the command.
"""

import difflib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.checks import engine_complaints
from batchgen.config import Config, EngineConfig, ModelConfig, PoolConfig
from batchgen.data.input.reader import RowBatch
from batchgen.data.output.schema import RowResult
from batchgen.engine.request import BlockAccount
from batchgen.errors import BatchgenError, RowError, RowErrorType, UsageError
from batchgen.job.front import ModelFront
from batchgen.job.load import build_engine, load_job_model
from batchgen.job.stream import RequestStream
from batchgen.keys import declared_keys
from batchgen.prompts.planner import make_plan
from batchgen.prompts.render import Renderer
from batchgen.prompts.source import (
    DEFAULT_COLUMN,
    DEFAULT_MESSAGES_COLUMN,
    DEFAULT_TOKEN_IDS_COLUMN,
    PromptSpec,
)
from batchgen.prompts.store import PromptStore
from batchgen.sampling import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or the messages of a chat."""

_SECTIONS = {"model": ModelConfig, "pool": PoolConfig, "engine": EngineConfig}


class FailedPromptsError(BatchgenError):
    """Some prompts have no answer, and ``raise_errors`` was asked for.

    Attributes:
        outputs: of all prompts, those that have one too.
    """

    def __init__(self, message: str, outputs: "list[Output]") -> None:
        super().__init__(message)
        self.outputs = outputs


@dataclass(frozen=True, slots=True)
class Output:
    """What came of one prompt.

    Attributes:
        samples: a row for each of ``n`` samples, or one row with the error; a row has every
            column of the command's output (docs/output.md).
    """

    samples: tuple[RowResult, ...]

    @property
    def text(self) -> str | None:
        """The first sample's text; None after an error, or without a tokenizer."""
        return self.samples[0].generated_text

    @property
    def token_ids(self) -> list[int] | None:
        """The first sample's tokens, the one that stopped it included; None after an error."""
        ids = self.samples[0].output_token_ids
        return None if ids is None else list(ids)

    @property
    def finish_reason(self) -> str | None:
        """What ended the first sample: ``stop``, ``length``, ``repetition`` or ``error``."""
        return self.samples[0].finish_reason

    @property
    def error(self) -> RowError | None:
        """Why there is no answer, or None."""
        row = self.samples[0]
        if row.error_type is None:
            return None
        return RowError(RowErrorType(row.error_type), row.error_message or "")

    @property
    def blocks(self) -> BlockAccount | None:
        """What the first sample took from the pool and gave back; None after an error."""
        row = self.samples[0]
        if row.error_type is not None:
            return None
        return BlockAccount(**{each.name: getattr(row, each.name) for each in fields(BlockAccount)})


class Engine:
    """A loaded model and its pool, ready for prompts.

    What one call of :meth:`generate` leaves in the cache the next one finds.

    Args:
        model: a directory, a hub name or a ``.gguf`` file, as ``model.path``.
        options: keys of the groups ``model``, ``pool`` and ``engine`` by their own names, as
            in ``num_blocks=512``; docs/keys.md has them all.

    Raises:
        UsageError: an option is none or makes no sense, or the model cannot be used.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._config = _config(str(model), options)
        self._front = ModelFront.load(self._config.model)
        self._loaded = build_engine(
            self._config,
            load_job_model(self._config),
            eos_token_ids=self._front.eos_token_ids,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        *,
        raise_errors: bool = False,
    ) -> list[Output]:
        """Answer some prompts, each once however many are alike.

        Args:
            prompts: all of one kind: texts, lists of messages, or lists of token ids.
            sampling: parameters by name, as in ``{"max_tokens": 32}``, or an object.
            raise_errors: raise where a prompt has no answer; else its output says why.

        Returns:
            An output for each prompt, in their order.

        Raises:
            UsageError: the prompts or the parameters cannot be used.
            FailedPromptsError: some have no answer, and ``raise_errors`` is set.
            EngineError: the engine cannot go on.
        """
        params = self._params(sampling)
        with (
            tempfile.TemporaryDirectory(prefix="batchgen-") as folder,
            self._store(Path(folder) / "prompts.arrow", prompts, params) as store,
        ):
            outputs = self._run(store, params)
        failed = [number for number, output in enumerate(outputs) if output.error is not None]
        if raise_errors and failed:
            error = outputs[failed[0]].error
            assert error is not None
            raise FailedPromptsError(
                f"{len(failed)} of {len(outputs)} prompts have no answer, first number "
                f"{failed[0]}: {error.type.value}: {error.message}",
                outputs,
            )
        return outputs

    def _params(self, sampling: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        try:
            params = (
                sampling
                if isinstance(sampling, SamplingParams)
                else SamplingParams().override(sampling or {})
            )
        except ValueError as error:
            raise UsageError(f"sampling: {error}") from error
        problem = params.problem()
        if problem is not None:
            raise UsageError(f"sampling: {problem}")
        self._front.check(params)
        return params

    def _store(self, path: Path, prompts: Sequence[Prompt], params: SamplingParams) -> PromptStore:
        """Tokenise the prompts as rows of an input that has nothing else."""
        table = pa.RecordBatch.from_pydict(_column(prompts))
        ids = pa.array(range(len(prompts)), pa.int64())
        renderer = Renderer(PromptSpec(), table.schema, self._front.tokenizer)
        batches = self._front.tokenize([RowBatch(0, ids, table)], renderer, params)
        return PromptStore.write(path, pa.int64(), batches)

    def _run(self, store: PromptStore, params: SamplingParams) -> list[Output]:
        pool, front = self._config.pool, self._front
        max_model_len = front.limits.max_model_len
        plan = make_plan(
            store,
            params,
            max_model_len=max_model_len,
            block_size=pool.block_size,
            prefix_caching=pool.prefix_caching,
            order="prefix",
            requests_of=front.requests_of,
        )
        stream = RequestStream(
            store,
            plan,
            params,
            front.tokenizer,
            max_model_len,
            pool.block_size,
            front.grammars,
            front.bad_words,
        )
        rows: dict[int, list[RowResult]] = {number: [] for number in range(store.num_rows)}
        for number, error in store.errors():
            rows[number].append(stream.error_result(number, error))
        started = time.perf_counter()
        for finished in self._loaded.engine.run(stream.requests()):
            for request in finished:
                for row in stream.results(request, started):
                    rows[row.row_index].append(row)
        return [
            Output(tuple(sorted(samples, key=lambda row: row.sample_index)))
            for samples in rows.values()
        ]


def _config(model: str, options: Mapping[str, Any]) -> Config:
    """Put the options into their groups."""
    keys = {
        name.partition(".")[2]: name
        for name in declared_keys()
        if name.partition(".")[0] in _SECTIONS and name != "model.path"
    }
    grouped: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for option, value in options.items():
        if option not in keys:
            close = difflib.get_close_matches(option, keys, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(keys)}"
            raise UsageError(f"Engine has no option {option}; {hint}")
        grouped[keys[option].partition(".")[0]][option] = _checked(option, keys[option], value)
    sections = {name: make(**grouped[name]) for name, make in _SECTIONS.items() if name != "model"}
    config = replace(Config(), model=ModelConfig(path=model, **grouped["model"]), **sections)
    complaints = list(engine_complaints(config))
    if complaints:
        raise UsageError("\n".join(complaints))
    return config


def _checked(option: str, name: str, value: Any) -> Any:
    """Bring a value to its key's type, without guessing."""
    key = declared_keys()[name]
    if value is None and key.optional:
        return None
    try:
        if key.choices:
            return key.kind(value)
    except ValueError:
        pass
    else:
        is_number = key.kind is float and isinstance(value, int)
        is_kind = isinstance(value, key.kind) or is_number
        if is_kind and isinstance(value, bool) == (key.kind is bool):
            return value
    raise UsageError(f"Engine option {option}={value!r} must be {key.expected}")


def _column(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Give the one column of an input with these prompts."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        raise UsageError(f"prompts must be a list of prompts, not {type(prompts).__name__}")
    if all(isinstance(prompt, str) for prompt in prompts):
        return {DEFAULT_COLUMN: pa.array(prompts, pa.large_string())}
    lists = [list(prompt) for prompt in prompts if not isinstance(prompt, str | Mapping | int)]
    items = [item for each in lists for item in each]
    if len(lists) == len(prompts) and all(isinstance(item, Mapping) for item in items):
        return {DEFAULT_MESSAGES_COLUMN: [json.dumps(each) for each in lists]}
    if len(lists) == len(prompts) and not any(isinstance(item, Mapping | str) for item in items):
        return {DEFAULT_TOKEN_IDS_COLUMN: pa.array(lists, pa.list_(pa.int64()))}
    raise UsageError(
        "prompts must all be texts, all lists of messages (objects with role and content), or "
        "all lists of token ids"
    )
