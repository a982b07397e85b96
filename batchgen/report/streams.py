"""Standard output and error that cost no job its night: nothing waits for a reader.

Whatever Python code prints goes into a bounded queue, and a thread writes it. Where nobody
reads a pipe or a terminal is stopped, the thread waits, the queue fills, and further messages
are dropped and counted. Where writing fails, the stream is silent from then on.
"""

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

MAX_QUEUED = 20_000
# How long the end of a command waits for a reader that takes nothing.
PATIENCE_S = 2.0
# Written at once: so much stays together on a pipe that several processes write to.
_CHUNK = 4096


class Outbox:
    """Writes messages to descriptors in a thread of its own, in order.

    Attributes:
        dropped: messages dropped so far because the queue was full.
    """

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self.dropped = 0
        self._max_queued = max_queued
        # Unlike a `queue.Queue`, a signal handler may put something while a thread does.
        self._queue: SimpleQueue[tuple[int, bytes] | threading.Event] = SimpleQueue()
        self._descriptors: set[int] = set()
        self._silent: set[int] = set()
        self._num_written = 0
        threading.Thread(target=self._write, name="batchgen-outbox", daemon=True).start()

    def put(self, descriptor: int, content: bytes) -> None:
        """Queue a message, or drop it where the queue is full."""
        if self._queue.qsize() >= self._max_queued:
            self.dropped += 1
            return
        self._descriptors.add(descriptor)
        self._queue.put((descriptor, content))

    def drain(self, patience_s: float = PATIENCE_S) -> bool:
        """Wait until all messages so far are written, as long as somebody reads.

        Returns:
            Whether they are written.
        """
        reached = threading.Event()
        self._queue.put(reached)
        written = -1
        while written != self._num_written:
            written = self._num_written
            if reached.wait(patience_s):
                return True
        return False

    def close(self) -> None:
        """Wait for the messages as :meth:`drain` does, and end."""
        if not self.drain():
            # What the interpreter itself says while it ends must not wait for a reader either.
            for descriptor in self._descriptors:
                self._fall_silent(descriptor)
        self._queue.put(_END)

    def _write(self) -> None:
        while (message := self._queue.get()) is not _END:
            if isinstance(message, threading.Event):
                message.set()
            else:
                descriptor, content = message
                for start in range(0, len(content), _CHUNK):
                    self._write_chunk(descriptor, content[start : start + _CHUNK])

    def _write_chunk(self, descriptor: int, rest: bytes) -> None:
        while rest and descriptor not in self._silent:
            try:
                written = os.write(descriptor, rest)
            except BlockingIOError:
                # Somebody who shares the descriptor has set it so.
                select.select([], [descriptor], [])
            except OSError:
                self._fall_silent(descriptor)
            else:
                rest = rest[written:]
                self._num_written += written

    def _fall_silent(self, descriptor: int) -> None:
        """Let what libraries in C write, and what is written later, go nowhere as well."""
        self._silent.add(descriptor)
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


_END = threading.Event()


class QueuedStream:
    """A text stream whose text goes through an outbox.

    Args:
        stream: whose descriptor is written to; None where the process was started without one.
        outbox: shared by all streams, so that their order is kept.
    """

    def __init__(self, stream: TextIO | None, outbox: Outbox) -> None:
        self._stream = stream or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        self._outbox = outbox
        self._descriptor = _descriptor_of(self._stream)

    def write(self, text: str) -> int:
        """Queue text; what the stream cannot spell, as Python would write it."""
        if self._descriptor is None:
            # Held in memory, as by tests: nobody has to read it.
            self._stream.write(text)
        else:
            encoding = self._stream.encoding or "utf-8"
            self._outbox.put(self._descriptor, text.encode(encoding, "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: what is queued is written as soon as somebody reads."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _descriptor_of(stream: TextIO) -> int | None:
    with suppress(OSError, ValueError):
        stream.flush()
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


# Those in use: one, but where `main` is called within `main`.
_open: list[Outbox] = []


@contextmanager
def queued_streams() -> Iterator[Outbox]:
    """Let nothing that Python code says wait or fail while the context is open."""
    previous = sys.stdout, sys.stderr
    outbox = Outbox()
    _open.append(outbox)
    sys.stdout, sys.stderr = (QueuedStream(each, outbox) for each in previous)
    try:
        yield outbox
    finally:
        _open.remove(outbox)
        sys.stdout, sys.stderr = previous
        outbox.close()


def drain() -> None:
    """Give what has been said a moment to be read, before the process is ended."""
    for outbox in _open:
        outbox.drain()


def open_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, so that no file of ours gets their number.

    What libraries in C say on standard error would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
