"""Block tables: the one place where a request takes and returns blocks."""

from batchgen.engine.blocks import BlockPool
from batchgen.engine.prefix_index import Node, PrefixIndex
from batchgen.engine.request import Request

TOKEN_BYTES = 4


class BlockManager:
    """Matches, allocates, publishes and releases blocks for requests.

    ``None`` or ``False`` means "no room", and then nothing has changed.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index)

    def blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> list[Node]:
        """Find the request's leading full blocks in the index, without pinning them.

        The last known token is never matched: its logits are still to be computed.
        """
        if not self.prefix_caching:
            return []
        max_blocks = (len(request.token_ids) - 1) // self.block_size
        tokens = memoryview(request.token_ids)[: max_blocks * self.block_size].tobytes()
        return self.index.match(tokens, self.block_size * TOKEN_BYTES, max_blocks)

    def num_new_blocks(self, matched: list[Node], num_tokens: int) -> tuple[int, int]:
        """Say what taking ``num_tokens`` with these matches costs.

        Returns:
            Blocks to allocate, and matched blocks that would no longer be available
            (they are cached now and are pinned by the same operation).
        """
        pinned = sum(self.pool.is_cached(node.block) for node in matched)
        return self.blocks_for(num_tokens) - len(matched), pinned

    def take(self, request: Request, matched: list[Node], num_tokens: int) -> bool:
        """Give a request without blocks its matches and new blocks for the rest.

        Matching, pinning and allocation are one operation: nothing else allocates
        between :meth:`match` and this call.
        """
        assert not request.block_table
        new, pinned = self.num_new_blocks(matched, num_tokens)
        if new + pinned > self.pool.num_available:
            return False
        hits = [node.block for node in matched]
        self.pool.pin(hits)
        allocated = self.pool.allocate(new)
        assert allocated is not None
        request.block_table = hits + allocated
        request.num_computed = len(hits) * self.block_size
        request.leaf = matched[-1] if matched else self.index.root
        request.num_published = len(hits)
        request.publishes = self.prefix_caching
        account = request.account
        account.hit_blocks += len(hits)
        account.new_blocks += new
        account.peak_blocks = max(account.peak_blocks, len(request.block_table))
        return True

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
        """Enter the request's full computed blocks in the index.

        Called when a step is planned: each layer writes all K and V of a step before
        it attends, so rows planned later in the same step may hit these blocks.
        """
        size = self.block_size
        while request.publishes and (request.num_published + 1) * size <= request.num_computed:
            start = request.num_published * size
            assert request.leaf is not None
            node = None
            if self.index.is_linked(request.leaf):
                key = memoryview(request.token_ids)[start : start + size].tobytes()
                block = request.block_table[request.num_published]
                node = self.index.add(request.leaf, key, block)
            if node is None:
                request.publishes = False
                return
            request.leaf = node
            request.num_published += 1

    def num_shared(self, request: Request) -> int:
        """Count the leading blocks of the table that others hold too."""
        counts = self.pool.ref_counts
        shared = 0
        for block in request.block_table:
            if counts[block] == 1:
                break
            shared += 1
        return shared

    def release(self, request: Request) -> None:
        """Return all the request's blocks; the only way out of a block table."""
        self.pool.release(request.block_table)
        request.account.freed_blocks += len(request.block_table)
        request.block_table = []
        request.leaf = None
        request.num_published = 0
        request.num_computed = 0
