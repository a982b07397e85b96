"""Standard output and error that cost no job its night: where nobody reads, nothing is said."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


class Forgiving:
    """Passes text on to a stream until that fails, and is silent from then on.

    The reader of a pipe may end, a terminal may be closed, the disk of a log may be full: the
    rows are somewhere else.

    Args:
        stream: None where the process was started without one.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115

    def write(self, text: str) -> int:
        """Write text, if anybody listens; what the stream cannot spell, as Python would."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError:
            self._fall_silent()
        return len(text)

    def flush(self) -> None:
        """Write what waits, if anybody listens."""
        try:
            self._stream.flush()
        except OSError:
            self._fall_silent()

    def _fall_silent(self) -> None:
        # What waits in the stream's buffers goes the same way, now or when the process ends.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def forgiving_streams() -> Iterator[None]:
    """Let nothing that Python code says fail while the context is open."""
    previous = sys.stdout, sys.stderr
    ours = Forgiving(sys.stdout), Forgiving(sys.stderr)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        for stream in ours:
            stream.flush()
        sys.stdout, sys.stderr = previous


def open_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, so that no file of ours gets their number.

    What libraries in C say on standard error would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
