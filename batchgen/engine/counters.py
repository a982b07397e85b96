"""What the scheduler counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals over the run.

    Attributes:
        prefill_tokens: prompt tokens computed, for the first time.
        recomputed_tokens: tokens computed again after a preemption.
        decode_tokens: a row's own sampled tokens run through the model.
        cached_tokens: prompt tokens found in the cache at first admission.
        sampled_tokens: tokens generated, forced ones among them.
        forced_tokens: of these, tokens taken without a step: their constraint left no other.
        started_requests, finished_requests: requests admitted once, requests ended.
        most_refused_blocks: blocks that the largest request needs which the pool cannot hold; 0
            where there is none.
        preemptions: times a request was preempted.
        swapped_out_blocks, swapped_in_blocks: blocks copied to and from the CPU pool.
    """

    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    started_requests: int = 0
    finished_requests: int = 0
    most_refused_blocks: int = 0
    preemptions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens run through the model."""
        return self.prefill_tokens + self.recomputed_tokens + self.decode_tokens
