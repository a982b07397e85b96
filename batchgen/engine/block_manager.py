"""Block tables: the one place where a request takes and returns blocks."""

from dataclasses import dataclass

from batchgen.engine.block_pool import BlockPool, Future
from batchgen.engine.prefix_index import Key, Match, Node, PrefixIndex
from batchgen.engine.request import Request


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """What a request would take to hold its tokens; nothing is taken yet.

    Attributes:
        match: the prefix it shares by whole blocks, and by a part of one.
        unseen_blocks: leading matched blocks that a window hides from all that is to come.
        new_blocks: blocks to allocate.
        pinned_blocks: matched blocks that are available now and would not be afterwards.
    """

    match: Match
    unseen_blocks: int
    new_blocks: int
    pinned_blocks: int

    @property
    def needed(self) -> int:
        """Available blocks that the allocation uses up."""
        return self.new_blocks + self.pinned_blocks

    @property
    def held(self) -> int:
        """Blocks that the request has afterwards."""
        return len(self.match.chain) - self.unseen_blocks + self.new_blocks


# Stands in a block table for a block that are out of the window.
RELEASED = -1


@dataclass(frozen=True, slots=True)
class Window:
    """What bounds the blocks of a request where every layer's attention slides.

    Attributes:
        num_tokens: tokens that a query sees, its own included.
        step_tokens: most tokens of a request that one step computes.
    """

    num_tokens: int
    step_tokens: int

    def most_blocks(self, block_size: int) -> int:
        """Count the blocks that a request of any length holds at once, at most."""
        # Window and step may begin anywhere in a block.
        return -(-(self.num_tokens + self.step_tokens) // block_size) + 1


class BlockManager:
    """Matches, allocates, publishes and releases blocks for requests.

    ``False`` means "no room", and then nothing has changed.

    Args:
        window: set where no layer sees more; blocks that it has left are released, and a
            request takes blocks for no more than a step's tokens ahead.

    Attributes:
        step: number of the step being planned; a partial block is copied only if an
            earlier step wrote it.
        last_arrival: requests up to this arrival number have been admitted; the future
            begins after it.
        uncopied_tokens: tokens in a written part of a block that no room was left to copy.
        copy_sources: blocks held until the step that copies from them is over.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        future: Future | None = None,
        window: Window | None = None,
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index, self._next_use)
        self.step = 0
        self.last_arrival = -1
        self.uncopied_tokens = 0
        self._future = future
        self.copy_sources: list[int] = []

    def emptied(self) -> "BlockManager":
        """Make a manager of the same pool with all blocks free."""
        return BlockManager(
            self.pool.num_blocks,
            self.block_size,
            prefix_caching=self.prefix_caching,
            future=self._future,
            window=self.window,
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that a request of so many tokens holds at once, at most."""
        blocks = self.blocks_for(num_tokens)
        if self.window is None:
            return blocks
        return min(blocks, self.window.most_blocks(self.block_size))

    def begin_step(self) -> None:
        """Count a step: what earlier ones wrote can be copied from now on."""
        self.step += 1

    def end_step(self) -> None:
        """Let go of the blocks that the step copied from."""
        self.pool.release(self.copy_sources)
        self.copy_sources = []

    def plan_allocation(self, request: Request) -> AllocationPlan:
        """Find what the request's known tokens share, and count what the rest takes.

        Tokens whose logits are still to be computed are never matched: the last known one, and
        those that log-probabilities are wanted after.
        """
        most = min(len(request.token_ids) - 1, request.first_logits) if self.prefix_caching else 0
        match = self.index.match(request.token_ids, self.block_size, most, step=self.step)
        new = self.blocks_for(self._tokens_to_hold(request, match)) - len(match.chain)
        unseen = self._num_unseen(len(match.chain) * self.block_size)
        counts = self.pool.ref_counts
        # In the index and held by nobody: cached.
        pinned = sum(not counts[node.block] for node in match.chain[unseen:])
        return AllocationPlan(match, unseen, new, pinned)

    def _num_unseen(self, num_computed: int) -> int:
        """Count the leading blocks that no query from here on can see."""
        if self.window is None:
            return 0
        return max(0, num_computed - self.window.num_tokens + 1) // self.block_size

    def _tokens_to_hold(self, request: Request, match: Match) -> int:
        known = len(request.token_ids)
        if self.window is None:
            return known
        there = len(match.chain) * self.block_size + match.num_partial_tokens
        if request.swapped is not None:
            there = max(there, request.swapped.num_computed)
        return min(known, there + self.window.step_tokens)

    def take(self, request: Request, allocation: AllocationPlan) -> tuple[int, int] | None:
        """Return a request without blocks its matches and new blocks for the rest.

        Matching, pinning and allocation are one operation: nothing else allocates between
        :meth:`plan_allocation` and this call. The caller knows that there is room.

        Returns:
            The copy of a partial block to make before the step, (source, target), if any.
        """
        assert not request.block_table
        match = allocation.match
        unseen = allocation.unseen_blocks
        hits = [node.block for node in match.chain[unseen:]]
        self.pool.pin(hits)
        copy_source = self._pin_copy_source(allocation)
        allocated = self.pool.allocate(allocation.new_blocks)
        assert allocated is not None
        request.block_table = [RELEASED] * unseen + hits + allocated
        request.num_released = unseen
        request.num_computed = len(match.chain) * self.block_size
        request.leaf = match.chain[-1] if match.chain else self.index.root
        request.num_published = len(match.chain)
        request.publishes = self.prefix_caching
        account = request.account
        account.hit_blocks += len(hits)
        account.new_blocks += len(allocated)
        account.peak_blocks = max(account.peak_blocks, allocation.held)
        if copy_source is None:
            return None
        request.num_computed += match.num_partial_tokens
        return copy_source, allocated[0]

    def _pin_copy_source(self, allocation: AllocationPlan) -> int | None:
        """Hold the partial block until the step is over, if there is room."""
        if allocation.match.partial is None:
            return None
        source = allocation.match.partial.block
        if allocation.new_blocks + self.pool.is_cached(source) > self.pool.num_available:
            self.uncopied_tokens += allocation.match.num_partial_tokens
            return None
        self.pool.pin([source])
        self.copy_sources.append(source)
        return source

    def window_blocks_needed(self, request: Request) -> int:
        """Count what :meth:`allocate_window` allocates."""
        assert request.swapped is not None and self.window is not None
        ahead = request.swapped.num_computed + self.window.step_tokens
        return self.blocks_for(min(len(request.token_ids), ahead)) - request.swapped.first

    def allocate_window(self, request: Request) -> None:
        """Return a swapped request new blocks behind those that are out of its window."""
        assert request.swapped is not None and not request.block_table
        allocated = self.pool.allocate(self.window_blocks_needed(request))
        assert allocated is not None
        first = request.swapped.first
        request.block_table = [RELEASED] * first + allocated
        request.num_released = request.num_published = first
        request.publishes = False
        account = request.account
        account.new_blocks += len(allocated)
        account.peak_blocks = max(account.peak_blocks, len(allocated))

    def release_out_of_window(self, request: Request) -> None:
        """Return the blocks that no later query of a request can see.

        Called when the step that computed ``num_computed`` tokens is over: its queries saw
        further back.
        """
        assert self.window is not None
        unseen = self._num_unseen(request.num_computed)
        left = request.block_table[request.num_released : unseen]
        self.pool.release(left)
        request.account.freed_blocks += len(left)
        end = request.num_released + len(left)
        request.block_table[request.num_released : end] = [RELEASED] * len(left)
        request.num_released = end

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend a request's table to hold ``num_tokens``."""
        missing = self.blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        allocated = self.pool.allocate(missing)
        if allocated is None:
            return False
        request.block_table += allocated
        account = request.account
        account.new_blocks += missing
        held = len(request.block_table) - request.num_released
        account.peak_blocks = max(account.peak_blocks, held)
        return True

    def take_back(self, request: Request, count: int, peak_blocks: int) -> None:
        """Undo the growth of a request that had ended already when its table grew."""
        grown = request.block_table[len(request.block_table) - count :]
        self.pool.release(grown)
        del request.block_table[len(request.block_table) - count :]
        request.account.new_blocks -= count
        request.account.peak_blocks = peak_blocks

    def publish(self, request: Request) -> None:
        """Enter the computed blocks of a request's prompt in the index.

        Called when a step is planned: each layer writes all K and V of a step before
        it attends, so rows planned later in the same step may hit the full blocks. The
        partial one at the prompt's end can be copied from the next step on.

        What the request generates is nobody else's prompt and stays out: its blocks are
        free the moment it ends.
        """
        self._publish_up_to(request, min(request.num_computed, request.num_prompt_tokens))
        if request.num_computed >= request.num_prompt_tokens:
            self._publish_tail(request, request.num_prompt_tokens)

    def publish_all(self, request: Request) -> None:
        """Publish all that a request has computed: it is preempted and will want it back."""
        self._publish_up_to(request, request.num_computed)
        self._publish_tail(request, request.num_computed)

    def _publish_up_to(self, request: Request, num_tokens: int) -> None:
        size = self.block_size
        while (request.num_published + 1) * size <= num_tokens:
            if not self._publish_block(request, size):
                return
            request.num_published += 1

    def _publish_tail(self, request: Request, end: int) -> None:
        num_tokens = end - request.num_published * self.block_size
        if 0 < num_tokens < self.block_size:
            self._publish_block(request, num_tokens)

    def _publish_block(self, request: Request, num_tokens: int) -> bool:
        """Enter the first unpublished block with this many tokens; False if it stays private."""
        if request.num_published < request.num_released:
            # The window has left the block before anybody entered it: the chain ends here.
            request.publishes = False
        if not request.publishes:
            return False
        assert request.leaf is not None
        node = None
        if self.index.is_linked(request.leaf):
            start = request.num_published * self.block_size
            key: Key = tuple(request.token_ids[start : start + num_tokens])
            block = request.block_table[request.num_published]
            node = self.index.add(request.leaf, key, block, step=self.step, example=request.arrival)
        if num_tokens == self.block_size:
            request.publishes = node is not None
            request.leaf = node
        return node is not None

    def _next_use(self, block: int) -> int | None:
        """Find the next row that needs the whole of a block in the index.

        A partial block is of use only as a source to copy from, and any later row of its
        prefix can be one: it counts as not needed, and the newest of them stay longest.
        """
        node = self.index.node_of(block)
        if self._future is None or node is None or len(node.key) < self.block_size:
            return None
        return self._future.next_use(node.example, node.depth * self.block_size, self.last_arrival)

    def first_private(self, request: Request) -> int:
        """Return the place in the table of the first block that nobody else holds."""
        counts, table = self.pool.ref_counts, request.block_table
        held = range(request.num_released, len(table))
        return next((place for place in held if counts[table[place]] == 1), len(table))

    def private_nodes(self, request: Request) -> list[Node]:
        """List the index nodes of the request's private blocks."""
        private = request.block_table[self.first_private(request) :]
        nodes = (self.index.node_of(block) for block in private)
        return [node for node in nodes if node is not None]

    def discard(self, request: Request) -> None:
        """Take the request's private blocks out of the index: their KV is not to be used.

        What other requests computed behind them and left in the cache goes with them. Of a
        request that has left its blocks already, those that it left in the index go.
        """
        request.publishes = False
        for node in request.left_in_index or self.private_nodes(request):
            if self.index.node_of(node.block) is node:
                self.pool.forget(node.block)

    def release(self, request: Request) -> None:
        """Return all the request's blocks; the only way out of a block table."""
        held = request.block_table[request.num_released :]
        self.pool.release(held)
        request.account.freed_blocks += len(held)
        request.block_table = []
        request.num_released = 0
        request.leaf = None
        request.num_published = 0
        request.num_computed = 0
