"""Percentiles of a stream of durations in constant memory."""

import math
from collections import Counter

# Neighbouring buckets differ by this factor: percentiles are right to within 1%.
_STEP = 1.01


class Percentiles:
    """A histogram with logarithmic buckets."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0

    def add(self, value: float) -> None:
        """Count a value; anything below a microsecond counts as one, in any unit."""
        self._counts[round(math.log(max(value, 1e-6), _STEP))] += 1
        self._total += 1

    def at(self, percent: float) -> float | None:
        """Return the value that this percentage of values does not exceed, or None."""
        wanted = math.ceil(self._total * percent / 100)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= max(wanted, 1):
                return float(_STEP**bucket)
        return None
