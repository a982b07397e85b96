"""Which cached block to give up: the one whose next use is farthest away.

The whole data set is known, so the next row that needs a block is too (Belady's rule).
Blocks that no row needs any more go first. Among equals, and where the future is unknown,
the one released longest ago goes first: a row releases its last block first, so tails go
before heads.
"""

import heapq
from typing import Protocol


class Future(Protocol):
    """What is known of the rows to come."""

    def next_use(self, example: int, num_tokens: int, after: int) -> int | None:
        """Find the next row that begins like one we know.

        Args:
            example: arrival number of a request whose prefix is meant.
            num_tokens: length of that prefix.
            after: look at arrivals behind this one.

        Returns:
            The arrival number of the next request with this prefix, or None.
        """


class EvictionQueue:
    """Cached blocks in the order in which they are given up.

    A heap; an entry that was removed stays in it until it comes up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []
        self._ticks: dict[int, int] = {}
        self._needed: set[int] = set()
        self._tick = 0

    def __len__(self) -> int:
        """Count the blocks in the queue."""
        return len(self._ticks)

    def __contains__(self, block: int) -> bool:
        """Whether the block is in the queue."""
        return block in self._ticks

    def add(self, block: int, next_use: int | None) -> None:
        """Put a block in.

        Args:
            block: not in the queue.
            next_use: arrival number of the next row that needs it; None if there is none.
        """
        assert block not in self._ticks, f"block {block} is in the queue already"
        self._tick += 1
        self._ticks[block] = self._tick
        if next_use is not None:
            self._needed.add(block)
        farthest_first = float("-inf") if next_use is None else -next_use
        heapq.heappush(self._heap, (farthest_first, self._tick, block))
        if len(self._heap) > 2 * len(self._ticks) + 64:
            self._heap = [entry for entry in self._heap if self._ticks.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, block: int) -> None:
        """Take a block out."""
        assert block in self._ticks, f"block {block} is not in the queue"
        del self._ticks[block]
        self._needed.discard(block)

    def is_needed(self, block: int) -> bool:
        """Whether a row to come is known to need this block."""
        return block in self._needed

    def first(self) -> int:
        """Give the block to evict next, without taking it out."""
        while True:
            _, tick, block = self._heap[0]
            if self._ticks.get(block) == tick:
                return block
            heapq.heappop(self._heap)
