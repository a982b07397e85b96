"""The rows to come, as the engine's eviction asks for them."""

from array import array
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


class PlannedFuture:
    """Answers which request is the next to begin with a given prefix.

    Requests are numbered by the order in which they run. In the order of their tokens
    all requests with a prefix stand together, and the least number of common tokens
    between two of them is the least over the neighbours in between.

    Memory: 24 bytes a request, and 8 for every request of a prefix that was asked for in
    an order other than that of the tokens.
    """

    def __init__(self, by_tokens: Positions, lcp: Positions) -> None:
        """Take the requests in the order of their tokens.

        Args:
            by_tokens: [N] number of each request in the running order.
            lcp: [N] tokens that each has in common with the one before it.
        """
        self._by_tokens = by_tokens
        self._rank = np.empty_like(by_tokens)
        self._rank[by_tokens] = np.arange(len(by_tokens))
        self._tree = _MinTree(lcp)
        self._in_token_order = bool((by_tokens[1:] >= by_tokens[:-1]).all())
        self._sorted = lru_cache(maxsize=4096)(self._sort)

    def next_use(self, example: int, num_tokens: int, after: int) -> int | None:
        """See :class:`batchgen.engine.block_pool.Future`."""
        if example >= len(self._rank):
            # It came after the plan's own requests: nothing is known of its like.
            return None
        rank = int(self._rank[example])
        first = self._tree.last_below(rank, num_tokens)
        last = self._tree.first_below(rank + 1, num_tokens) - 1
        if first == last:
            return None
        if self._in_token_order:
            following = max(after + 1, first)
            return following if following <= last else None
        numbers = self._sorted(first, last + 1)
        at = int(np.searchsorted(numbers, after, "right"))
        return int(numbers[at]) if at < len(numbers) else None

    def _sort(self, first: int, end: int) -> Positions:
        return np.sort(self._by_tokens[first:end])


class _MinTree:
    """Minima over the powers of two, to find where a value falls below a bound."""

    def __init__(self, values: Positions) -> None:
        level = values.astype(np.int32)
        # Single items of an array are read three times as fast as those of numpy's.
        self._levels = [array("i", level.tobytes())]
        while len(level) > 1:
            alone = level[len(level) & ~1 :]
            level = np.concatenate([np.minimum(level[:-1:2], level[1::2]), alone])
            self._levels.append(array("i", level.tobytes()))

    def first_below(self, start: int, bound: int) -> int:
        """Return the first index from ``start`` on whose value is below, or the length."""
        level, at = 0, start
        while True:
            if at >= len(self._levels[level]):
                return len(self._levels[0])
            if self._levels[level][at] < bound:
                break
            at += 1
            while at % 2 == 0 and level + 1 < len(self._levels):
                level, at = level + 1, at // 2
        while level:
            level, at = level - 1, 2 * at
            at += self._levels[level][at] >= bound
        return at

    def last_below(self, start: int, bound: int) -> int:
        """Return the last index up to ``start`` whose value is below, or 0."""
        level, at = 0, start
        while self._levels[level][at] >= bound:
            if at == 0:
                return 0
            at -= 1
            while at % 2 == 1 and level + 1 < len(self._levels):
                level, at = level + 1, at // 2
        while level:
            level, at = level - 1, 2 * at + 1
            if at >= len(self._levels[level]) or self._levels[level][at] >= bound:
                at -= 1
        return at
