"""Which requests start in a step: those that were swapped out first, then waiting ones."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from batchgen.engine.admission import Admission
from batchgen.engine.block_manager import BlockManager, Claim
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.draft import Draft
from batchgen.engine.queues import Queues
from batchgen.engine.request import Request, Status, SwappedBlocks
from batchgen.engine.swap import Swapper

# Rows that let their leader go first in one step; bounds the search behind them.
_MAX_DEFERRED = 128
# Tokens that a row must gain to wait although the step has room for it.
_WORTH_WAITING_TOKENS = 4


class Starts:
    """Starts requests while budget, seats and memory last."""

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

    def fill(self, draft: Draft) -> None:
        """Start what fits into the step."""
        self._resume_swapped(draft)
        self._admit_waiting(draft)

    # -- swapped rows -----------------------------------------------------------------

    def _resume_swapped(self, draft: Draft) -> None:
        swapped = self._queues.swapped
        while swapped and self._has_place(draft) and self._swap_in(draft, swapped[0]):
            swapped.pop(0)

    def _swap_in(self, draft: Draft, request: Request) -> bool:
        """Bring a swapped request back to run; False where there is no room yet.

        Leading blocks come from the index where they are still there, the rest from
        the CPU pool. Where neither has a block, the request is computed again.
        """
        assert request.swapped is not None
        if request.swapped.behind_window:
            return self._swap_in_behind_window(draft, request, request.swapped)
        claim = self._blocks.claim(request)
        if not self._fits(draft, request, claim.needed, claim.held):
            return False
        copy, request.swapped = request.swapped, None
        num_matched = len(claim.match.chain)
        if num_matched >= copy.first:
            # The CPU pool has all that follows; no part of a block need be copied.
            self._blocks.take(request, replace(claim, match=claim.match.whole_blocks()))
            self._swapper.bring_back(request, copy, num_matched, draft.swap_in)
        else:
            self._take(draft, request, claim)
        self._swapper.release(copy)
        self._run(draft, request)
        return True

    def _swap_in_behind_window(self, draft: Draft, request: Request, copy: SwappedBlocks) -> bool:
        needed = self._blocks.needed_behind_window(request)
        if not self._fits(draft, request, needed, needed):
            return False
        self._blocks.take_behind_window(request)
        request.swapped = None
        self._swapper.bring_back(request, copy, copy.first, draft.swap_in)
        self._swapper.release(copy)
        self._run(draft, request)
        return True

    # -- waiting rows -----------------------------------------------------------------

    def _admit_waiting(self, draft: Draft) -> None:
        """Start waiting rows: first those that gain nothing by waiting, then the others.

        A row that shares a part of a block with one that started in this very step would
        have to compute it; in the next step it is copied. Rows further back that depend
        on nobody take its place meanwhile. Where they do not fill the step, rows start
        all the same that would gain but little.
        """
        waiting = self._queues.waiting
        deferred: list[Request] = []
        while self._may_admit(draft) and len(deferred) < _MAX_DEFERRED:
            request = waiting.popleft()
            claim = self._blocks.claim(request)
            if claim.match.num_pending_tokens:
                deferred.append(request)
            elif not self._start_if_it_fits(draft, request, claim):
                waiting.appendleft(request)
                break
        still_waiting = [request for request in deferred if not self._start_early(draft, request)]
        waiting.extendleft(reversed(still_waiting))

    def _may_admit(self, draft: Draft) -> bool:
        return bool(self._queues.waiting) and not self._queues.swapped and self._has_place(draft)

    def _has_place(self, draft: Draft) -> bool:
        return draft.budget > 0 and len(self._running) < self._max_num_seqs

    def _start_early(self, draft: Draft, request: Request) -> bool:
        if not self._has_place(draft):
            return False
        claim = self._blocks.claim(request)
        if claim.match.num_pending_tokens >= _WORTH_WAITING_TOKENS:
            return False
        return self._start_if_it_fits(draft, request, claim)

    def _start_if_it_fits(self, draft: Draft, request: Request, claim: Claim) -> bool:
        if not self._fits(draft, request, claim.needed, claim.held):
            return False
        self._take(draft, request, claim)
        if request.timeline.admitted is None:
            request.timeline.admitted = self._clock()
            request.account.cached_tokens = request.num_computed
            self._counters.cached_tokens += request.num_computed
            self._counters.started_requests += 1
        self._run(draft, request)
        return True

    # -- both ---------------------------------------------------------------------------

    def _fits(self, draft: Draft, request: Request, needed: int, held: int) -> bool:
        """Whether taking ``needed`` available blocks leaves what the policy keeps free.

        Where it does, the request's own growth is kept free from now on; ``held`` is what
        it then has, shared blocks included.
        """
        available = self._blocks.pool.num_available
        if needed > available:
            return False
        if not len(self._running):
            draft.kept = self._admission.growth(request, held)
            return True
        if draft.kept is None:
            draft.kept = self._admission.growth_of_all(self._running)
        growth = self._admission.growth(request, held)
        if needed + draft.kept + growth > available:
            return False
        draft.kept += growth
        return True

    def _take(self, draft: Draft, request: Request, claim: Claim) -> None:
        copy = self._blocks.take(request, claim)
        if copy is not None:
            draft.copies.append(copy)

    def _run(self, draft: Draft, request: Request) -> None:
        """Let a request that has its blocks start."""
        request.status = Status.RUNNING
        self._running.join(request)
        seat = np.array([request.seat])
        wanted = np.array([request.num_uncomputed])
        num_tokens = int(draft.cut(self._running, seat, wanted)[0])
        request.num_computed += num_tokens
        self._running.num_computed[seat] = request.num_computed
        draft.budget -= num_tokens
        draft.started_seats.append(request.seat)
        draft.started_lengths.append(num_tokens)
        self._blocks.publish(request)
