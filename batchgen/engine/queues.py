"""Where every unfinished request stands: waiting, running, swapped out, or ending."""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from batchgen.engine.input_batch import InputBatch
from batchgen.engine.request import Request, Status


def by_arrival(request: Request) -> int:
    """Order requests as they came."""
    return request.arrival


@dataclass(slots=True)
class Queues:
    """The requests by where they stand; each unfinished one is in exactly one place.

    Attributes:
        running: those with blocks that the next step goes on with.
        waiting: those still to start, preempted ones in front.
        swapped: those whose blocks are in the CPU pool, in the order of their arrival.
        num_ending: those whose last token is sampled but not read; they hold nothing.
        finished: those that ended and were not handed over yet.
        num_arrived: those that ever came.
    """

    running: InputBatch
    waiting: deque[Request] = field(default_factory=deque)
    swapped: list[Request] = field(default_factory=list)
    num_ending: int = 0
    finished: list[Request] = field(default_factory=list)
    num_arrived: int = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.waiting) + len(self.running) + len(self.swapped) + self.num_ending

    @property
    def last_arrival(self) -> int:
        """The arrival of the request in front of which all have started."""
        return (self.waiting[0].arrival if self.waiting else self.num_arrived) - 1

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue that it waits or is swapped in."""
        if request.status is Status.WAITING and request.arrival >= 0:
            with suppress(ValueError):
                self.waiting.remove(request)
        elif request.status is Status.SWAPPED:
            self.swapped.remove(request)

    def take_finished(self) -> list[Request]:
        """Hand over the requests that ended since the last call."""
        finished, self.finished = self.finished, []
        return finished
