"""Bookkeeping of the CPU pool that preempted requests' private blocks are copied to."""


class SwapSpace:
    """A stack of free CPU blocks; ``None`` means no room."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks not in use."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take blocks, or return None and change nothing where there are not enough."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        """Return blocks."""
        self._free.extend(blocks)
