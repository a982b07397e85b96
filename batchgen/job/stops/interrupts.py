"""SIGTERM, SIGINT, SIGHUP and the end of the time budget: stop cleanly, keep what is finished.

SIGUSR1 asks for a state dump and stops nothing.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from batchgen import early_signals
from batchgen.errors import BatchgenError, EngineError, ExitCode, JobInterruptedError

_SHOWN_FRAMES = 6


class StopRequested(KeyboardInterrupt):
    """The run has been asked to stop.

    Not an ``Exception``: it may come up anywhere, and code that turns what fails into a
    bad row or a bad model must not take it for that.
    """


class Stalled(StopRequested):
    """The job makes no progress; what is caught as the bad row it hangs at would go on."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(str(error))
        self.error = error


class Interrupts:
    """Turns signals into :class:`StopRequested` while the context is open.

    Everywhere but in :meth:`held` it is raised where the signal arrives, since loading and
    planning leave nothing behind, and a second signal ends the process. In :meth:`held` the
    first signal only sets a flag, so that a step's tokens are not lost half-way, a second one
    raises at once, and a third one ends the process. What leaves the context is a
    :class:`JobInterruptedError`.

    Args:
        alarm_s: seconds after which the run is asked to stop, as by a signal.
        alarm_reason: what is said then to have stopped it.
        say: takes what a state dump prints outside :meth:`held`.
    """

    def __init__(
        self,
        *,
        alarm_s: float | None = None,
        alarm_reason: str = "",
        say: Callable[[str], None] = print,
    ) -> None:
        self._alarm_s = alarm_s
        self._alarm_reason = alarm_reason
        self._say = say
        self._reason: str | None = None
        self._num_signals = 0
        self._defer = False
        self._dump_asked = False
        self._failure: Exception | Stalled | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (*early_signals.STOP_SIGNALS, signal.SIGALRM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._stop)
        # One that came just before.
        self._reason = early_signals.received()
        self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._dump)
        if self._alarm_s is not None:
            # An interval of 0 would never come.
            signal.setitimer(signal.ITIMER_REAL, max(self._alarm_s, 1e-6))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._alarm_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, Stalled):
            raise error.error from None
        if isinstance(error, Exception) and not isinstance(error, BatchgenError) and self._reason:
            # A library may turn the exception that a signal raised into one of its own.
            stopped: BaseException | None = StopRequested(f"stopped by {self._reason}")
        else:
            stopped = error
        if isinstance(stopped, StopRequested):
            raise JobInterruptedError(f"{stopped}; run the same command again to go on") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold a signal back until :meth:`check`."""
        self._defer = True
        try:
            yield
        finally:
            self._defer = False

    def check(self) -> None:
        """Raise if the run has been asked to stop.

        Raises:
            StopRequested: it has.
        """
        if self._reason is not None:
            raise StopRequested(f"stopped by {self._reason}")

    def take_dump_request(self) -> bool:
        """Whether a state dump has been asked for since the last call."""
        asked, self._dump_asked = self._dump_asked, False
        return asked

    def give_up(self, failure: Exception | Stalled) -> None:
        """Raise a failure in the main thread, wherever it is; for other threads to call."""
        self._failure = failure
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGALRM)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        first = self._reason is None
        is_alarm = number == signal.SIGALRM
        self._num_signals += not is_alarm
        if self._num_signals > 1 + self._defer:
            os._exit(ExitCode.INTERRUPTED)
        self._reason = self._alarm_reason if is_alarm else signal.Signals(number).name
        if not (self._defer and first):
            self.check()

    def _dump(self, number: int, frame: FrameType | None) -> None:
        del number
        if self._defer:
            self._dump_asked = True
            return
        stack = "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:])
        self._say(f"state: the engine does not run; the process is at\n{stack.rstrip()}")
