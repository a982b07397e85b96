"""The engine: schedules, executes and commits steps until all requests have ended."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from batchgen.engine.request import Request
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import IntArray, StepPlan
from batchgen.errors import EngineError


class Executor(Protocol):
    """Runs step plans on a device."""

    def execute(self, plan: StepPlan) -> IntArray:
        """Run a plan; return its S sampled tokens, or what stands for one (``NO_TOKEN``)."""


@dataclass(slots=True)
class PoolPeak:
    """The pool at the moment most blocks were owned."""

    owned: int = 0
    cached: int = 0
    free: int = 0


@dataclass(slots=True)
class EngineStats:
    """Totals over all steps; times in seconds.

    Attributes:
        steps: forward passes.
        decode_steps: passes that sampled at least one token.
        prefill_s: time of the passes, by prefill's share of their tokens.
        decode_s: the rest of that time.
        recompute_s: of all that, the share of tokens computed again after a preemption.
        scheduler_s: time spent planning and committing.
        kv_blocks_read: blocks attended to, summed over rows and steps.
        row_steps: rows, summed over steps; over ``steps`` it is the mean batch.
        logical_blocks: block table entries, summed over steps.
        physical_blocks: distinct blocks behind them, summed over steps.
        peak_sharing: the highest ratio of the two in one step.
        peak: the pool when most blocks were owned.
        peak_demand: blocks that running and preempted requests wanted at once, at most.
        peak_running: most requests running at once.
    """

    steps: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    recompute_s: float = 0.0
    scheduler_s: float = 0.0
    kv_blocks_read: int = 0
    row_steps: int = 0
    logical_blocks: int = 0
    physical_blocks: int = 0
    peak_sharing: float = 0.0
    peak: PoolPeak = field(default_factory=PoolPeak)
    peak_demand: int = 0
    peak_running: int = 0


class Engine:
    """Runs requests through a scheduler and an executor.

    Args:
        lookahead: requests pulled from the source before they can run; memory stays
            bounded however many there are.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        lookahead: int = 1024,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._executor = executor
        self._lookahead = lookahead
        self._clock = clock

    def run(self, requests: Iterable[Request]) -> Iterator[list[Request]]:
        """Run all requests.

        Yields:
            After each step the requests that ended in it, possibly none, so that the
            caller can look at signals and progress between steps.

        Raises:
            EngineError: nothing can be scheduled although requests are left.
        """
        source = iter(requests)
        while True:
            missing = self._lookahead - len(self.scheduler.waiting)
            for request in islice(source, max(0, missing)):
                self.scheduler.add(request)
            ran = self.step()
            finished = self.scheduler.take_finished()
            yield finished
            if not (ran or finished or self.scheduler.num_unfinished):
                return

    def step(self) -> bool:
        """Plan, execute and commit one step; False where there was nothing to run.

        Raises:
            EngineError: nothing can be scheduled, or the executor failed.
        """
        started = self._clock()
        counters = self.scheduler.counters
        before = counters.decode_tokens, counters.recomputed_tokens
        plan = self.scheduler.schedule()
        planned = self._clock()
        if plan is None:
            return False
        try:
            tokens = self._executor.execute(plan)
        except Exception as error:
            state = self.scheduler.describe()
            raise EngineError(f"step {plan.step} failed: {error} ({state})") from error
        executed = self._clock()
        decoded = counters.decode_tokens - before[0]
        recomputed = counters.recomputed_tokens - before[1]
        self.scheduler.costs.observe_step(plan.num_tokens, executed - planned)
        self._measure(plan, executed - planned, decoded, recomputed)
        self.scheduler.commit(plan, tokens)
        self.stats.scheduler_s += planned - started + self._clock() - executed
        return True

    def _measure(self, plan: StepPlan, seconds: float, decoded: int, recomputed: int) -> None:
        stats, manager = self.stats, self.scheduler.blocks
        stats.steps += 1
        stats.decode_steps += len(plan.samples) > 0
        decode_share = decoded / plan.num_tokens
        stats.decode_s += seconds * decode_share
        stats.prefill_s += seconds * (1 - decode_share)
        stats.recompute_s += seconds * recomputed / plan.num_tokens
        blocks_read = int((-(-plan.context_lens // manager.block_size)).sum())
        stats.kv_blocks_read += blocks_read
        stats.row_steps += plan.num_rows
        owned = manager.pool.num_owned
        logical = self.scheduler.running.num_held_blocks()
        stats.logical_blocks += logical
        stats.physical_blocks += owned
        stats.peak_sharing = max(stats.peak_sharing, logical / owned)
        stats.peak_demand = max(stats.peak_demand, self.scheduler.demand_blocks())
        stats.peak_running = max(stats.peak_running, len(self.scheduler.running))
        if owned > stats.peak.owned:
            stats.peak = PoolPeak(owned, manager.pool.num_cached, manager.pool.num_free)
