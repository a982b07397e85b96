"""The end of a process whose interpreter is stuck in one call of C code.

Such a call, as of ``9 ** 9 ** 9``, keeps every other Python thread from running. Timers of the
C library need no interpreter: one prints the current activity, a later one ends the process.
"""

import ctypes
import sys
from types import TracebackType
from typing import Self

from batchgen import activity

# Unlike the time of day it stands still while the process does (SIGSTOP).
_CLOCK_PROCESS_CPUTIME = 2
_SIGEV_THREAD = 2
_SAY_BEFORE_S = 2


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class _TimerSpec(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("every_s", "every_ns", "after_s", "after_ns")
    )


class Deadman:
    """Ends the process with an exit code unless it is put off again and again.

    Does nothing where the C library has no such timers.

    Args:
        code: the exit code.
    """

    def __init__(self, code: int) -> None:
        self._timers: list[ctypes.c_void_p] = []
        if not sys.platform.startswith("linux"):
            return
        self._libc = ctypes.CDLL(None)
        self._text = (ctypes.c_char * activity.SIZE).from_buffer(activity.text)
        self._add("warnx", ctypes.addressof(self._text))
        self._add("_exit", code)

    def _add(self, function: str, argument: int) -> None:
        address = ctypes.cast(getattr(self._libc, function), ctypes.c_void_p)
        event = _SigEvent(value=argument, notify=_SIGEV_THREAD, function=address.value)
        timer = ctypes.c_void_p()
        if not self._libc.timer_create(
            _CLOCK_PROCESS_CPUTIME, ctypes.byref(event), ctypes.byref(timer)
        ):
            self._timers.append(timer)

    def put_off(self, seconds: float) -> None:
        """End the process after so many more seconds of its CPU time."""
        for number, timer in enumerate(self._timers):
            spec = _TimerSpec(after_s=int(seconds) + 1 + number * _SAY_BEFORE_S)
            self._libc.timer_settime(timer, 0, ctypes.byref(spec), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for timer in self._timers:
            self._libc.timer_delete(timer)
