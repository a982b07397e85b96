"""SIGTERM and SIGINT: stop cleanly, keep what is finished, exit 75."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from batchgen.errors import JobInterruptedError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(KeyboardInterrupt):
    """A signal came.

    Not an ``Exception``: it may come up anywhere, and code that turns what fails into a
    bad row or a bad model must not take it for that.
    """


class Interrupts:
    """Turns signals into :class:`StopRequested` while the context is open.

    Everywhere but in :meth:`held` it is raised where the signal arrives: loading and
    planning leave nothing behind. There the first signal only sets a flag, so that a
    step's tokens are not lost half-way; a second one raises at once. What leaves the
    context is a :class:`JobInterruptedError`.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._defer = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, StopRequested):
            raise JobInterruptedError(f"{error}; run the same command again to go on") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold a signal back until :meth:`check`."""
        self._defer = True
        try:
            yield
        finally:
            self._defer = False

    def check(self) -> None:
        """Raise if a signal has come.

        Raises:
            StopRequested: it has.
        """
        if self._name is not None:
            raise StopRequested(f"stopped by {self._name}")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        first = self._name is None
        self._name = signal.Signals(number).name
        if not (self._defer and first):
            self.check()
