"""Swap: CPU offload of a preempted request's private blocks, and the choice against recomputing."""

from dataclasses import dataclass
from enum import StrEnum

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.plan_builder import Copies
from batchgen.engine.request import Request, SwappedBlocks

# Weight of the newest step in the running mean.
_NEWEST = 0.1


@dataclass(slots=True)
class PreemptionCosts:
    """Measured speeds.

    Attributes:
        swap_s_per_block: seconds to copy a block one way over the link.
        compute_s_per_token: seconds of a step for each of its tokens; a running mean.
    """

    swap_s_per_block: float = 0.0
    compute_s_per_token: float | None = None

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Take note of a step."""
        newest = seconds / num_tokens
        if self.compute_s_per_token is None:
            self.compute_s_per_token = newest
        else:
            self.compute_s_per_token += _NEWEST * (newest - self.compute_s_per_token)

    def swap_is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Compare both ways over the link with computing these tokens again."""
        if self.compute_s_per_token is None:
            return True
        return 2 * num_blocks * self.swap_s_per_block <= num_tokens * self.compute_s_per_token


class PreemptionPolicy(StrEnum):
    """What happens to the KV of a preempted request; auto is what costs less."""

    AUTO = "auto"
    SWAP = "swap"
    RECOMPUTE = "recompute"


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
        # Blocks that are taken together next lie together again: fewer, larger copies.
        self._free.extend(reversed(blocks))


class Swapper:
    """Moves requests' private blocks between the pool and the CPU pool, on paper.

    The copies themselves go into the step plan.
    """

    def __init__(
        self,
        blocks: BlockManager,
        space: SwapSpace,
        policy: PreemptionPolicy,
        costs: PreemptionCosts,
        counters: SchedulerCounters,
    ) -> None:
        self._blocks = blocks
        self._space = space
        self._policy = policy
        self._costs = costs
        self._counters = counters

    def take_out(self, victim: Request, copies: Copies) -> bool:
        """Plan copies of the private blocks to the CPU pool; False if recompute is to be.

        Blocks that others hold stay with them and are matched again on the way back; where
        a window has left the first ones nothing can be matched, and all go.
        """
        is_windowed = victim.num_released > 0
        first = victim.num_released if is_windowed else self._blocks.first_private(victim)
        last = self._blocks.blocks_for(victim.num_computed)
        private = victim.block_table[first:last]
        if not private or not self._prefers_swap(victim, first, len(private)):
            return False
        cpu_blocks = self._space.allocate(len(private))
        if cpu_blocks is None:
            return False
        victim.swapped = SwappedBlocks(first, cpu_blocks, victim.num_computed, is_windowed)
        copies += zip(private, cpu_blocks, strict=True)
        victim.account.swapped_out_blocks += len(private)
        self._counters.swapped_out_blocks += len(private)
        return True

    def bring_back(
        self, request: Request, swapped: SwappedBlocks, num_matched: int, copies: Copies
    ) -> None:
        """Plan copies from the CPU pool behind the blocks that the request has already."""
        cpu_blocks = swapped.blocks[num_matched - swapped.first :]
        targets = request.block_table[num_matched : num_matched + len(cpu_blocks)]
        copies += zip(cpu_blocks, targets, strict=True)
        request.num_computed = max(request.num_computed, swapped.num_computed)
        request.account.swapped_in_blocks += len(cpu_blocks)
        self._counters.swapped_in_blocks += len(cpu_blocks)

    def release(self, swapped: SwappedBlocks) -> None:
        """Return the CPU blocks of a request that is back, or has ended."""
        self._space.release(swapped.blocks)

    def _prefers_swap(self, victim: Request, first: int, num_blocks: int) -> bool:
        if self._policy is PreemptionPolicy.AUTO:
            num_tokens = victim.num_computed - first * self._blocks.block_size
            return self._costs.swap_is_cheaper(num_blocks, num_tokens)
        return self._policy is PreemptionPolicy.SWAP
