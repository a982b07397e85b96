"""The pool's blocks: who holds them, which are cached, which are free.

Every block is in exactly one state. *Owned*: its reference count is the number of block
tables it is in. *Cached*: nobody holds it, but its KV can still be hit. *Free*: its
content means nothing. Cached blocks count as available, so they never cause exhaustion.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from batchgen.engine.prefix_index import PrefixIndex


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
        """Return the block to evict next, without taking it out."""
        while True:
            _, tick, block = self._heap[0]
            if self._ticks.get(block) == tick:
                return block
            heapq.heappop(self._heap)


class BlockPool:
    """Reference counts over a fixed number of blocks.

    A block whose last reference goes becomes cached where the index names it, else
    free. Allocation takes free blocks first, then evicts a cached one.

    Args:
        index: names the blocks whose KV can be hit.
        next_use: gives the arrival number of the next row that needs a block in the
            index, None if there is none or none is known.

    Attributes:
        evicted_needed: evicted blocks that a row to come needs: its tokens are lost.
        evicted_unneeded: the others.
    """

    def __init__(
        self,
        num_blocks: int,
        index: PrefixIndex,
        next_use: Callable[[int], int | None] = lambda block: None,
    ) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.evicted_needed = 0
        self.evicted_unneeded = 0
        self._index = index
        self._free = deque(range(num_blocks))
        self._cached = EvictionQueue()
        self._next_use = next_use

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that can still be hit."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could take now."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - self.num_available

    def free_blocks(self) -> list[int]:
        """List the blocks without content."""
        return list(self._free)

    def is_cached(self, block: int) -> bool:
        """Whether nobody holds the block although it can be hit."""
        return block in self._cached

    def allocate(self, count: int) -> list[int] | None:
        """Take blocks for one owner.

        Returns:
            The blocks, each with one reference; None, and nothing changed, where
            there are not enough.
        """
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if not self._free:
                self._evict(self._cached.first())
            block = self._free.popleft()
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def pin(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks that were found in the index."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                self._cached.remove(block)
            self.ref_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one owner of each block, the last first, so that tails are evicted first."""
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, f"block {block} is released without an owner"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self._index:
                    self._cached.add(block, self._next_use(block))
                else:
                    self._free.append(block)

    def forget(self, block: int) -> int:
        """Take a block and all below it out of the index; what nobody holds becomes free.

        Returns:
            How many blocks left the index.
        """
        removed = self._index.remove(block)
        for lost in removed:
            if self.ref_counts[lost] == 0:
                self._cached.remove(lost)
                self._free.append(lost)
        return len(removed)

    def _evict(self, block: int) -> None:
        needed = self._cached.is_needed(block)
        lost = self.forget(block)
        self.evicted_needed += lost if needed else 0
        self.evicted_unneeded += 0 if needed else lost
