"""Signals before and between jobs: a flag that the command looks at where it can stop.

Imported before everything else, so it imports next to nothing. The handlers raise nothing: an
exception in the middle of somebody's import may be swallowed there, or come out as another one.
"""

import atexit
import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# `ExitCode.INTERRUPTED`, which would have to be imported.
_INTERRUPTED = 75

_received: list[str] = []


def install() -> None:
    """Note the first signal that asks the process to stop; end it at the second one."""
    for number in STOP_SIGNALS:
        # nohup starts a process with SIGHUP ignored.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)
    # Asks for a state dump, which only a job has; by default it would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Runs last, since it is registered first: the interpreter's own end would otherwise give
    # the signals their default meaning again, and a run that is done the code of a killed one.
    atexit.register(_ignore)


def received() -> str | None:
    """Return the name of the signal that asked the process to stop, if any did."""
    return _received[0] if _received else None


def _note(number: int, frame: FrameType | None) -> None:
    if _received:
        os._exit(_INTERRUPTED)
    _received.append(signal.Signals(number).name)


def _ignore() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
