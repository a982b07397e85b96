"""Progress: a bar on a terminal, a plain line now and then everywhere else."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

# The rate behind the ETA looks back this far.
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How the generate phase stands.

    Attributes:
        rows: output rows that are finished, of ``total_rows``.
        errors: finished rows that failed.
        prefill_tokens: prompt tokens computed so far.
        completion_tokens: tokens generated so far.
        remaining_tokens: estimate of what is left to compute and generate.
        running, waiting, swapped: requests in the engine's queues.
        pool_use: share of the pool's blocks that rows hold.
        hit_rate: share of the admitted prompt tokens that came from the cache.
    """

    rows: int
    total_rows: int
    errors: int
    prefill_tokens: int
    completion_tokens: int
    remaining_tokens: int
    running: int
    waiting: int
    swapped: int
    pool_use: float
    hit_rate: float


class Progress:
    """Names the phases, times them, and shows the generate phase.

    Args:
        every_s: seconds between plain lines; a terminal's bar moves twice a second.
        stream: where to write; standard error, so that output can be piped.

    Attributes:
        phase_s: seconds spent in each phase so far.
    """

    def __init__(
        self,
        every_s: float,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase_s: dict[str, float] = {}
        self._stream = stream or sys.stderr
        self._clock = clock
        self._bar: tqdm[None] | None = None
        self._every_s = 0.5 if self._stream.isatty() else every_s
        self._shown_at = float("-inf")
        self._history: deque[tuple[float, int]] = deque()

    def say(self, text: str) -> None:
        """Write lines above the bar."""
        tqdm.write(text, file=self._stream)
        self._stream.flush()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a phase and add its time to :attr:`phase_s`."""
        self.say(f"[{name}]")
        started = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - started
            self.phase_s[name] = self.phase_s.get(name, 0.0) + spent
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def update(self, take: Callable[[], Snapshot], *, last: bool = False) -> None:
        """Show how the generate phase stands, if it is time to.

        Args:
            take: makes the snapshot; called only when it is shown.
            last: show it whatever the time.
        """
        now = self._clock()
        if not last and now - self._shown_at < self._every_s:
            return
        self._shown_at = now
        snapshot = take()
        rates = self._rates(now, snapshot)
        if self._stream.isatty():
            self._show_bar(snapshot, rates)
        else:
            self.say(_line(snapshot, *rates))

    def _rates(self, now: float, snapshot: Snapshot) -> tuple[float, float | None]:
        """Give tokens per second over the window, and seconds left where known."""
        done = snapshot.prefill_tokens + snapshot.completion_tokens
        self._history.append((now, done))
        while now - self._history[0][0] > _WINDOW_S and len(self._history) > 2:
            self._history.popleft()
        then, before = self._history[0]
        rate = (done - before) / (now - then) if now > then else 0.0
        return rate, snapshot.remaining_tokens / rate if rate else None

    def _show_bar(self, snapshot: Snapshot, rates: tuple[float, float | None]) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=snapshot.total_rows,
                file=self._stream,
                unit="row",
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
            )
        self._bar.n = snapshot.rows
        self._bar.set_postfix_str(_details(snapshot, *rates))


def _line(snapshot: Snapshot, rate: float, left_s: float | None) -> str:
    share = snapshot.rows / snapshot.total_rows if snapshot.total_rows else 1.0
    errors = f" ({snapshot.errors} failed)" if snapshot.errors else ""
    return (
        f"[generate] {share:.1%} rows {snapshot.rows}/{snapshot.total_rows}{errors} | "
        f"{_details(snapshot, rate, left_s)}"
    )


def _details(snapshot: Snapshot, rate: float, left_s: float | None) -> str:
    return (
        f"{rate:,.0f} tok/s | running {snapshot.running} waiting {snapshot.waiting} "
        f"swapped {snapshot.swapped} | pool {snapshot.pool_use:.0%} | "
        f"hits {snapshot.hit_rate:.0%} | ETA {_clock_text(left_s)}"
    )


def _clock_text(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
