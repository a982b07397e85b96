"""What ``mode=plan`` shows of a plan beyond what running needs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.prompts.advice.columns import Advice
from batchgen.prompts.plan import Plan

COMPARED = (8, 16, 32, 64, 128)
SMALLEST, LARGEST = 4, 256
_SHOWN = 3
_MOST_BINS = 20

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """A job's prefill where only whole blocks of a size are shared.

    Attributes:
        block_size: tokens in a block.
        prefill_tokens: the floor by blocks of this size.
        tokens_lost: of them, shared tokens after the last whole block.
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
    """Return what removes a prefix's remainder; None where it has none.

    Args:
        tokens: length of the shared prefix.
    """
    remainder = tokens % block_size
    if not remainder:
        return None
    fitting = [size for size in range(SMALLEST, LARGEST + 1) if tokens % size == 0]
    nearest = sorted(fitting, key=lambda size: abs(size - block_size))[:_SHOWN]
    return Remedy(nearest, remainder, block_size - remainder)


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


@dataclass(frozen=True, slots=True)
class PlanDiagnostics:
    """What helps a person to change a job.

    Attributes:
        plan: the plan.
        lengths: prompt tokens of its requests.
        block_costs: what blocks of other sizes would share.
        input_order_tokens: prefill in the input's order where only the row before is cached.
        group_texts: the text of each group's prefix, shortened; empty without a tokenizer.
        advice: a change of the template that would share more, where one is known.
    """

    plan: Plan
    lengths: Histogram
    block_costs: Sequence[BlockCost]
    input_order_tokens: int
    group_texts: Sequence[str]
    advice: Advice | None

    @classmethod
    def of(
        cls, plan: Plan, input_order_tokens: int, group_texts: Sequence[str], advice: Advice | None
    ) -> "PlanDiagnostics":
        """Measure a plan's requests, with what only its prompts can say."""
        requests = plan.requests_by_prefix
        return cls(
            plan=plan,
            lengths=Histogram.of(requests.lengths),
            block_costs=block_costs(requests.lengths, requests.taken, plan.block_size),
            input_order_tokens=input_order_tokens,
            group_texts=group_texts,
            advice=advice,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what they add to the plan's own part of ``_plan.json``."""
        groups = self.plan.to_json()["groups"]
        texts: Sequence[str | None] = self.group_texts or [None] * len(groups)
        for group, text in zip(groups, texts, strict=True):
            fix = remedy(group["tokens"], self.plan.block_size)
            group |= {"text": text, "remedy": fix and fix.to_json()}
        return {
            "lengths": self.lengths.to_json(),
            "block_sizes": [asdict(cost) for cost in self.block_costs],
            "groups": groups,
            "advice": self.advice and self.advice.to_json(),
        }


def _width(span: int) -> int:
    power = 1
    while True:
        for factor in (1, 2, 5):
            # One bin more where the first does not begin at the least value.
            if span <= (_MOST_BINS - 1) * factor * power:
                return factor * power
        power *= 10
