"""The pool's blocks: who holds them, which are cached, which are free.

Every block is in exactly one state. *Owned*: its reference count is the number of block
tables it stands in. *Cached*: nobody holds it, but its KV can still be hit. *Free*: its
content means nothing. Cached blocks count as available, so they never cause exhaustion.
"""

from collections import deque
from collections.abc import Callable, Iterable

from batchgen.engine.eviction import EvictionQueue
from batchgen.engine.prefix_index import PrefixIndex


class BlockPool:
    """Reference counts over a fixed number of blocks.

    A block whose last reference goes becomes cached where the index names it, else
    free. Allocation takes free blocks first, then evicts a cached one.

    Args:
        index: names the blocks whose KV can be hit.
        next_use: gives the arrival number of the next row that needs a block in the
            index, None where there is none or none is known.

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
