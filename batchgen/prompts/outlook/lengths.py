"""How long the prompts are, in few enough bins to be read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_MOST_BINS = 20


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of whole numbers in bins of one width.

    Attributes:
        edges: ``[bins + 1]``; a bin holds what is at least its edge and below the next.
        counts: ``[bins]``.
    """

    edges: Sequence[int] = ()
    counts: Sequence[int] = ()

    @classmethod
    def of(cls, values: npt.NDArray[np.integer[Any]]) -> "Histogram":
        """Count values in at most twenty bins whose width is 1, 2 or 5 times a power of ten."""
        if not len(values):
            return cls()
        low, high = int(values.min()), int(values.max())
        width = _width(high - low + 1)
        start = low // width * width
        bins = (high - start) // width + 1
        counts = np.bincount((values - start) // width, minlength=bins)
        return cls([start + width * at for at in range(bins + 1)], counts.tolist())

    def to_json(self) -> dict[str, Any]:
        """Return what ``_plan.json`` holds."""
        return asdict(self)


def _width(span: int) -> int:
    power = 1
    while True:
        for factor in (1, 2, 5):
            # One bin more where the first does not begin at the least value.
            if span <= (_MOST_BINS - 1) * factor * power:
                return factor * power
        power *= 10
