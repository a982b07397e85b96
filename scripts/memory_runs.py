"""One run of compare_memory.py: rows through one way of keeping KV, and what it did."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from memory_machines import Machine, StopAt
from memory_managers import ContiguousManager, WholeBlockManager
from memory_rows import Row

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.core import EngineCore, Executor, PendingOutput
from batchgen.engine.preemption import PreemptionPolicy, SwapSpace
from batchgen.engine.request import Request
from batchgen.engine.scheduler import Scheduler, SchedulerLimits
from batchgen.engine.step import StepPlan
from batchgen.errors import EngineError, UsageError
from batchgen.prompts.future import PlannedFuture
from batchgen.prompts.order import neighbour_lcp, prefix_order
from batchgen.sampling import SamplingParams

Ids = npt.NDArray[np.int32]

VARIANTS = {
    "contiguous_max": "contiguous, maximum",
    "contiguous_fit": "contiguous, first fit",
    "paged": "paged",
    "paged_prefix": "paged, prefix by blocks",
    "ours": "batchgen",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The budget and the step's bounds, the same for every variant.

    Attributes:
        block_size: slots in a block.
        num_blocks: the budget, in blocks.
        max_num_seqs: rows at once at most.
        step_tokens: tokens in a step at most.
        max_tokens: the most a row may generate.
        longest_tokens: the run of slots for a row of unknown length.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    step_tokens: int
    max_tokens: int
    longest_tokens: int

    @property
    def capacity(self) -> int:
        """The budget, in slots."""
        return self.num_blocks * self.block_size


@dataclass(slots=True)
class Figures:
    """What one variant did.

    Attributes:
        peak_rows, mean_rows: rows in a step.
        ttft_p50_ms, ttft_p90_ms, ttft_p99_ms: from the run's start to a row's first token.
        peak_kv_bytes: most of the budget in use at once; cached blocks are not in use.
        unused_share: of the slots in use, those without KV, summed over the steps.
        prefill_tokens, recomputed_tokens: tokens computed; those again after a preemption.
        refusals, refused_rows: see :class:`Refusals`.
        free_at_refusal, hole_at_refusal: free slots and the largest hole at the worst one.
        equal_outputs: rows with the same tokens as in the first variant run.
    """

    variant: str
    shared_tokens: int
    simulated: bool
    seconds: float = 0.0
    steps: int = 0
    peak_rows: int = 0
    mean_rows: float = 0.0
    output_tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0
    ttft_p50_ms: float = 0.0
    ttft_p90_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    peak_kv_bytes: int = 0
    unused_share: float = 0.0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    refusals: int = 0
    refused_rows: int = 0
    free_at_refusal: int = 0
    hole_at_refusal: int = 0
    equal_outputs: int = 0


class Watch:
    """Passes steps on to an executor and looks at the memory of each."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self.peak_slots = self.peak_rows = self.sum_slots = self.sum_unused = 0
        self._executor = executor
        self._scheduler = scheduler

    def execute(self, plan: StepPlan) -> PendingOutput:
        """Look, then run."""
        slots, unused = slots_in_use(self._scheduler)
        self.peak_slots = max(self.peak_slots, slots)
        self.peak_rows = max(self.peak_rows, len(self._scheduler.running))
        self.sum_slots += slots
        self.sum_unused += unused
        return self._executor.execute(plan)


def slots_in_use(scheduler: Scheduler) -> tuple[int, int]:
    """Count the slots that are taken, and those of them that hold no KV.

    A slot without KV lies behind a row's computed tokens, in blocks that are its alone.
    """
    manager, running = scheduler.blocks, list(scheduler.running)
    if isinstance(manager, ContiguousManager):
        taken = manager.slots.capacity - manager.slots.num_free
        return taken, taken - sum(request.num_computed for request in running)
    size = manager.block_size
    unused = sum(len(row.block_table) * size - row.num_computed for row in running)
    return manager.pool.num_owned * size, unused


def make_scheduler(
    variant: str, rows: Sequence[Row], limits: Limits, machine: Machine, order: Sequence[int]
) -> Scheduler:
    """Make the scheduler of a variant.

    Args:
        variant: one of ``VARIANTS``.
        rows: all rows; a request's number is its row's.
        limits: the budget.
        machine: gives the clock.
        order: the rows in the order in which they will be added.
    """
    ours, contiguous = variant == "ours", variant.startswith("contiguous")
    return Scheduler(
        make_manager(variant, rows, limits, order),
        SwapSpace(limits.num_blocks if ours else 0),
        StopAt(rows),
        SchedulerLimits(limits.max_num_seqs, limits.step_tokens),
        admission=AdmissionPolicy.PROMPT if contiguous else AdmissionPolicy.AUTO,
        preemption=PreemptionPolicy.AUTO if ours else PreemptionPolicy.RECOMPUTE,
        costs=machine.costs(limits.block_size),
        clock=machine.clock,
    )


def make_manager(
    variant: str, rows: Sequence[Row], limits: Limits, order: Sequence[int]
) -> BlockManager:
    """Make a variant's memory; see :func:`make_scheduler`."""
    size = limits.block_size
    if variant == "ours":
        future = PlannedFuture(np.arange(len(order)), neighbour_lcp(_ids_of(rows), _rows(order)))
        return BlockManager(limits.num_blocks, size, future=future)
    if variant == "paged_prefix":
        return WholeBlockManager(limits.num_blocks, size)
    if variant == "paged":
        return BlockManager(limits.num_blocks, size, prefix_caching=False)

    def real_length(request: Request) -> int:
        return request.num_prompt_tokens + rows[request.request_id].output_tokens

    def longest(request: Request) -> int:
        return limits.longest_tokens

    # A row's last block may be partly outside its run, and admission keeps one more.
    num_blocks = limits.num_blocks + 2 * limits.max_num_seqs
    run_tokens = real_length if variant == "contiguous_fit" else longest
    return ContiguousManager(num_blocks, size, capacity=limits.capacity, run_tokens=run_tokens)


def run_variant(
    variant: str, rows: Sequence[Row], limits: Limits, machine: Machine, shared_tokens: int
) -> tuple[Figures, dict[int, list[int]]]:
    """Run all rows through a variant.

    Returns:
        The figures, and each row's generated tokens.

    Raises:
        EngineError: a row did not get through.
    """
    order = list(range(len(rows)))
    if variant == "ours":
        order = prefix_order(_ids_of(rows), _rows(order)).tolist()
    scheduler = make_scheduler(variant, rows, limits, machine, order)
    swap_blocks = scheduler.swap_space.num_blocks
    watch = Watch(machine.executor(scheduler.blocks, swap_blocks), scheduler)
    engine = EngineCore(scheduler, watch, clock=machine.clock)
    params = SamplingParams(max_tokens=limits.max_tokens)
    requests = [
        Request.create(row, rows[row].prompt.tolist(), params, max_model_len=limits.capacity)
        for row in order
    ]
    started = machine.clock()
    finished = [request for batch in engine.run(requests) for request in batch]
    seconds = machine.clock() - started
    for request in finished:
        if request.num_output_tokens != rows[request.request_id].output_tokens:
            raise EngineError(f"row {request.request_id} ended early: {request.error}")
    figures = Figures(variant, shared_tokens, machine.simulated, seconds)
    _fill_memory(figures, watch, scheduler, machine)
    _fill_speed(figures, finished, engine, started)
    return figures, {request.request_id: request.output_token_ids for request in finished}


def _fill_memory(figures: Figures, watch: Watch, scheduler: Scheduler, machine: Machine) -> None:
    counters, manager = scheduler.counters, scheduler.blocks
    figures.peak_rows = watch.peak_rows
    figures.peak_kv_bytes = watch.peak_slots * machine.bytes_per_token
    figures.unused_share = watch.sum_unused / watch.sum_slots
    figures.prefill_tokens = counters.prefill_tokens
    figures.recomputed_tokens = counters.recomputed_tokens
    figures.preemptions = counters.preemptions
    if isinstance(manager, ContiguousManager):
        refusals = manager.refusals
        figures.refusals, figures.refused_rows = refusals.count, len(refusals.rows)
        figures.free_at_refusal = refusals.num_free
        figures.hole_at_refusal = refusals.largest_hole


def _fill_speed(
    figures: Figures, finished: Sequence[Request], engine: EngineCore, started: float
) -> None:
    waits = [1000 * ((request.timeline.first_token or 0.0) - started) for request in finished]
    p50, p90, p99 = np.percentile(waits, (50, 90, 99)).tolist()
    figures.ttft_p50_ms, figures.ttft_p90_ms, figures.ttft_p99_ms = p50, p90, p99
    figures.steps = engine.stats.steps
    figures.mean_rows = engine.stats.row_steps / engine.stats.steps
    output_tokens = sum(request.num_output_tokens for request in finished)
    total_tokens = sum(len(request.token_ids) for request in finished)
    figures.output_tokens_per_s = output_tokens / figures.seconds
    figures.total_tokens_per_s = total_tokens / figures.seconds


def _ids_of(rows: Sequence[Row]) -> Callable[[int], Ids]:
    return lambda row: rows[row].prompt


def _rows(order: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.asarray(order, dtype=np.int64)


def compare(
    rows: Sequence[Row], limits: Limits, machine: Machine, shared_tokens: int = 0
) -> list[Figures]:
    """Run the rows through every variant.

    Raises:
        UsageError: the budget does not hold the longest row.
    """
    longest = max(len(row.prompt) for row in rows) + limits.max_tokens
    limits = replace(limits, longest_tokens=limits.longest_tokens or longest)
    if not longest <= limits.longest_tokens <= limits.capacity:
        raise UsageError(
            f"a row may take {longest:,} tokens: that must not be above --longest-tokens "
            f"({limits.longest_tokens:,}), nor that above the budget ({limits.capacity:,} tokens)"
        )
    every: list[Figures] = []
    reference: dict[int, list[int]] = {}
    # The first steps of a process are slow, whoever runs them.
    run_variant("paged", rows[:2], limits, machine, shared_tokens)
    for variant, title in VARIANTS.items():
        print(f"running {title}", file=sys.stderr, flush=True)
        figures, outputs = run_variant(variant, rows, limits, machine, shared_tokens)
        reference = reference or outputs
        figures.equal_outputs = sum(outputs[row] == reference[row] for row in outputs)
        every.append(figures)
    return every
