"""Which token prefixes have their KV in the pool: an exact tree of full blocks.

A node is one block's tokens under its parent, so two prefixes share a node only if all
their tokens are equal: there are no hashes to collide. (After tokasaurus; vLLM and
nano-vllm chain hashes instead.) One index serves one model: its identity is the root.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """A full block of tokens under its parent.

    Attributes:
        key: the block's token ids as int32 bytes.
        block: the pool's block that holds their KV; -1 at the root.
        parent: the block before it; None at the root and once the node is removed.
        children: the blocks that were seen after it, by their key.
    """

    key: bytes
    block: int
    parent: "Node | None"
    children: dict[bytes, "Node"] = field(default_factory=dict)


class PrefixIndex:
    """A tree of cached blocks; it knows no reference counts and frees nothing."""

    def __init__(self) -> None:
        self.root = Node(key=b"", block=-1, parent=None)
        self._by_block: dict[int, Node] = {}

    def __len__(self) -> int:
        """Count the blocks in the index."""
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        """Whether the index names this block."""
        return block in self._by_block

    def match(self, tokens: bytes, block_bytes: int, max_blocks: int) -> list[Node]:
        """Find the longest chain of blocks that holds a prefix of these tokens.

        Args:
            tokens: token ids as int32 bytes.
            block_bytes: bytes of a full block's token ids.
            max_blocks: match no more blocks than this.
        """
        node, chain = self.root, []
        for start in range(0, max_blocks * block_bytes, block_bytes):
            child = node.children.get(tokens[start : start + block_bytes])
            if child is None:
                break
            chain.append(child)
            node = child
        return chain

    def add(self, parent: Node, key: bytes, block: int) -> Node | None:
        """Enter a full block under its parent.

        Returns:
            The new node, or None where the parent already has a child with these
            tokens: the first block stays, the newcomer remains private.
        """
        if key in parent.children:
            return None
        node = Node(key=key, block=block, parent=parent)
        parent.children[key] = node
        self._by_block[block] = node
        return node

    def remove(self, block: int) -> list[int]:
        """Forget a block and everything below it, which nobody could reach any more.

        Returns:
            All blocks that left the index, this one first.
        """
        top = self._by_block[block]
        assert top.parent is not None
        del top.parent.children[top.key]
        removed = []
        for node in list(_walk(top)):
            removed.append(node.block)
            del self._by_block[node.block]
            node.parent = None
            node.children.clear()
        return removed

    def is_linked(self, node: Node) -> bool:
        """Whether a node that someone remembers still stands in the tree."""
        return node is self.root or node.parent is not None

    def nodes(self) -> Iterator[Node]:
        """Walk over all nodes, parents first, the root left out."""
        for child in self.root.children.values():
            yield from _walk(child)


def _walk(top: Node) -> Iterator[Node]:
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
