"""`engine.stall_s`: a run that hangs ends by itself, says where, and can be resumed."""

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from batchgen.errors import EngineError, ExitCode
from batchgen.report import streams

_MOST_TICK_S = 1.0
# What the main thread has to end in order before the process is ended for it.
_GRACE_S = 20.0


class Watchdog:
    """A thread that looks whether tokens are still being computed.

    Where none are for too long, it says the state and raises an :class:`EngineError` in the
    main thread. A main thread that is stuck beyond the reach of that, as in a device call
    that never returns, is ended with the whole process, once finished rows are committed.

    Time in which the process stood still (SIGSTOP, a suspended machine) does not count.

    Args:
        stall_s: ``engine.stall_s``.
        num_tokens: gives the tokens computed so far; any change is progress.
        describe: gives the state to print.
        say: takes what is printed.
        give_up: raises an exception in the main thread.
        rescue: commits the finished rows.
        grace_s: what the main thread and the rescue are given, each.
        end: ends the process with an exit code.
    """

    def __init__(
        self,
        stall_s: float,
        *,
        num_tokens: Callable[[], int],
        describe: Callable[[], str],
        say: Callable[[str], None],
        give_up: Callable[[Exception], None],
        rescue: Callable[[], None],
        grace_s: float = _GRACE_S,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._stall_s = stall_s
        self._num_tokens = num_tokens
        self._describe = describe
        self._say = say
        self._give_up = give_up
        self._rescue = rescue
        self._grace_s = grace_s
        self._end = end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="batchgen-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        if self._stands_still():
            message = (
                f"no token was computed for engine.stall_s={self._stall_s:g} s; finished rows are "
                "kept, the same command goes on"
            )
            self._say(f"batchgen: {message}\n{self._state()}")
            self._give_up(EngineError(message))
            if not self._stopped.wait(self._grace_s):
                self._end_process()

    def _stands_still(self) -> bool:
        """Wait until the run ends, or has stood still for too long."""
        tick_s = min(_MOST_TICK_S, self._stall_s / 4)
        seen, idle_s, looked = self._num_tokens(), 0.0, time.monotonic()
        while not self._stopped.wait(tick_s):
            now, tokens = time.monotonic(), self._num_tokens()
            idle_s += min(now - looked, 2 * tick_s)
            looked = now
            if tokens != seen:
                seen, idle_s = tokens, 0.0
            if idle_s >= self._stall_s:
                return True
        return False

    def _state(self) -> str:
        try:
            return self._describe()
        except Exception as error:
            # Read beside a thread that may be changing it.
            return f"its state cannot be read: {error!r}"

    def _end_process(self) -> None:
        self._say("batchgen: the main thread does not answer; the process ends")
        rescue = threading.Thread(target=self._rescue, name="batchgen-rescue", daemon=True)
        rescue.start()
        rescue.join(self._grace_s)
        streams.drain()
        self._end(ExitCode.ENGINE_FAILED)
