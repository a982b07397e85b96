"""`_metrics.jsonl`: how the engine stood, a line a second."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO


class MetricsLog:
    """Appends samples to a file, not more often than every ``every_s`` seconds.

    A line is whole or missing: a run that is killed leaves at most one torn line at the
    end, which the next run begins on a line of its own.
    """

    def __init__(
        self, path: Path, every_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._every_s = every_s
        self._clock = clock
        self._written_at = float("-inf")
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        torn = self._path.exists() and self._path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = self._path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")
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
        self._file.write(json.dumps({"time": round(time.time(), 3), **take()}) + "\n")
        self._file.flush()
