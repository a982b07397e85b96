"""The plan phase: which rows are left, their prompts on disk, the order they run in."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.config import Config
from batchgen.data import failpoints
from batchgen.data.input.reader import check_ids
from batchgen.data.output.directory import OutputDir
from batchgen.data.output.files import OutputError
from batchgen.data.output.finished import FinishedRows
from batchgen.job.identity import fingerprint
from batchgen.job.identity_v1 import as_version_1
from batchgen.job.inputs import JobInputs
from batchgen.prompts.advice.columns import Advice, advise
from batchgen.prompts.advice.sample import RowSample
from batchgen.prompts.normalize import Changes
from batchgen.prompts.plan import Plan, closed_answers
from batchgen.prompts.planner import make_plan
from batchgen.prompts.row_sampling import row_params
from batchgen.prompts.source import Source
from batchgen.prompts.store import PromptStore
from batchgen.report.machine import versions

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Prompts, what is left of them, and the plan over it.

    Attributes:
        store: all rows of the input, tokenised.
        plan: over the rows that are left.
        num_samples: [rows] output rows that each input row has where it is ok.
        done: [rows] whether its output is there already.
        phases: seconds that planning took, by part.
        sample: rows for :func:`find_advice`; None where there is nothing to advise on.
        normalized: what ``prompt.normalize`` changed.
        rows_ending_with_assistant: rows whose last message is the assistant's and is not continued.
    """

    store: PromptStore
    plan: Plan
    num_samples: Counts
    done: Mask
    phases: dict[str, float]
    sample: RowSample | None
    normalized: Changes
    rows_ending_with_assistant: int

    def to_json(self) -> dict[str, Any]:
        """Return what ``_plan.json`` holds."""
        return self.plan.to_json() | {
            "normalized": self.normalized.to_json(),
            "rows_ending_with_assistant": self.rows_ending_with_assistant,
            "phases": self.phases,
        }

    def describe(self) -> str:
        """Return the plan in a few lines for a person."""
        lines = [self.plan.describe()]
        if self.rows_ending_with_assistant:
            lines.append(f"warning: {closed_answers(self.rows_ending_with_assistant)}")
        changes = self.normalized.describe()
        if changes is not None:
            lines.append(changes)
        return "\n".join(lines)

    def all_done(self, finished: FinishedRows) -> bool:
        """Whether every input row has its output."""
        return bool(_done(finished, self.store, self.num_samples).all())

    @property
    def id_type(self) -> pa.DataType:
        """Arrow type of the ids."""
        return self.store.row_ids.type

    @property
    def total_rows(self) -> int:
        """Output rows of the whole job."""
        return int(self._output_rows.sum())

    @property
    def done_rows(self) -> int:
        """Output rows of the input rows that are done."""
        return int(self._output_rows[self.done].sum())

    @property
    def failed_rows(self) -> int:
        """Input rows that failed in planning and have no output yet."""
        return int((self._failed & ~self.done).sum())

    @property
    def _output_rows(self) -> Counts:
        return np.where(self._failed, 1, self.num_samples)

    @property
    def _failed(self) -> Mask:
        failed = np.ones(self.store.num_rows, dtype=np.bool_)
        failed[self.store.good_rows] = False
        return failed


def open_output(
    config: Config, inputs: JobInputs, output: OutputDir, resolved_yaml: str, device: str
) -> FinishedRows:
    """Check ids, compare fingerprints and read what is finished.

    Raises:
        UsageError: ids repeat, or the results there are another job's.
    """
    limit, id_column = config.input.limit, config.input.id_column
    digest = check_ids(inputs.source, id_column=id_column, limit=limit)
    now = fingerprint(config, inputs, device=device, id_digest=digest)
    output.begin(
        now,
        resume=config.output.resume.value,
        version_1=lambda: as_version_1(now, config, inputs),
        details={"versions": versions(), "config": resolved_yaml},
    )
    finished = output.finished_rows(inputs.id_type, verify=config.output.verify)
    if config.output.retry_errors and finished.num_errors:
        output.begin_work()
        output.discard_errors()
        finished = output.finished_rows(inputs.id_type)
    return finished


def plan_job(
    config: Config,
    inputs: JobInputs,
    output: OutputDir,
    finished: FinishedRows | None,
) -> JobPlan:
    """Tokenise all rows, drop what is done, and plan the rest.

    A row with only some of its samples is made again whole.

    Args:
        config: the job.
        inputs: its opened inputs.
        output: where the prompts are kept and ``_plan.json`` is written.
        finished: what is there already; None to plan as if nothing were.

    Raises:
        OutputError: prompts or plan could not be written.
    """
    sample = RowSample(inputs.num_rows) if _can_advise(config, inputs) else None
    started = time.perf_counter()
    store = _write_store(config, inputs, output, sample)
    tokenized = time.perf_counter()
    num_samples = np.array(
        [each.n for each in row_params(store.sampling_params, inputs.sampling)], dtype=np.int64
    )
    done = np.zeros(store.num_rows, dtype=np.bool_)
    if finished is not None:
        done = _done(finished, store, num_samples)
        begun = _done(finished, store, np.ones_like(num_samples)) & ~done
        if begun.any():
            output.begin_work()
            output.discard_ids(_ids(store).filter(pa.array(begun)))
    plan = make_plan(
        store,
        inputs.sampling,
        max_model_len=inputs.limits.max_model_len,
        block_size=config.pool.block_size,
        prefix_caching=config.pool.prefix_caching,
        order=config.schedule.order.value,
        window_rows=config.schedule.window_rows,
        done=done,
        requests_of=inputs.requests_of,
        truncation=config.prompt.truncation.value,
    )
    phases = {"tokenize_s": tokenized - started, "order_s": time.perf_counter() - tokenized}
    planned = JobPlan(
        store=store,
        plan=plan,
        num_samples=num_samples,
        done=done,
        phases=phases,
        sample=sample,
        normalized=inputs.renderer.normalizer.changes,
        rows_ending_with_assistant=inputs.renderer.rows_ending_with_assistant,
    )
    output.write_json("_plan.json", planned.to_json())
    return planned


def _can_advise(config: Config, inputs: JobInputs) -> bool:
    # Where prompt.fields are listed, prompt.field_order is the advice.
    is_template = inputs.renderer.source is Source.TEMPLATE
    return is_template and config.pool.prefix_caching and not inputs.spec.fields


def find_advice(inputs: JobInputs, planned: JobPlan) -> Advice | None:
    """Look for a template column that keeps the rows from sharing."""
    if planned.sample is None:
        return None
    return advise(
        planned.sample,
        inputs.spec,
        inputs.source.schema,
        inputs.tokenizer,
        inputs.limits,
        ids=planned.store.ids,
        shared=planned.plan.requests_by_prefix.shared_by_store_row(planned.store.num_rows),
    )


def _write_store(
    config: Config, inputs: JobInputs, output: OutputDir, sample: RowSample | None
) -> PromptStore:
    path = output.scratch / "_plan" / "prompts.arrow"
    prompts = inputs.prompts(config.input, None if sample is None else sample.see)
    try:
        failpoints.reached("prompts.begin")
        store = PromptStore.write(path, inputs.id_type, prompts)
        failpoints.reached("prompts.durable")
    except OSError as error:
        raise OutputError.at(path, error) from error
    return store


def _done(finished: FinishedRows, store: PromptStore, num_samples: Counts) -> Mask:
    return finished.done(_ids(store), num_samples)


def _ids(store: PromptStore) -> pa.Array:
    return pa.concat_arrays(store.row_ids.chunks or [pa.array([], store.row_ids.type)])
