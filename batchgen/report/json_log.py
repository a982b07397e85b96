"""`log.format=json`: all that a run prints as JSON, one object a line, on standard error.

Every line has ``time`` (UTC, ISO 8601), ``level`` (info, warning, error), ``event`` and
``message``; what else it has depends on the event alone. docs/operations.md lists the events.
"""

import io
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, TextIO

from batchgen.report.progress import Snapshot

EVENTS = (
    *("job_started", "phase_started", "phase_ended", "progress", "message", "log", "output"),
    *("summary", "error", "job_ended"),
)


class JsonLines:
    """Writes events; threads can share it, and a signal's handler can break into it.

    Args:
        stream: gets a line for each event, whole and at once.
        clock: seconds since 1970.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.time) -> None:
        self._stream = stream
        self._clock = clock

    def write(self, event: str, message: str, level: str = "info", **fields: Any) -> None:
        """Write one line.

        Args:
            event: what happened, one of ``EVENTS``.
            message: the same for people.
            level: info, warning or error.
            fields: its figures.
        """
        assert event in EVENTS, event
        when = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        content = {"time": when, "level": level, "event": event, "message": message, **fields}
        line = json.dumps(_finite(content), default=str) + "\n"
        # One call, so that lines of several threads, and processes on one pipe, stay apart.
        self._stream.write(line)
        self._stream.flush()


class JsonDisplay:
    """A display of progress that writes events."""

    def __init__(self, every_s: float, lines: JsonLines) -> None:
        self.every_s = every_s
        self._lines = lines

    def say(self, text: str, level: str, event: str, fields: dict[str, Any]) -> None:
        """Write what is told."""
        self._lines.write(event, text, level, **fields)

    def begin(self, phase: str) -> None:
        """Write ``phase_started``."""
        self._lines.write("phase_started", f"[{phase}]", phase=phase)

    def end(self, phase: str, seconds: float) -> None:
        """Write ``phase_ended``."""
        message = f"[{phase}] took {seconds:.1f} s"
        self._lines.write("phase_ended", message, phase=phase, seconds=round(seconds, 3))

    def show(self, snapshot: Snapshot, tokens_per_s: float) -> None:
        """Write ``progress``."""
        message = f"{snapshot.rows} of {snapshot.total_rows} rows"
        figures = {**asdict(snapshot), "tokens_per_s": round(tokens_per_s, 1)}
        self._lines.write("progress", message, **figures)

    def close(self, exit_code: int) -> None:
        """Leave it to the command, which knows the failures before the job, too."""


class _Stray(io.TextIOBase):
    """A standard error that makes events of what others write to it."""

    def __init__(self, lines: JsonLines) -> None:
        super().__init__()
        self.lines = lines
        self._rest = ""

    def write(self, text: str) -> int:
        """Take text; what ends a line becomes an event, what is overwritten on a terminal not."""
        lines = (self._rest + text).split("\n")
        kept = "\n".join(line.rsplit("\r", 1)[-1] for line in lines)
        self._rest = "" if kept.endswith("\n") else kept
        if kept.endswith("\n") and kept.strip():
            self.lines.write("output", kept.strip(), "warning")
        return len(text)

    def writable(self) -> bool:
        """It is."""
        return True


class _Records(logging.Handler):
    """Makes events of what modules log."""

    def __init__(self, lines: JsonLines) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        level = "warning" if record.levelno < logging.ERROR else "error"
        self._lines.write("log", record.getMessage(), level, logger=record.name)


@contextmanager
def json_on_stderr() -> Iterator[JsonLines]:
    """Let all that Python code writes to standard error be events while the context is open.

    What a library in C writes there, as on a crash, stays what it is.
    """
    previous, root = sys.stderr, logging.getLogger()
    lines = JsonLines(previous)
    handler, stray = _Records(lines), _Stray(lines)
    sys.stderr = stray
    root.addHandler(handler)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        stray.write("\n")
        sys.stderr = previous


def stderr_lines() -> JsonLines:
    """Give the lines of standard error, as :func:`json_on_stderr` set them up where it did."""
    stream = sys.stderr
    return stream.lines if isinstance(stream, _Stray) else JsonLines(stream)


def _finite(value: Any) -> Any:
    """Put null for what JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
