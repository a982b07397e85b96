"""How long prompts and outputs were: exact counts in memory that does not grow with the rows."""

from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_BINS = 24


class Lengths:
    """Counts how often each length came; a length is a number of tokens, from 0."""

    def __init__(self) -> None:
        self._counts = np.zeros(1, np.int64)

    def add(self, lengths: npt.NDArray[np.integer[Any]]) -> None:
        """Count some lengths ``[N]``."""
        counts = np.bincount(lengths, minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def figures(self) -> dict[str, Any]:
        """Return rows, least, mean, percentiles, most, and a histogram, in tokens.

        Returns:
            Percentiles are values that occur. A bin of the histogram holds the lengths
            from ``from`` to ``to``, both included.
        """
        present = np.flatnonzero(self._counts)
        rows = int(self._counts.sum())
        if not rows:
            return {"rows": 0, "histogram": []}
        until = np.cumsum(self._counts)
        percentiles = {
            f"p{percent}": int(np.searchsorted(until, max(1, -(-rows * percent // 100))))
            for percent in (50, 90, 99)
        }
        return {
            "rows": rows,
            "min": int(present[0]),
            "mean": float((present * self._counts[present]).sum() / rows),
            **percentiles,
            "max": int(present[-1]),
            "histogram": self._histogram(int(present[0]), int(present[-1])),
        }

    def _histogram(self, least: int, most: int) -> list[dict[str, int]]:
        width = _round_width(-(-(most - least + 1) // _MAX_BINS))
        first = least // width * width
        starts = range(first, most + 1, width)
        return [
            {
                "from": start,
                "to": start + width - 1,
                "rows": int(self._counts[start : start + width].sum()),
            }
            for start in starts
        ]


def _round_width(least: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50 ... that is at least that wide."""
    power = 1
    while True:
        for width in (power, 2 * power, 5 * power):
            if width >= least:
                return width
        power *= 10
