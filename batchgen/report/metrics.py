"""`_metrics.jsonl`: how the engine stood, a line a second at first, and never very many lines."""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

MOST_LINES = 20_000


class MetricsLog:
    """Appends samples to a file, not more often than every ``every_s`` seconds.

    A file of ``most_lines`` lines is thinned: every other line goes, and from then on lines
    come half as often. So a run of any length leaves a series that covers all of it, with
    between half of ``most_lines`` and all of them.

    A line is whole or missing: a run that is killed leaves at most one torn line at the
    end, which the next run begins on a line of its own.

    Args:
        path: the file; runs that go on append to it.
        every_s: seconds between two samples at first.
        most_lines: lines in the file at most.
        clock: in seconds; it does not jump.
    """

    def __init__(
        self,
        path: Path,
        every_s: float = 1.0,
        most_lines: int = MOST_LINES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._every_s = every_s
        self._most_lines = most_lines
        self._clock = clock
        self._written_at = float("-inf")
        self._lines = 0
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        content = self._path.read_bytes() if self._path.exists() else b""
        self._lines = content.count(b"\n")
        self._file = self._path.open("a", encoding="utf-8")
        if content and not content.endswith(b"\n"):
            self._file.write("\n")
            self._lines += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._file is not None
        self._file.close()

    def sample(self, take: Callable[[], Mapping[str, Any]]) -> None:
        """Write a line if it is time to; ``take`` is called only then."""
        now = self._clock()
        if now - self._written_at < self._every_s:
            return
        assert self._file is not None
        self._written_at = now
        if self._lines >= self._most_lines:
            self._thin()
        self._file.write(json.dumps({"time": round(time.time(), 3), **take()}) + "\n")
        self._file.flush()
        self._lines += 1

    def _thin(self) -> None:
        """Leave out every other line; the file is replaced whole."""
        assert self._file is not None
        self._file.close()
        kept = self._path.read_bytes().splitlines(keepends=True)[1::2]
        # Named as what a killed run leaves and the next one sweeps.
        temporary = self._path.with_name(f"_tmp-{os.getpid()}-00000000-{self._path.name}.tmp")
        try:
            temporary.write_bytes(b"".join(kept))
            temporary.replace(self._path)
        finally:
            # Whatever happened, there is a file to write to.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._lines = len(kept)
        self._every_s *= 2
