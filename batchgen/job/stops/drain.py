"""Ending a run before its rows: what has not started does not start, what runs ends."""

from collections.abc import Iterator

from batchgen.engine.request import Request
from batchgen.engine.scheduler import Scheduler


class Drain:
    """Stands between the planned requests and the engine.

    Attributes:
        is_open: requests still come through.
    """

    def __init__(self, requests: Iterator[Request]) -> None:
        self.is_open = True
        self._requests = requests

    def requests(self) -> Iterator[Request]:
        """Yield the requests until :meth:`close`."""
        while self.is_open:
            request = next(self._requests, None)
            if request is None:
                return
            yield request

    def close(self, scheduler: Scheduler) -> None:
        """Let no request start any more; those that had to make room still go on.

        Waiting requests hold nothing yet, so they can be dropped; the plan of the next run
        has them again.
        """
        self.is_open = False
        # Preempted requests stand in front of all that never started.
        while scheduler.waiting and scheduler.waiting[-1].timeline.admitted is None:
            scheduler.waiting.pop()
