"""What the size of a block costs, and what would put a shared prefix on a block's edge."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

COMPARED = (8, 16, 32, 64, 128)
SMALLEST, LARGEST = 4, 256
_SHOWN = 3

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """A job's prefill where only whole blocks of a size are shared.

    Attributes:
        block_size: tokens in a block.
        prefill_tokens: the floor by blocks of this size.
        tokens_lost: of them, shared tokens behind the last whole block.
    """

    block_size: int
    prefill_tokens: int
    tokens_lost: int


def block_costs(lengths: Lengths, lcp: Lengths, block_size: int) -> list[BlockCost]:
    """Compare the usual sizes and the job's own, smallest first.

    Args:
        lengths, lcp: ``[requests]`` in prefix order: prompt tokens, and how many of them
            the request before has too.
    """
    total, shared = int(lengths.sum()), int(lcp.sum())
    costs = []
    for size in sorted({*COMPARED, block_size}):
        lost = int((lcp % size).sum())
        costs.append(BlockCost(size, total - shared + lost, lost))
    return costs


@dataclass(frozen=True, slots=True)
class Remedy:
    """What ends a shared prefix on a block's edge.

    Attributes:
        block_sizes: sizes it is a multiple of, nearest to the job's first; at most three.
        shorten_by, lengthen_by: tokens that the shared text would lose or gain instead.
    """

    block_sizes: Sequence[int]
    shorten_by: int
    lengthen_by: int

    def to_json(self) -> dict[str, Any]:
        """Return what ``_plan.json`` holds."""
        return asdict(self) | {"block_sizes": list(self.block_sizes)}


def remedy(tokens: int, block_size: int) -> Remedy | None:
    """Say what removes a prefix's remainder; None where it has none.

    Args:
        tokens: length of the shared prefix.
    """
    remainder = tokens % block_size
    if not remainder:
        return None
    fitting = [size for size in range(SMALLEST, LARGEST + 1) if tokens % size == 0]
    nearest = sorted(fitting, key=lambda size: abs(size - block_size))[:_SHOWN]
    return Remedy(nearest, remainder, block_size - remainder)
