"""Block managers for comparison: contiguous runs of slots, and sharing by whole blocks alone."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from batchgen.engine.block_manager import AllocationPlan, BlockManager
from batchgen.engine.request import Request


class ContiguousSlots:
    """A line of slots given out in unbroken runs: the first hole that is large enough."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._holes = [(0, capacity)]

    @property
    def num_free(self) -> int:
        """Slots in all holes."""
        return sum(size for _, size in self._holes)

    @property
    def largest_hole(self) -> int:
        """Slots in the largest hole."""
        return max((size for _, size in self._holes), default=0)

    def allocate(self, size: int) -> int | None:
        """Take a run of slots and give its start; None if no hole holds it."""
        for at, (start, hole) in enumerate(self._holes):
            if hole >= size:
                self._holes[at : at + 1] = [(start + size, hole - size)] if hole > size else []
                return start
        return None

    def release(self, start: int, size: int) -> None:
        """Return a run; neighbouring holes become one."""
        insort(self._holes, (start, size))
        joined: list[tuple[int, int]] = []
        for hole_start, hole in self._holes:
            if joined and sum(joined[-1]) == hole_start:
                joined[-1] = joined[-1][0], joined[-1][1] + hole
            else:
                joined.append((hole_start, hole))
        self._holes = joined


@dataclass(slots=True)
class Refusals:
    """Rows that could not start although enough slots were free in total.

    Attributes:
        count: steps in which the first waiting row was refused for that reason.
        rows: distinct rows among them.
        num_free, largest_hole: at the refusal with most free slots.
    """

    count: int = 0
    rows: set[int] = field(default_factory=set)
    num_free: int = 0
    largest_hole: int = 0

    def note(self, request: Request, slots: ContiguousSlots) -> None:
        """Count a refusal."""
        self.count += 1
        self.rows.add(request.request_id)
        if slots.num_free > self.num_free:
            self.num_free, self.largest_hole = slots.num_free, slots.largest_hole


class ContiguousManager(BlockManager):
    """The gate: a row starts where an unbroken run of slots holds the whole of it.

    Args:
        num_blocks: blocks that carry the execution; so many that they never run out.
        capacity: slots of the budget.
        run_tokens: the slots that a request is given.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        capacity: int,
        run_tokens: Callable[[Request], int],
    ) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=False)
        self.slots = ContiguousSlots(capacity)
        self.refusals = Refusals()
        self._run_tokens = run_tokens
        self._runs: dict[int, tuple[int, int]] = {}

    def plan_allocation(self, request: Request) -> AllocationPlan:
        """Ask for more than there is where no hole holds the row."""
        allocation, size = super().plan_allocation(request), self._run_tokens(request)
        if self.slots.largest_hole >= size:
            return allocation
        if self.slots.num_free >= size:
            self.refusals.note(request, self.slots)
        return replace(allocation, new_blocks=self.pool.num_blocks + 1)

    def take(self, request: Request, allocation: AllocationPlan) -> tuple[int, int] | None:
        """Take the run, and the blocks that carry it out."""
        size = self._run_tokens(request)
        start = self.slots.allocate(size)
        assert start is not None
        self._runs[request.request_id] = start, size
        return super().take(request, allocation)

    def release(self, request: Request) -> None:
        """Return both."""
        if request.request_id in self._runs:
            self.slots.release(*self._runs.pop(request.request_id))
        super().release(request)


class WholeBlockManager(BlockManager):
    """Shares prefixes by whole blocks alone, as most engines do."""

    def plan_allocation(self, request: Request) -> AllocationPlan:
        """Leave the partial block out of the match."""
        allocation = super().plan_allocation(request)
        return replace(allocation, match=allocation.match.whole_blocks())
