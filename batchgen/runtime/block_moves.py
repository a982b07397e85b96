"""Moving whole blocks of a pool: within it, and to and from rows of a staging buffer."""

from collections.abc import Sequence
from typing import Protocol

import torch

# Each tensor's place in a staging row begins at a multiple of this many bytes.
_ALIGNMENT = 128


class BlockMoves(Protocol):
    """Moves blocks of a pool's tensors.

    A row of a staging buffer holds a block of every tensor, so that a block travels to the
    host and back as one piece.

    Attributes:
        staging_bytes: bytes of such a row.
    """

    staging_bytes: int

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy [C] blocks within the pool; no block is a source and a target."""

    def gather(self, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy [C] blocks to the first rows of a [>= C, staging_bytes] uint8 buffer."""

    def scatter(self, staging: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy the first rows of a staging buffer to [C] blocks."""


class TorchBlockMoves:
    """Moves blocks by torch's operators, one tensor of the pool after another.

    :class:`batchgen.kernels.triton.copy_blocks.BlockCopier` does the same in one launch.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note where the tensors' blocks go in a staging row.

        Args:
            tensors: [N, B, Hkv, D] keys and values of all layers, contiguous.
        """
        self._tensors = [bytes_or_numbers(tensor).flatten(1) for tensor in tensors]
        self._places: list[int] = []
        self.staging_bytes = 0
        for tensor in self._tensors:
            self._places.append(self.staging_bytes)
            block_bytes = tensor.shape[1] * tensor.itemsize
            self.staging_bytes += -(-block_bytes // _ALIGNMENT) * _ALIGNMENT

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See :meth:`BlockMoves.copy`."""
        for tensor in self._tensors:
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def gather(self, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """See :meth:`BlockMoves.gather`."""
        for tensor, place in zip(self._tensors, self._parts(blocks, staging), strict=True):
            place.copy_(tensor.index_select(0, blocks))

    def scatter(self, staging: torch.Tensor, blocks: torch.Tensor) -> None:
        """See :meth:`BlockMoves.scatter`."""
        for tensor, place in zip(self._tensors, self._parts(blocks, staging), strict=True):
            tensor.index_copy_(0, blocks, place)

    def _parts(self, blocks: torch.Tensor, staging: torch.Tensor) -> list[torch.Tensor]:
        rows = staging[: len(blocks)]
        return [
            rows[:, at : at + tensor.shape[1] * tensor.itemsize].view(tensor.dtype)
            for tensor, at in zip(self._tensors, self._places, strict=True)
        ]


def bytes_or_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """View an fp8 tensor as bytes, since torch cannot move fp8 by all operators."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
