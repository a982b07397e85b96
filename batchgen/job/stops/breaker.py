"""`errors.max_rate` as a circuit breaker: a hopeless run stops early."""

import math

from batchgen.errors import BatchgenError, ExitCode

# Rows that must have failed before a run is given up.
MIN_FAILED = 100
# Standard deviations by which the rate must lie above the limit.
_CERTAINTY = 4.0


class TooManyRowErrorsError(BatchgenError):
    """More rows fail than ``errors.max_rate`` allows. Finished rows are kept."""

    exit_code = ExitCode.TOO_MANY_ROW_ERRORS


class Breaker:
    """Counts input rows as they end and says when the run is hopeless.

    It is when the rows that failed are already more than the limit allows of all rows, or
    when the rate among the rows that this run has ended lies so far above the limit that
    chance does not explain it (the lower end of Wilson's interval; the order of the rows
    counts as chance). For either, ``MIN_FAILED`` rows at least must have failed.

    Args:
        max_rate: ``errors.max_rate``; None never trips.
        num_rows: input rows of the whole job.
        num_failed: of them, those that failed before the engine starts.
    """

    def __init__(self, max_rate: float | None, num_rows: int, num_failed: int) -> None:
        self._max_rate = max_rate
        self._num_rows = num_rows
        self._num_failed = num_failed
        self._run_rows = 0
        self._run_failed = 0

    def add(self, *, failed: bool) -> None:
        """Count an input row that the engine has ended."""
        self._run_rows += 1
        self._run_failed += failed

    @property
    def is_tripped(self) -> bool:
        """Whether going on is hopeless."""
        return self._max_rate is not None and (
            self._is_certain(self._max_rate) or self._is_beyond_chance(self._max_rate)
        )

    def _is_certain(self, max_rate: float) -> bool:
        failed = self._num_failed + self._run_failed
        return failed >= MIN_FAILED and failed > max_rate * self._num_rows

    def _is_beyond_chance(self, max_rate: float) -> bool:
        if self._run_failed < MIN_FAILED:
            return False
        return _wilson_low(self._run_failed, self._run_rows) > max_rate


def _wilson_low(failed: int, rows: int) -> float:
    """Give the lower end of Wilson's score interval (E. B. Wilson, 1927)."""
    rate, z = failed / rows, _CERTAINTY
    spread = z * math.sqrt(rate * (1 - rate) / rows + z * z / (4 * rows * rows))
    return (rate + z * z / (2 * rows) - spread) / (1 + z * z / rows)
