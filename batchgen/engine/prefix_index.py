"""Which token prefixes have their KV in the pool: an exact tree of blocks.

A node is one block's tokens under its parent, so two prefixes share a node only if all
their tokens are equal: there are no hashes to collide. (After tokasaurus; vLLM and
nano-vllm chain hashes instead.) The last block of a prefix may be partial: its node holds
as many tokens as were valid when it was entered. One index serves one model: its identity
is the root.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A block of tokens under its parent.

    Attributes:
        key: the block's valid tokens; fewer than a block's only at the end of a prefix.
        block: the pool's block that holds their KV; -1 at the root.
        parent: the block before it; None at the root and once the node is removed.
        written_in: the step that writes the last of these tokens.
        depth: blocks from the root, itself included.
        example: arrival number of a request that begins with this prefix.
        children: the blocks seen after it, by their key.
        ordered: the children's keys in lexicographic order: of all keys, one of the two
            neighbours of a row's tokens has most tokens in common with them.
    """

    key: Key
    block: int
    parent: "Node | None"
    written_in: int
    example: int
    depth: int
    children: dict[Key, "Node"] = field(default_factory=dict)
    ordered: list[Key] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a row that is in the index.

    Attributes:
        chain: full blocks, from the root on.
        partial: a written block that begins with the row's next tokens, or None.
        num_partial_tokens: how many of them.
        num_pending_tokens: how many more will be there once this step has written them.
    """

    chain: list[Node]
    partial: Node | None
    num_partial_tokens: int
    num_pending_tokens: int

    def whole_blocks(self) -> "Match":
        """Return the match without its partial block."""
        return Match(self.chain, None, 0, 0)


class PrefixIndex:
    """A tree of cached blocks; it knows no reference counts and frees nothing."""

    def __init__(self) -> None:
        self.root = Node(key=(), block=-1, parent=None, written_in=-1, example=-1, depth=0)
        self._by_block: dict[int, Node] = {}

    def __len__(self) -> int:
        """Count the blocks in the index."""
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        """Whether the index names this block."""
        return block in self._by_block

    def match(self, tokens: Sequence[int], block_size: int, max_tokens: int, *, step: int) -> Match:
        """Find the longest prefix of these tokens, counted by the token.

        Args:
            tokens: a row's token ids.
            block_size: tokens in a full block.
            max_tokens: match no more tokens than this.
            step: the step being planned; what it writes itself is pending.
        """
        node, chain, start = self.root, [], 0
        # Numbers are made once: slices of an array would make them anew for every block.
        known = list(tokens[:max_tokens])
        while start + block_size <= max_tokens:
            child = node.children.get(tuple(known[start : start + block_size]))
            if child is None:
                break
            chain.append(child)
            node, start = child, start + block_size
        rest = tuple(known[start : start + block_size])
        return Match(chain, *_closest(node, rest, step))

    def add(
        self, parent: Node, key: Key, block: int, *, step: int, example: int = -1
    ) -> Node | None:
        """Enter a block under its parent.

        A block that is in the index already, under the same parent with fewer tokens, is
        entered anew with all of them.

        Returns:
            The node, or None if the parent already has a child with these tokens: the
            first block stays, the newcomer remains private.
        """
        if key in parent.children:
            return None
        old = self._by_block.get(block)
        if old is not None:
            self._unlink(old)
        node = Node(key, block, parent, step, example, parent.depth + 1)
        parent.children[key] = node
        insort(parent.ordered, key)
        self._by_block[block] = node
        return node

    def remove(self, block: int) -> list[int]:
        """Forget a block and everything below it, which nobody could reach any more.

        Returns:
            All blocks that left the index, this one first.
        """
        top = self._by_block[block]
        removed = list(_walk(top))
        self._unlink(top)
        for node in removed:
            self._by_block.pop(node.block, None)
            node.parent = None
            node.children.clear()
            node.ordered.clear()
        return [node.block for node in removed]

    def node_of(self, block: int) -> Node | None:
        """Return the node that names a block, or None."""
        return self._by_block.get(block)

    def is_linked(self, node: Node) -> bool:
        """Whether a node that someone remembers is still in the tree."""
        return node is self.root or node.parent is not None

    def nodes(self) -> Iterator[Node]:
        """Walk over all nodes, parents first, the root left out."""
        for child in self.root.children.values():
            yield from _walk(child)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del parent.ordered[bisect_left(parent.ordered, node.key)]
        del self._by_block[node.block]
        node.parent = None


def _closest(parent: Node, tokens: Key, step: int) -> tuple[Node | None, int, int]:
    """Find the written child that has most leading tokens in common with these.

    Away from the place where the tokens would stand, children have ever fewer of them; so
    on either side the first written one is the best.

    Returns:
        The child or None, its common tokens, and how many more a pending child has.
    """
    at = bisect_left(parent.ordered, tokens)
    best, written, pending = None, 0, 0
    for side in (range(at - 1, -1, -1), range(at, len(parent.ordered))):
        for place in side:
            child = parent.children[parent.ordered[place]]
            shared = _num_common(child.key, tokens)
            if shared <= written:
                break
            if child.written_in < step:
                best, written = child, shared
                break
            pending = max(pending, shared)
    return best, written, max(0, pending - written)


def _num_common(a: Key, b: Key) -> int:
    if a == b:
        return len(a)
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _walk(top: Node) -> Iterator[Node]:
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
