"""Progress: the phases of a job and how the generate phase stands, for whoever displays it."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from batchgen.text import printable

# The rate that is shown looks back this far.
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How the generate phase stands.

    Attributes:
        rows: output rows that are finished, of ``total_rows``.
        errors: finished rows that failed.
        prefill_tokens: prompt tokens computed so far.
        completion_tokens: tokens generated so far.
        running, waiting, swapped: requests in the engine's queues.
        pool_use: share of the pool's blocks that rows hold.
        hit_rate: share of the admitted prompt tokens that came from the cache.
        eta_s: estimate of the seconds left; None while nothing can be said.
    """

    rows: int
    total_rows: int
    errors: int
    prefill_tokens: int
    completion_tokens: int
    running: int
    waiting: int
    swapped: int
    pool_use: float
    hit_rate: float
    eta_s: float | None


class Display(Protocol):
    """Somewhere a job's progress is shown.

    Attributes:
        every_s: seconds between two showings of the generate phase.
    """

    every_s: float

    def say(self, text: str, level: str, event: str, fields: dict[str, Any]) -> None:
        """Tell people something; ``level`` is info, warning or error."""

    def begin(self, phase: str) -> None:
        """A phase has begun."""

    def end(self, phase: str, seconds: float) -> None:
        """A phase has ended."""

    def show(self, snapshot: Snapshot, tokens_per_s: float) -> None:
        """Show how the generate phase stands."""

    def close(self, exit_code: int) -> None:
        """The job has ended."""


class Progress:
    """Names the phases, times them, and shows the generate phase.

    Args:
        displays: where.
        clock: in seconds; it does not jump.

    Attributes:
        phase_s: seconds spent in each phase so far.
    """

    def __init__(
        self, displays: Sequence[Display], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.phase_s: dict[str, float] = {}
        self._displays = displays
        self._clock = clock
        self._shown_at = [float("-inf")] * len(displays)
        self._history: deque[tuple[float, int]] = deque()

    def say(self, text: str, *, level: str = "info", event: str = "message", **fields: Any) -> None:
        """Tell people something.

        Args:
            text: for people, one line or several.
            level: info, warning or error.
            event: what it is, for programs.
            fields: its figures, for programs.
        """
        text = printable(text)
        for display in self._displays:
            display.say(text, level, event, fields)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a phase and add its time to :attr:`phase_s`."""
        for display in self._displays:
            display.begin(name)
        started = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - started
            self.phase_s[name] = self.phase_s.get(name, 0.0) + spent
            for display in self._displays:
                display.end(name, spent)

    def update(self, take: Callable[[], Snapshot], *, last: bool = False) -> None:
        """Show how the generate phase stands, where it is time to.

        Args:
            take: makes the snapshot; called only when it is shown.
            last: show it whatever the time.
        """
        now = self._clock()
        due = [
            number
            for number, display in enumerate(self._displays)
            if last or now - self._shown_at[number] >= display.every_s
        ]
        if not due:
            return
        snapshot = take()
        rate = self._rate(now, snapshot.prefill_tokens + snapshot.completion_tokens)
        for number in due:
            self._shown_at[number] = now
            self._displays[number].show(snapshot, rate)

    def close(self, exit_code: int) -> None:
        """Tell the displays how the job has ended."""
        for display in self._displays:
            display.close(exit_code)

    def _rate(self, now: float, done: int) -> float:
        """Give tokens per second over the window."""
        self._history.append((now, done))
        while now - self._history[0][0] > _WINDOW_S and len(self._history) > 2:
            self._history.popleft()
        then, before = self._history[0]
        return (done - before) / (now - then) if now > then else 0.0
