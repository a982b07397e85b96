"""`budget.wall_time_s`: when to stop starting rows, so that those running can still finish."""

import math
import time
from collections import deque
from collections.abc import Callable

from batchgen.report.percentiles import Percentiles

# Kept back for committing the last part and for ending the process.
_RESERVE_SHARE = 0.05
_MOST_RESERVE_S = 10.0
# Steps whose times stand for those to come.
_STEPS = 32
# The output length that most running rows do not exceed.
_USUAL_PERCENT = 90


class WallTime:
    """The time that a run may take, counted from here.

    Args:
        limit_s: ``budget.wall_time_s``; None for no limit.
        clock: a clock that does not jump, in seconds.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        limit = math.inf if limit_s is None else limit_s
        self._reserve_s = min(_RESERVE_SHARE * limit, _MOST_RESERVE_S)
        self._end = clock() + limit
        self._step_ended = clock()
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._output_tokens = Percentiles()

    @property
    def stop_after_s(self) -> float | None:
        """Seconds from now to the last moment at which the run must begin to end."""
        return None if self.limit_s is None else self._end - self._reserve_s - self._clock()

    @property
    def reason(self) -> str:
        """What is said to have stopped the run."""
        return "" if self.limit_s is None else f"budget.wall_time_s={self.limit_s:.12g}"

    def begin_steps(self) -> None:
        """Count the next step from now."""
        self._step_ended = self._clock()

    def note_step(self) -> float:
        """Take the time of a step that has ended; give it in seconds."""
        now = self._clock()
        step_s, self._step_ended = now - self._step_ended, now
        self._steps_s.append(step_s)
        return step_s

    def note_output(self, num_tokens: int) -> None:
        """Take the length of an output that has ended."""
        self._output_tokens.add(num_tokens)

    def should_drain(self, write_s: float) -> bool:
        """Whether a row that starts now would most likely not finish in time.

        Args:
            write_s: what committing a part takes.
        """
        usual = self._output_tokens.at(_USUAL_PERCENT)
        return usual is not None and self._left_s(write_s) <= usual * self._mean_step_s

    def is_over(self, write_s: float) -> bool:
        """Whether another step and the commit behind it might end too late."""
        return self._left_s(write_s) <= max(self._steps_s, default=0.0)

    @property
    def _mean_step_s(self) -> float:
        return sum(self._steps_s) / len(self._steps_s) if self._steps_s else 0.0

    def _left_s(self, write_s: float) -> float:
        return self._end - self._reserve_s - write_s - self._clock()
