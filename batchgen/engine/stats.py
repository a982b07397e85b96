"""What the engine counts and times over all steps of a run."""

from dataclasses import dataclass, field

from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import StepPlan


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
        scheduler_s: time spent scheduling while no step was in flight.
        kv_blocks_read: blocks attended to, summed over rows and steps.
        row_steps: rows, summed over steps; over ``steps`` it is the mean batch.
        logical_blocks: block table entries, summed over steps.
        physical_blocks: distinct blocks behind them, summed over steps.
        peak_sharing: the highest ratio of the two in one step.
        peak: the pool when most blocks were owned.
        peak_demand: blocks that running and preempted requests wanted at once, at most.
        peak_running: most requests running at once.
        out_of_memory: passes that found no memory on the device.
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
    out_of_memory: int = 0

    def note_time(self, num_tokens: int, seconds: float, decoded: int, recomputed: int) -> None:
        """Take note of a pass.

        Args:
            num_tokens: of the pass.
            seconds: that it took.
            decoded, recomputed: its tokens that are rows' own, and that are not new.
        """
        decode_share = decoded / num_tokens
        self.decode_s += seconds * decode_share
        self.prefill_s += seconds * (1 - decode_share)
        self.recompute_s += seconds * recomputed / num_tokens

    def note_pool(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """Take note of the pool under a step that was just planned."""
        manager = scheduler.blocks
        self.steps += 1
        self.decode_steps += len(plan.samples) > 0
        self.kv_blocks_read += int((-(-plan.context_lens // manager.block_size)).sum())
        self.row_steps += plan.num_rows
        owned = manager.pool.num_owned
        logical = scheduler.running.num_held_blocks()
        self.logical_blocks += logical
        self.physical_blocks += owned
        self.peak_sharing = max(self.peak_sharing, logical / owned)
        self.peak_demand = max(self.peak_demand, scheduler.demand_blocks())
        self.peak_running = max(self.peak_running, len(scheduler.running))
        if owned > self.peak.owned:
            self.peak = PoolPeak(owned, manager.pool.num_cached, manager.pool.num_free)
