"""How much memory a request must find before it starts."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from batchgen.engine.block_manager import AllocationPlan, BlockManager
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.input_batch import InputBatch
from batchgen.engine.plan_builder import PlanBuilder
from batchgen.engine.preemption import Swapper
from batchgen.engine.queues import Queues
from batchgen.engine.request import Request, Status, SwappedBlocks
from batchgen.engine.step import IntArray

# The expectation looks at this many of the rows that finished last.
_RECENT = 512
# Until rows have finished, a row is expected to use this share of its max_tokens.
_FIRST_GUESS = 0.25


class AdmissionPolicy(StrEnum):
    """What a request must find free before it starts, beside its known tokens' blocks.

    ``worst_case`` reserves all that every running row may still come to need, so that
    nothing is ever preempted. ``prompt`` reserves one block for each row that can still
    grow. ``expected`` reserves what the lengths of finished rows suggest. ``auto`` is the
    worst case for rows where it is near or certain (``max_tokens`` adds at most a quarter
    to the prompt, or ``ignore_eos`` is set), else expected. Where a reservation was too
    small, preemption is the safety net.
    """

    AUTO = "auto"
    WORST_CASE = "worst_case"
    EXPECTED = "expected"
    PROMPT = "prompt"


class OutputLengths:
    """Output lengths of the rows that finished last, to expect other rows' by."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._expected: IntArray | None = None

    def add(self, length: int) -> None:
        """Take note of a finished row."""
        self._recent.append(length)
        self._expected = None

    def expect(self, so_far: IntArray, max_tokens: IntArray) -> IntArray:
        """Return the output tokens to expect of rows that have some already.

        It is the mean over the finished rows that went on beyond that point.
        """
        if not self._recent:
            guess = np.round(max_tokens * _FIRST_GUESS).astype(np.int64)
            return np.maximum(so_far + 1, guess)
        if self._expected is None:
            self._expected = _means_beyond(np.array(self._recent))
        known = self._expected
        mean = known[np.minimum(so_far, len(known) - 1)]
        return np.minimum(max_tokens, np.where(so_far < len(known), mean, so_far + 1))


def _means_beyond(lengths: IntArray) -> IntArray:
    """Return for each number of tokens below the highest the mean of the lengths above it."""
    ordered = np.sort(lengths)
    sums_from = np.append(np.cumsum(ordered[::-1])[::-1], 0)
    at = np.searchsorted(ordered, np.arange(max(1, int(ordered[-1]))), side="right")
    means: IntArray = -(-sums_from[at] // np.maximum(1, len(ordered) - at))
    return means


class Admission:
    """Counts the blocks to keep free for what rows may still come to need."""

    def __init__(self, policy: AdmissionPolicy, blocks: BlockManager) -> None:
        self.lengths = OutputLengths()
        self._policy = policy
        self._block_size = blocks.block_size
        # No row ever holds more than this.
        self._most_blocks = min(blocks.pool.num_blocks, blocks.most_blocks_for(1 << 60))

    def growth(self, request: Request, held: int) -> int:
        """Return the blocks to keep free for a request that is to hold ``held``."""
        params = request.params
        growth = self._growth(
            np.array([held]),
            np.array([request.num_prompt_tokens]),
            np.array([request.num_output_tokens]),
            np.array([params.max_tokens]),
            np.array([request.max_total_tokens]),
            np.array([params.ignore_eos]),
        )
        return int(growth[0])

    def growth_of_all(self, running: InputBatch) -> int:
        """Return the blocks to keep free for all running requests."""
        indices = running.indices()
        prompts = running.num_prompt_tokens[indices]
        growth = self._growth(
            running.num_blocks[indices] - running.num_released[indices],
            prompts,
            running.num_known[indices] - prompts,
            running.max_tokens[indices],
            running.max_total_tokens[indices],
            running.ignores_eos[indices],
        )
        return int(growth.sum())

    def _growth(
        self,
        held: IntArray,
        num_prompt_tokens: IntArray,
        num_output_tokens: IntArray,
        max_tokens: IntArray,
        max_total_tokens: IntArray,
        ignores_eos: npt.NDArray[np.bool_],
    ) -> IntArray:
        """Return [R] blocks to keep free for R rows that hold some already."""
        worst = self._blocks_beyond(held, max_total_tokens)
        if self._policy is AdmissionPolicy.WORST_CASE:
            return worst
        if self._policy is AdmissionPolicy.PROMPT:
            # Behind a window a prompt takes its blocks step by step: that is reserved, too.
            return np.minimum(
                worst, np.maximum(1, self._blocks_beyond(held, num_prompt_tokens + 1))
            )
        output = self.lengths.expect(num_output_tokens, max_tokens)
        expected = self._blocks_beyond(held, num_prompt_tokens + output)
        # One block at least: no preemption before a block's length is used up.
        expected = np.minimum(worst, np.maximum(1, expected))
        if self._policy is AdmissionPolicy.EXPECTED:
            return expected
        return np.where(ignores_eos | (4 * max_tokens <= num_prompt_tokens), worst, expected)

    def _blocks_beyond(self, held: IntArray, total_tokens: IntArray) -> IntArray:
        """Count missing blocks; a request's last token is never stored."""
        blocks = -(-(total_tokens - 1) // self._block_size)
        return np.maximum(0, np.minimum(blocks, self._most_blocks) - held)


# Rows that wait for their leader in one step; bounds the search past them.
_MAX_DEFERRED = 128
# Tokens that a row must gain to wait although the step has room for it.
_WORTH_WAITING_TOKENS = 4


class Admitter:
    """Admits swapped and waiting requests while budget, batch indices and memory last."""

    def __init__(
        self,
        queues: Queues,
        blocks: BlockManager,
        admission: Admission,
        swapper: Swapper,
        counters: SchedulerCounters,
        max_num_seqs: int,
        clock: Callable[[], float],
    ) -> None:
        self._queues = queues
        self._running = queues.running
        self._blocks = blocks
        self._admission = admission
        self._swapper = swapper
        self._counters = counters
        self._max_num_seqs = max_num_seqs
        self._clock = clock

    def fill(self, builder: PlanBuilder) -> None:
        """Start what fits into the step."""
        self._resume_swapped(builder)
        self._admit_waiting(builder)

    # -- swapped rows -----------------------------------------------------------------

    def _resume_swapped(self, builder: PlanBuilder) -> None:
        swapped = self._queues.swapped
        while swapped and self._has_place(builder) and self._swap_in(builder, swapped[0]):
            swapped.pop(0)

    def _swap_in(self, builder: PlanBuilder, request: Request) -> bool:
        """Bring a swapped request back to run; False if there is no room yet.

        Leading blocks come from the index where they are still there, the rest from
        the CPU pool. Where neither has a block, the request is computed again.
        """
        assert request.swapped is not None
        if request.swapped.is_windowed:
            return self._swap_in_window(builder, request, request.swapped)
        allocation = self._blocks.plan_allocation(request)
        if not self._fits(builder, request, allocation.needed, allocation.held):
            return False
        copy, request.swapped = request.swapped, None
        num_matched = len(allocation.match.chain)
        if num_matched >= copy.first:
            # The CPU pool has all that follows; no part of a block need be copied.
            self._blocks.take(request, replace(allocation, match=allocation.match.whole_blocks()))
            self._swapper.bring_back(request, copy, num_matched, builder.swap_in)
        else:
            self._take(builder, request, allocation)
        self._swapper.release(copy)
        self._run(builder, request)
        return True

    def _swap_in_window(self, builder: PlanBuilder, request: Request, copy: SwappedBlocks) -> bool:
        needed = self._blocks.window_blocks_needed(request)
        if not self._fits(builder, request, needed, needed):
            return False
        self._blocks.allocate_window(request)
        request.swapped = None
        self._swapper.bring_back(request, copy, copy.first, builder.swap_in)
        self._swapper.release(copy)
        self._run(builder, request)
        return True

    # -- waiting rows -----------------------------------------------------------------

    def _admit_waiting(self, builder: PlanBuilder) -> None:
        """Start waiting rows: first those that gain nothing by waiting, then the others.

        A row that shares a part of a block with one that started in this very step would
        have to compute it; in the next step it is copied. Rows further back that depend
        on nobody take its place meanwhile. Where they do not fill the step, rows start
        all the same that would gain but little.
        """
        waiting = self._queues.waiting
        deferred: list[Request] = []
        while self._may_admit(builder) and len(deferred) < _MAX_DEFERRED:
            request = waiting.popleft()
            allocation = self._blocks.plan_allocation(request)
            if allocation.match.num_pending_tokens:
                deferred.append(request)
            elif not self._start_if_it_fits(builder, request, allocation):
                waiting.appendleft(request)
                break
        still_waiting = [request for request in deferred if not self._start_early(builder, request)]
        waiting.extendleft(reversed(still_waiting))

    def _may_admit(self, builder: PlanBuilder) -> bool:
        return bool(self._queues.waiting) and not self._queues.swapped and self._has_place(builder)

    def _has_place(self, builder: PlanBuilder) -> bool:
        return builder.budget > 0 and len(self._running) < self._max_num_seqs

    def _start_early(self, builder: PlanBuilder, request: Request) -> bool:
        if not self._has_place(builder):
            return False
        allocation = self._blocks.plan_allocation(request)
        if allocation.match.num_pending_tokens >= _WORTH_WAITING_TOKENS:
            return False
        return self._start_if_it_fits(builder, request, allocation)

    def _start_if_it_fits(
        self, builder: PlanBuilder, request: Request, allocation: AllocationPlan
    ) -> bool:
        if not self._fits(builder, request, allocation.needed, allocation.held):
            return False
        self._take(builder, request, allocation)
        if request.timeline.admitted is None:
            request.timeline.admitted = self._clock()
            request.account.cached_tokens = request.num_computed
            self._counters.cached_tokens += request.num_computed
            self._counters.started_requests += 1
        self._run(builder, request)
        return True

    # -- both ---------------------------------------------------------------------------

    def _fits(self, builder: PlanBuilder, request: Request, needed: int, held: int) -> bool:
        """Whether taking ``needed`` available blocks leaves what the policy keeps free.

        Where it does, the request's own growth is kept free from now on; ``held`` is what
        it then has, shared blocks included.
        """
        available = self._blocks.pool.num_available
        if needed > available:
            return False
        if not len(self._running):
            builder.kept = self._admission.growth(request, held)
            return True
        if builder.kept is None:
            builder.kept = self._admission.growth_of_all(self._running)
        growth = self._admission.growth(request, held)
        if needed + builder.kept + growth > available:
            return False
        builder.kept += growth
        return True

    def _take(self, builder: PlanBuilder, request: Request, allocation: AllocationPlan) -> None:
        copy = self._blocks.take(request, allocation)
        if copy is not None:
            builder.copies.append(copy)

    def _run(self, builder: PlanBuilder, request: Request) -> None:
        """Let a request that has its blocks start."""
        request.status = Status.RUNNING
        self._running.join(request)
        index = np.array([request.batch_index])
        wanted = np.array([request.num_uncomputed])
        num_tokens = int(builder.cut(self._running, index, wanted)[0])
        request.num_computed += num_tokens
        self._running.num_computed[index] = request.num_computed
        builder.budget -= num_tokens
        builder.started_indices.append(request.batch_index)
        builder.started_lengths.append(num_tokens)
        self._blocks.publish(request)
