"""Block tables: the one place where a request takes and returns blocks."""

from dataclasses import dataclass

from batchgen.engine.blocks import BlockPool
from batchgen.engine.eviction import Future
from batchgen.engine.prefix_index import Key, Match, PrefixIndex
from batchgen.engine.request import Request


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request would take to hold its tokens; nothing is taken yet.

    Attributes:
        match: the prefix it shares by whole blocks, and by a part of one.
        new_blocks: blocks to allocate.
        pinned_blocks: matched blocks that are available now and would not be afterwards.
    """

    match: Match
    new_blocks: int
    pinned_blocks: int

    @property
    def needed(self) -> int:
        """Available blocks that the claim uses up."""
        return self.new_blocks + self.pinned_blocks


class BlockManager:
    """Matches, allocates, publishes and releases blocks for requests.

    ``False`` means "no room", and then nothing has changed.

    Attributes:
        step: number of the step being planned; a partial block is copied only if an
            earlier step wrote it.
        last_arrival: requests up to this arrival number have been admitted; the future
            begins behind it.
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
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index, self._next_use)
        self.step = 0
        self.last_arrival = -1
        self.uncopied_tokens = 0
        self._future = future
        self.copy_sources: list[int] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def begin_step(self) -> None:
        """Count a step: what earlier ones wrote can be copied from now on."""
        self.step += 1

    def end_step(self) -> None:
        """Let go of the blocks that the step copied from."""
        self.pool.release(self.copy_sources)
        self.copy_sources = []

    def claim(self, request: Request) -> Claim:
        """Find what the request's known tokens share, and count what the rest takes.

        The last known token is never matched: its logits are still to be computed.
        """
        most = len(request.token_ids) - 1 if self.prefix_caching else 0
        match = self.index.match(request.token_ids, self.block_size, most, step=self.step)
        new = self.blocks_for(len(request.token_ids)) - len(match.chain)
        return Claim(match, new, sum(self.pool.is_cached(node.block) for node in match.chain))

    def take(self, request: Request, claim: Claim) -> tuple[int, int] | None:
        """Give a request without blocks its matches and new blocks for the rest.

        Matching, pinning and allocation are one operation: nothing else allocates between
        :meth:`claim` and this call. The caller knows that there is room.

        Returns:
            The copy of a partial block to make before the step, (source, target), if any.
        """
        assert not request.block_table
        match = claim.match
        hits = [node.block for node in match.chain]
        self.pool.pin(hits)
        copy_source = self._pin_copy_source(claim)
        allocated = self.pool.allocate(claim.new_blocks)
        assert allocated is not None
        request.block_table = hits + allocated
        request.num_computed = len(hits) * self.block_size
        request.leaf = match.chain[-1] if hits else self.index.root
        request.num_published = len(hits)
        request.publishes = self.prefix_caching
        account = request.account
        account.hit_blocks += len(hits)
        account.new_blocks += len(allocated)
        account.peak_blocks = max(account.peak_blocks, len(request.block_table))
        if copy_source is None:
            return None
        request.num_computed += match.num_partial_tokens
        return copy_source, allocated[0]

    def _pin_copy_source(self, claim: Claim) -> int | None:
        """Hold the partial block until the step is over, if there is room."""
        if claim.match.partial is None:
            return None
        source = claim.match.partial.block
        if claim.new_blocks + self.pool.is_cached(source) > self.pool.num_available:
            self.uncopied_tokens += claim.match.num_partial_tokens
            return None
        self.pool.pin([source])
        self.copy_sources.append(source)
        return source

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
        account.peak_blocks = max(account.peak_blocks, len(request.block_table))
        return True

    def publish(self, request: Request) -> None:
        """Enter the request's computed blocks in the index.

        Called when a step is planned: each layer writes all K and V of a step before
        it attends, so rows planned later in the same step may hit the full blocks. The
        partial one at the prompt's end can be copied from the next step on.
        """
        size = self.block_size
        while (request.num_published + 1) * size <= request.num_computed:
            if not self._publish_block(request, size):
                return
            request.num_published += 1
        if request.num_computed == request.num_prompt_tokens:
            self._publish_tail(request)

    def _publish_tail(self, request: Request) -> None:
        num_tokens = request.num_computed - request.num_published * self.block_size
        if num_tokens > 0:
            self._publish_block(request, num_tokens)

    def _publish_block(self, request: Request, num_tokens: int) -> bool:
        """Enter the first unpublished block with this many tokens; False if it stays private."""
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

    def num_shared(self, request: Request) -> int:
        """Count the leading blocks of the table that others hold too."""
        counts = self.pool.ref_counts
        shared = 0
        for block in request.block_table:
            if counts[block] == 1:
                break
            shared += 1
        return shared

    def discard(self, request: Request) -> None:
        """Take the request's private blocks out of the index: their KV is not to be used.

        What other requests computed behind them and left in the cache goes with them.
        """
        request.publishes = False
        for block in request.block_table[self.num_shared(request) :]:
            if block in self.index:
                self.pool.forget(block)

    def release(self, request: Request) -> None:
        """Return all the request's blocks; the only way out of a block table."""
        self._publish_tail(request)
        self.pool.release(request.block_table)
        request.account.freed_blocks += len(request.block_table)
        request.block_table = []
        request.leaf = None
        request.num_published = 0
        request.num_computed = 0
