"""How a request leaves: through one exit, which frees all that it holds."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from batchgen.engine.admission import OutputLengths
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.queues import Queues
from batchgen.engine.request import FinishReason, Request, Status
from batchgen.engine.running import Sitting
from batchgen.engine.swap import Swapper
from batchgen.errors import RowError


@dataclass(slots=True)
class UnreadPlans:
    """The plans whose tokens are not read yet: at most two.

    Attributes:
        sittings: who samples in each.
        growth: by request, the blocks that the last plan added to its table, and its peak
            before.
    """

    sittings: deque[Sitting] = field(default_factory=deque)
    growth: dict[int, tuple[int, int]] = field(default_factory=dict)


class Exits:
    """Ends requests, for good or for want of their last token only."""

    def __init__(
        self,
        queues: Queues,
        blocks: BlockManager,
        swapper: Swapper,
        counters: SchedulerCounters,
        lengths: OutputLengths,
        clock: Callable[[], float],
    ) -> None:
        self._queues = queues
        self._blocks = blocks
        self._swapper = swapper
        self._counters = counters
        self._lengths = lengths
        self._clock = clock
        self.unread = UnreadPlans()

    def leave_early(self, request: Request) -> None:
        """Let a request go whose last token is sampled, but not read."""
        request.left_in_index = self._blocks.private_nodes(request)
        self._queues.running.leave(request)
        self._blocks.release(request)
        request.status = Status.ENDING
        self._queues.num_ending += 1
        if request.scores is None:
            self._lengths.add(request.num_output_tokens)

    def fill_pool(self, request: Request) -> None:
        """End a request that no memory could ever help: its length is what it has."""
        if request.has_unread_token:
            self.leave_early(request)
        else:
            self._finish(request, FinishReason.LENGTH, None)

    def fail(self, request: Request, error: RowError) -> None:
        """End a request, wherever it stands, without letting others use its KV."""
        self._withdraw(request)
        request.error = error
        self._blocks.discard(request)
        self._finish(request, FinishReason.ERROR, None)

    def finish(self, request: Request, reason: FinishReason, stop_reason: str | None) -> None:
        """End a request, wherever it stands, by what it has come to."""
        self._withdraw(request)
        self._finish(request, reason, stop_reason)

    def _withdraw(self, request: Request) -> None:
        """Take a request that is about to end out of where it stands."""
        self._queues.withdraw(request)
        if request.status is Status.RUNNING:
            self._take_back_growth(request)

    def _take_back_growth(self, request: Request) -> None:
        """Take from a request's account what it took for a step after its end."""
        running, seat = self._queues.running, request.seat
        is_ahead = running.num_computed[seat] >= running.num_known[seat]
        if not (self.unread.sittings and is_ahead):
            return
        self._counters.decode_tokens -= 1
        if request.request_id in self.unread.growth:
            self._blocks.take_back(request, *self.unread.growth[request.request_id])

    def _finish(self, request: Request, reason: FinishReason, stop_reason: str | None) -> None:
        self._queues.running.leave(request)
        if request.has_unread_token:
            request.token_ids.pop()
        was_ending = request.status is Status.ENDING
        self._queues.num_ending -= was_ending
        request.left_in_index = []
        self._blocks.release(request)
        if request.swapped is not None:
            self._swapper.release(request.swapped)
            request.swapped = None
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.timeline.finished = self._clock()
        self._counters.finished_requests += 1
        if request.error is None and request.scores is None and not was_ending:
            self._lengths.add(request.num_output_tokens)
        self._queues.finished.append(request)
