"""Engines over a loaded model without the job around them: no configuration, no files."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from memory_machines import ModelMachine

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.block_manager import BlockManager, Window
from batchgen.engine.block_pool import Future
from batchgen.engine.core import EngineCore
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.preemption import PreemptionCosts, PreemptionPolicy, SwapSpace
from batchgen.engine.request import Request
from batchgen.engine.scheduler import Scheduler, SchedulerLimits
from batchgen.engine.stats import EngineStats
from batchgen.engine.stopping import StopRules
from batchgen.prompts.future import PlannedFuture
from batchgen.prompts.order import neighbour_lcp, prefix_order
from batchgen.runtime.backends import AttentionName
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import kv_bytes_per_token, window_of_all
from batchgen.runtime.model import LoadedModel
from batchgen.runtime.shared_prefixes import SharedPrefix
from batchgen.sampling import SamplingParams

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt, and the tokens to make: exactly so many, nothing ends a row before."""

    prompt: Ids
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Settings:
    """A job's keys, as far as they concern the engine.

    Attributes:
        attention: None is what a job would choose on a GPU, and torch's operators on a CPU
            where they are allowed.
        deterministic: the model's row counts must be fixed, as a job does when it loads one.
        overlap: None is what a job would do.
        cuda_graphs: whether decode steps run as graphs, where the device has them.
    """

    num_blocks: int
    block_size: int = 16
    swap_blocks: int = 0
    max_num_seqs: int = 256
    step_tokens: int = 8192
    prefix_caching: bool = True
    admission: AdmissionPolicy = AdmissionPolicy.AUTO
    preemption: PreemptionPolicy = PreemptionPolicy.AUTO
    sharing: SharedPrefix = SharedPrefix.AUTO
    attention: AttentionName | None = None
    deterministic: bool = False
    overlap: bool | None = None
    cuda_graphs: bool = True


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and what executes its steps."""

    engine: EngineCore
    executor: ModelExecutor


@dataclass(slots=True)
class Run:
    """What came out of a run; it holds nothing of the engine's memory.

    Attributes:
        seconds: from the requests to the last of them, the device's work done.
        requests: as they ended.
        graph_steps: forward passes that ran as a CUDA graph.
    """

    seconds: float
    requests: list[Request]
    stats: EngineStats
    counters: SchedulerCounters
    graph_steps: int

    @property
    def outputs(self) -> dict[int, list[int]]:
        """Each row's tokens, by its number."""
        return {request.request_id: request.output_token_ids for request in self.requests}


def build_engine(
    loaded: LoadedModel,
    settings: Settings,
    *,
    blocks: BlockManager | None = None,
    stop_rules: StopRules | None = None,
    future: Future | None = None,
) -> Built:
    """Build an engine as a job does.

    Args:
        loaded: the model.
        settings: the engine's keys.
        blocks: replaces the block manager, and with it the size of the pool.
        stop_rules: replaces the rules that end a row.
        future: what is known of the rows to come.
    """
    # The pool of an engine before may take most of the memory.
    gc.collect()
    window = window_of_all(loaded.layers)
    scheduler = make_scheduler(
        settings, window, blocks=blocks, stop_rules=stop_rules, future=future
    )
    is_gpu = loaded.model.device.type == "cuda"
    usual = AttentionName.AUTO if is_gpu or settings.deterministic else AttentionName.TORCH
    machine = ModelMachine(
        loaded,
        settings.attention or usual,
        settings.sharing,
        deterministic=settings.deterministic,
        graph_rows=settings.max_num_seqs if settings.cuda_graphs else 0,
    )
    executor = machine.executor(scheduler.blocks, settings.swap_blocks)
    scheduler.costs.swap_s_per_block = executor.swap.measure_s_per_block()
    overlaps = is_gpu if settings.overlap is None else settings.overlap
    engine = EngineCore(scheduler, executor, overlap=overlaps, clock=time.perf_counter)
    return Built(engine, executor)


def make_scheduler(
    settings: Settings,
    window: int | None,
    *,
    blocks: BlockManager | None = None,
    stop_rules: StopRules | None = None,
    future: Future | None = None,
) -> Scheduler:
    """Make the scheduler of :func:`build_engine`.

    Args:
        window: tokens that any layer sees; None is all.
    """
    return Scheduler(
        blocks
        or BlockManager(
            settings.num_blocks,
            settings.block_size,
            prefix_caching=settings.prefix_caching,
            future=future,
            window=Window(window, settings.step_tokens) if window is not None else None,
        ),
        SwapSpace(settings.swap_blocks),
        stop_rules or StopRules(frozenset()),
        SchedulerLimits(settings.max_num_seqs, settings.step_tokens),
        admission=settings.admission,
        preemption=settings.preemption if settings.swap_blocks else PreemptionPolicy.RECOMPUTE,
        costs=PreemptionCosts(),
        clock=time.perf_counter,
    )


def make_requests(
    rows: Sequence[Row],
    order: Sequence[int],
    max_model_len: int,
    max_tokens: int | None = None,
    logprobs: int | None = None,
) -> list[Request]:
    """Make requests numbered by row, in an order.

    Args:
        max_tokens: what every row may make where its own number must not be known.
        logprobs: likeliest tokens whose log-probabilities are kept beside each of its own.
    """
    return [
        Request.create(
            row,
            rows[row].prompt,
            SamplingParams(
                max_tokens=max_tokens or rows[row].output_tokens,
                ignore_eos=max_tokens is None,
                logprobs=logprobs,
            ),
            max_model_len=max_model_len,
        )
        for row in order
    ]


def run_rows(
    loaded: LoadedModel,
    settings: Settings,
    rows: Sequence[Row],
    *,
    in_order: bool = False,
    logprobs: int | None = None,
) -> Run:
    """Run rows as a job would: in prefix order, the rows to come known, or as they stand."""
    order = list(range(len(rows))) if in_order else ordered(rows)
    future = None if in_order else PlannedFuture(np.arange(len(order)), lcps(rows, order))
    built = build_engine(loaded, settings, future=future)
    requests = make_requests(rows, order, loaded.max_model_len, logprobs=logprobs)
    return run_requests(built, requests, loaded)


def run_requests(built: Built, requests: Sequence[Request], loaded: LoadedModel) -> Run:
    """Run requests and take the time.

    Raises:
        RuntimeError: a row failed.
    """
    engine = built.engine
    _synchronize(loaded)
    started = time.perf_counter()
    finished = [request for batch in engine.run(requests) for request in batch]
    _synchronize(loaded)
    seconds = time.perf_counter() - started
    failed = [request.error for request in finished if request.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} rows failed, the first: {failed[0].message}")
    counters, graph_steps = engine.scheduler.counters, built.executor.graph_steps
    return Run(seconds, finished, engine.stats, counters, graph_steps)


def ordered(rows: Sequence[Row]) -> list[int]:
    """Return the rows' prefix order."""
    order: list[int] = prefix_order(_ids(rows), np.arange(len(rows))).tolist()
    return order


def lcps(rows: Sequence[Row], order: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return the tokens that each row shares with the one before it in an order."""
    return neighbour_lcp(_ids(rows), np.asarray(order, dtype=np.int64))


def blocks_within(loaded: LoadedModel, num_bytes: int, block_size: int) -> int:
    """Count the blocks that some bytes hold."""
    per_token = kv_bytes_per_token(loaded.layers, loaded.model.dtype)
    return int(num_bytes) // (per_token * block_size)


def _ids(rows: Sequence[Row]):  # type: ignore[no-untyped-def]
    return lambda row: np.asarray(rows[row].prompt, dtype=np.int32)


def _synchronize(loaded: LoadedModel) -> None:
    if loaded.model.device.type == "cuda":
        torch.cuda.synchronize(loaded.model.device)
