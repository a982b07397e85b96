"""Copies of blocks of all layers at once: within the pool, and to and from a staging buffer.

A block of one layer's K or V is some KiB, and a block of all layers some MiB: one launch over
a table of the layers' addresses moves them at the memory's speed, where a launch for each layer
would cost more than its copy. In the staging buffer a block is one row, contiguous over all
layers, so that its copy to the host is one transfer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import triton
import triton.language as tl

from batchgen.kernels.triton.launch import Launch, ceil_div

# Bytes that a program moves.
_BYTES = 8192
# Every tensor's place in a staging row begins at a multiple of this, for the widest loads.
_ALIGNMENT = 128
# Bytes of the widest load of a thread.
_WIDE = 16
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WORD_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of the pool whose blocks have one size.

    Attributes:
        addresses: [n] int64 on the pool's device.
        block_bytes: bytes of a block.
        block_stride: bytes from a block to the next.
        place_bytes: bytes of a block's place in a staging row.
        staging_at: byte of a staging row at which the first tensor's place begins.
        word: bytes that are moved as one element; divides all of the above.
        is_wide: whether every block begins where the widest loads may.
    """

    addresses: torch.Tensor
    block_bytes: int
    block_stride: int
    place_bytes: int
    staging_at: int
    word: int
    is_wide: bool


class BlockCopier:
    """Moves whole blocks of a pool's tensors.

    Attributes:
        staging_bytes: bytes of a block over all tensors, a row of the staging buffer.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note where the tensors lie.

        Args:
            tensors: [N, B, Hkv, D] keys and values of all layers, each block dense; blocks may
                stand apart. They must outlive this.
        """
        self._tensors = list(tensors)  # the table of addresses does not keep them alive
        self._groups: list[_Group] = []
        self.staging_bytes = 0
        by_size = sorted(tensors, key=_sizes)
        for (block_bytes, block_stride), found in groupby(by_size, key=_sizes):
            members = list(found)
            addresses = [tensor.data_ptr() for tensor in members]
            place_bytes = ceil_div(block_bytes, _ALIGNMENT) * _ALIGNMENT
            group = _Group(
                torch.tensor(addresses, dtype=torch.int64, device=members[0].device),
                block_bytes,
                block_stride,
                place_bytes,
                self.staging_bytes,
                _word([block_bytes, block_stride, *addresses]),
                all(number % _WIDE == 0 for number in (block_stride, *addresses)),
            )
            self._groups.append(group)
            self.staging_bytes += len(members) * place_bytes

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks within the pool.

        Args:
            sources: [C] int32 or int64 blocks; -1 copies nothing.
            targets: [C]; no block is a source and a target.
        """
        for launch in self.prepare(sources, targets, None):
            launch.run()

    def gather(self, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy blocks [C] to the first rows of a staging buffer; -1 leaves its row."""
        for launch in self.prepare(blocks, None, staging):
            launch.run()

    def scatter(self, staging: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy the first rows of a staging buffer to blocks [C]; -1 leaves its row."""
        for launch in self.prepare(None, blocks, staging):
            launch.run()

    def prepare(
        self,
        sources: torch.Tensor | None,
        targets: torch.Tensor | None,
        staging: torch.Tensor | None,
    ) -> Iterator[Launch]:
        """Prepare the launches; None in place of blocks stands for the staging buffer."""
        blocks = targets if sources is None else sources
        assert blocks is not None
        for group in self._groups:
            word = group.word
            arguments = {
                "addresses": group.addresses,
                "staging": None if staging is None else staging.view(_WORDS[word]),
                "sources": sources,
                "targets": targets,
                "source_stride": 0 if sources is None else sources.stride(0),
                "target_stride": 0 if targets is None else targets.stride(0),
                "block_stride": group.block_stride // word,
                "staging_stride": self.staging_bytes // word,
                "staging_at": group.staging_at // word,
                "place_words": group.place_bytes // word,
                "block_words": group.block_bytes // word,
                "alignment": _WIDE if group.is_wide else word,
                "tile_words": _BYTES // word,
                "word": _WORD_TYPES[word],
            }
            pieces = ceil_div(group.block_bytes, _BYTES)
            grid = (blocks.shape[0], group.addresses.shape[0], pieces)
            yield Launch(_move_blocks, grid, arguments)


def _sizes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of a block and those from a block to the next."""
    assert tensor[0].is_contiguous(), "a block is not dense"
    return tensor[0].nbytes, tensor.stride(0) * tensor.element_size()


def _word(numbers: Sequence[int]) -> int:
    """Return the widest element that divides all numbers of bytes."""
    return next(word for word in _WORDS if all(number % word == 0 for number in numbers))


# Blocks are numbers of a step, wherever they lie: neither may compile the kernel anew.
@triton.jit(
    do_not_specialize=["source_stride", "target_stride"],
    do_not_specialize_on_alignment=["sources", "targets"],
)
def _move_blocks(
    addresses: tl.tensor,
    staging: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    block_stride: tl.tensor,
    staging_stride: tl.tensor,
    staging_at: tl.tensor,
    place_words: tl.tensor,
    block_words: tl.tensor,
    alignment: tl.constexpr,
    tile_words: tl.constexpr,
    word: tl.constexpr,
) -> None:
    """A program: one copy, one tensor, one piece of the block."""
    copy = tl.program_id(0).to(tl.int64)
    tensor = tl.program_id(1)
    at = tl.program_id(2) * tile_words + tl.arange(0, tile_words)
    # A number from memory says nothing of its alignment.
    pool = tl.multiple_of(tl.load(addresses + tensor).to(tl.pointer_type(word)), alignment)
    place = copy * staging_stride + staging_at + tensor * place_words
    end = block_words
    if sources is None:
        source = staging + place
    else:
        block = tl.load(sources + copy * source_stride).to(tl.int64)
        end = tl.where(block < 0, 0, end)
        source = pool + block * block_stride
    if targets is None:
        target = staging + place
    else:
        block = tl.load(targets + copy * target_stride).to(tl.int64)
        end = tl.where(block < 0, 0, end)
        target = pool + block * block_stride
    tl.store(target + at, tl.load(source + at, mask=at < end), mask=at < end)
