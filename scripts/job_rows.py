"""Running a job's rows from a script: composed as the command does, nothing written."""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from batchgen.cli.compose import compose
from batchgen.cli.jobs import store_jobs
from batchgen.cli.overrides import read_command_line
from batchgen.cli.resources import conf_dir, jobs_dir
from batchgen.cli.settle import settle
from batchgen.config import Config
from batchgen.data.input.reader import check_ids
from batchgen.data.output.schema import RowResult
from batchgen.engine.request import Request, noise_key
from batchgen.errors import UsageError
from batchgen.job.inputs import JobInputs
from batchgen.job.load import build_engine
from batchgen.job.stream import RequestStream
from batchgen.prompts.plan import Plan
from batchgen.prompts.planner import make_plan
from batchgen.prompts.row_sampling import row_params
from batchgen.prompts.store import PromptStore
from batchgen.runtime.memory import Ledger
from batchgen.runtime.model import LoadedModel
from batchgen.sampling import SamplingParams

# A sample of an input row: the row's position in the input, the sample's number.
SampleKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Run:
    """The rows' answers by one configuration.

    Attributes:
        plan: what was to be computed.
        answers: output rows of every row that could be planned.
        prefill_tokens: prompt tokens that went through the model.
        seconds: from the tokenised rows to the last answer, planning included.
        generate_s: of these, the seconds since the engine was ready.
        model_s: of these, the seconds in which the model ran.
        ledger: what the weights and the pool take.
    """

    plan: Plan
    answers: dict[SampleKey, RowResult]
    prefill_tokens: int
    seconds: float
    generate_s: float
    model_s: float
    ledger: Ledger


@dataclass(frozen=True)
class JobRows:
    """The first rows of a job, tokenised."""

    inputs: JobInputs
    store: PromptStore

    @cached_property
    def params(self) -> list[SamplingParams]:
        """Sampling parameters of every store row."""
        return row_params(self.store.sampling_params, self.inputs.sampling)

    def stream(self, config: Config) -> tuple[Plan, RequestStream]:
        """Plan the rows and give their requests, new ones on every call."""
        inputs, block_size = self.inputs, config.pool.block_size
        max_model_len = inputs.limits.max_model_len
        plan = make_plan(
            self.store,
            inputs.sampling,
            max_model_len=max_model_len,
            block_size=block_size,
            prefix_caching=config.pool.prefix_caching,
            order=config.schedule.order.value,
        )
        stream = RequestStream(
            self.store,
            plan,
            inputs.sampling,
            inputs.tokenizer,
            max_model_len,
            block_size,
            inputs.grammars,
            inputs.bad_words,
        )
        return plan, stream

    def request_before(self, result: RowResult, position: int) -> Request:
        """Return the request of an output row as it was before one of its output tokens.

        Args:
            result: an output row without an error.
            position: output tokens before that one.
        """
        row = int(np.searchsorted(self.store.row_index, result.row_index))
        params = self.params[row]
        structure = params.structured
        constraint = None if structure is None else self.inputs.grammars.constraint(structure)
        request = Request.create(
            row,
            self.store.ids(row).tolist(),
            params,
            max_model_len=self.inputs.limits.max_model_len,
            noise_key=noise_key(params.seed, result.id, result.sample_index),
            constraint=constraint,
            bad_words=self.inputs.bad_words.spellings(params.bad_words),
        )
        for token in (result.output_token_ids or ())[:position]:
            request.token_ids.append(token)
            if constraint is not None:
                constraint.push(token)
        return request

    def run(self, config: Config, model: LoadedModel) -> Run:
        """Run the rows through an engine of their own over a loaded model.

        Raises:
            UsageError: memory leaves no room for a pool.
            EngineError: the engine cannot go on.
        """
        started = time.perf_counter()
        plan, stream = self.stream(config)
        ends = self.inputs.eos_token_ids
        loaded = build_engine(config, model, eos_token_ids=ends, future=plan.future)
        ready = time.perf_counter()
        answers = {
            (result.row_index, result.sample_index): result
            for finished in loaded.engine.run(stream.requests())
            for request in finished
            for result in stream.results(request, started)
        }
        ended = time.perf_counter()
        stats, counters = loaded.engine.stats, loaded.engine.scheduler.counters
        return Run(
            plan=plan,
            answers=answers,
            prefill_tokens=counters.prefill_tokens,
            seconds=ended - started,
            generate_s=ended - ready,
            model_s=stats.prefill_s + stats.decode_s,
            ledger=loaded.ledger,
        )


def compose_job(arguments: Sequence[str]) -> Config:
    """Return the checked configuration of what would follow ``python -m batchgen``.

    Only the rows are run, so no ``output.dir`` is needed, and ``mode`` does not matter.

    Raises:
        UsageError: as the command itself, or the arguments name several jobs.
    """
    conf, jobs = conf_dir(), [jobs_dir()]
    line = read_command_line([*arguments, "mode=preview"], conf)
    store_jobs(jobs, line.jobs)
    composed = compose(line.arguments, conf, jobs)
    if len(composed) != 1:
        raise UsageError("Give the keys of exactly one job: no sweep, and no flag that shows keys.")
    return settle(composed[0]).config


@contextmanager
def open_rows(config: Config, rows: int | None = None) -> Iterator[JobRows]:
    """Tokenise the first rows of a job, or all; ``input.limit`` can make them fewer.

    Raises:
        UsageError: the input or the model's files cannot be used.
    """
    limit = min(filter(None, (rows, config.input.limit)), default=None)
    inputs = JobInputs.open(config)
    check_ids(inputs.source, id_column=config.input.id_column, limit=limit)
    with tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
        prompts = inputs.prompts(replace(config.input, limit=limit))
        path = Path(folder) / "prompts.arrow"
        with PromptStore.write(path, inputs.id_type, prompts) as store:
            yield JobRows(inputs, store)


def with_block_size(config: Config, block_size: int) -> Config:
    """Return the same job with other blocks, and as many tokens in its pools as before."""
    pool = config.pool

    def blocks(count: int | None) -> int | None:
        return None if count is None else -(-count * pool.block_size // block_size)

    changed = replace(
        pool,
        block_size=block_size,
        num_blocks=blocks(pool.num_blocks),
        swap_blocks=blocks(pool.swap_blocks),
    )
    return replace(config, pool=changed)


def positive(text: str) -> int:
    """Read a count from the command line, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number
