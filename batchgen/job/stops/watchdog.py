"""`engine.stall_s`: a run that hangs ends by itself, says where, and can be resumed."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from batchgen import activity
from batchgen.errors import EngineError, ExitCode
from batchgen.job.stops.deadman import Deadman
from batchgen.report import streams

_MOST_TICK_S = 1.0
# What the main thread has to end in order before the process is ended for it.
_GRACE_S = 20.0
_SHOWN_FRAMES = 6
# Of a core: what waits for a disk or a lock uses less.
_BUSY_SHARE = 0.01


class Watchdog:
    """A thread that looks whether the job still makes progress.

    Where it makes none for too long, it says the state and raises an :class:`EngineError` in
    the main thread. A main thread that is stuck beyond the reach of that, as in a device call
    that never returns, is ended with the whole process, once finished rows are committed; and so
    is one that lets no other thread run, by a :class:`Deadman`.

    Time in which the process stood still (SIGSTOP, a suspended machine) does not count.

    Args:
        stall_s: ``engine.stall_s``.
        progress: returns how far the job is; any change is progress.
        lacking: what there was none of, for the message.
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
        progress: Callable[[], object],
        lacking: str = "no token was computed",
        describe: Callable[[], str],
        say: Callable[[str], None],
        give_up: Callable[[EngineError], None],
        rescue: Callable[[], None],
        grace_s: float = _GRACE_S,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._stall_s = stall_s
        self._progress = progress
        self._lacking = lacking
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
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        with Deadman(ExitCode.ENGINE_FAILED) as deadman:
            stands_still = self._stands_still(deadman)
        if stands_still:
            message = (
                f"{self._lacking} for engine.stall_s={self._stall_s:g} s; finished rows are "
                "kept, the same command goes on"
            )
            self._say(f"batchgen: {message}\n{self._state()}")
            self._give_up(EngineError(message))
            if not self._stopped.wait(self._grace_s):
                self._end_process()

    def _stands_still(self, deadman: Deadman) -> bool:
        """Wait until the run ends, or has stood still for too long."""
        tick_s = min(_MOST_TICK_S, self._stall_s / 4)
        seen, idle_s, looked = self._progress(), 0.0, time.monotonic()
        deadman.put_off(self._stall_s + self._grace_s)
        while not self._stopped.wait(tick_s):
            now, progress = time.monotonic(), self._progress()
            deadman.put_off(self._stall_s + self._grace_s)
            idle_s += min(now - looked, 2 * tick_s)
            looked = now
            if progress != seen:
                seen, idle_s = progress, 0.0
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


def describe_activity() -> str:
    """Return what the job works at, and where its main thread is."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(main)[-_SHOWN_FRAMES:])
    return f"at work: {activity.current()}\n{stack.rstrip()}"


def planning_progress() -> object:
    """Return what changes while the job plans: its notes, and its bytes on disks."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        lines = []
    counters = dict(line.split(": ") for line in lines)
    return activity.count, counters.get("read_bytes"), counters.get("write_bytes")


def loading_progress(stall_s: float) -> object:
    """Return what changes while a model loads: as in planning, and the time that it computes."""
    return planning_progress(), time.process_time() // (_BUSY_SHARE * stall_s)
