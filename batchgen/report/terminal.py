"""Progress for people: a bar on a terminal, a plain line now and then everywhere else."""

import sys
from typing import Any, TextIO

from tqdm import tqdm

from batchgen.report.progress import Snapshot

_BAR_EVERY_S = 0.5


class TextDisplay:
    """Writes text.

    Args:
        every_s: seconds between plain lines; a terminal's bar moves twice a second.
        stream: where to write; standard error, so that output can be piped.
    """

    def __init__(self, every_s: float, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: tqdm[None] | None = None
        self.every_s = _BAR_EVERY_S if self._stream.isatty() else every_s

    def say(self, text: str, level: str, event: str, fields: dict[str, Any]) -> None:
        """Write lines above the bar."""
        del event, fields
        tqdm.write(text if level == "info" else f"{level}: {text}", file=self._stream)
        self._stream.flush()

    def begin(self, phase: str) -> None:
        """Write the phase's name."""
        self.say(f"[{phase}]", "info", "", {})

    def end(self, phase: str, seconds: float) -> None:
        """Take the bar away."""
        del phase, seconds
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def show(self, snapshot: Snapshot, tokens_per_s: float) -> None:
        """Move the bar, or write a line."""
        if self._stream.isatty():
            self._show_bar(snapshot, tokens_per_s)
        else:
            self.say(progress_line(snapshot, tokens_per_s), "info", "", {})

    def close(self, exit_code: int) -> None:
        """Nothing is left to do."""

    def _show_bar(self, snapshot: Snapshot, tokens_per_s: float) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=snapshot.total_rows,
                file=self._stream,
                unit="row",
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
            )
        self._bar.n = snapshot.rows
        self._bar.set_postfix_str(_details(snapshot, tokens_per_s))


def progress_line(snapshot: Snapshot, tokens_per_s: float) -> str:
    """Say in a line how the generate phase stands."""
    share = snapshot.rows / snapshot.total_rows if snapshot.total_rows else 1.0
    errors = f" ({snapshot.errors} failed)" if snapshot.errors else ""
    return (
        f"[generate] {share:.1%} rows {snapshot.rows}/{snapshot.total_rows}{errors} | "
        f"{_details(snapshot, tokens_per_s)}"
    )


def _details(snapshot: Snapshot, tokens_per_s: float) -> str:
    return (
        f"{tokens_per_s:,.0f} tok/s | running {snapshot.running} waiting {snapshot.waiting} "
        f"swapped {snapshot.swapped} | pool {snapshot.pool_use:.0%} | "
        f"hits {snapshot.hit_rate:.0%} | ETA {_clock_text(snapshot.eta_s)}"
    )


def _clock_text(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
