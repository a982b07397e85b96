"""The KV pool's tensors and the CPU pool beside it."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from batchgen.errors import UsageError
from batchgen.kernels.triton.batch import KVScales

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


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shape of one layer's keys and values for one token, and how far back it looks.

    Attributes:
        window: tokens that a query sees, its own included; None is all.
        group: query heads that read a key/value head.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    group: int = 1

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token in this layer."""
        return self.num_kv_heads * (self.key_size + self.value_size) * dtype.itemsize


def kv_bytes_per_token(layers: list[LayerGeometry], dtype: torch.dtype) -> int:
    """Bytes of K and V of one token over all layers."""
    return sum(layer.bytes_per_token(dtype) for layer in layers)


def is_fp8(dtype: torch.dtype) -> bool:
    """Return whether numbers take one byte, so that they need scales."""
    return dtype.itemsize == 1


def window_of_all(layers: list[LayerGeometry]) -> int | None:
    """Return the tokens that any layer still sees; None if a layer sees all."""
    windows = [layer.window for layer in layers]
    return None if None in windows else max(window or 0 for window in windows)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """In which numbers a pool keeps keys and values.

    Attributes:
        dtype: of the numbers.
        scales: of fp8 numbers, for each layer; None if they are kept as they are.
    """

    dtype: torch.dtype
    scales: list[KVScales] | None = None


class KVCache:
    """Keys and values of all layers, by block.

    Attributes:
        keys: for each layer [num_blocks, block_size, Hkv, D].
        values: for each layer [num_blocks, block_size, Hkv, Dv].
        moves: moves blocks of all layers.
        scales: of an fp8 pool, for each layer; None if numbers are kept as they are.
        swap_pool: [num_swap_blocks, moves.staging_bytes] uint8 on the host, a block in a row.
    """

    def __init__(
        self,
        layers: list[LayerGeometry],
        num_blocks: int,
        block_size: int,
        *,
        num_swap_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        uses_triton: bool = False,
        scales: list[KVScales] | None = None,
    ) -> None:
        """Allocate both.

        Raises:
            UsageError: there is no memory for one of them.
        """
        assert is_fp8(dtype) == (scales is not None)
        self.block_size = block_size
        self.scales = scales
        pool = f"a KV pool of {num_blocks:,} blocks of {block_size} tokens"
        with _refused(pool, "pool.num_blocks or pool.gpu_memory_utilization"):
            self.keys, self.values = _allocate(layers, num_blocks, block_size, dtype, device)
        self.moves = _block_moves([*self.keys, *self.values], uses_triton)
        # Pinned memory makes copies to and from a GPU run at the link's speed.
        swap_pool = f"{num_swap_blocks:,} swapped blocks of {self.moves.staging_bytes:,} bytes"
        with _refused(swap_pool, "pool.swap_gib or pool.swap_blocks"):
            self.swap_pool = torch.empty(
                (num_swap_blocks, self.moves.staging_bytes),
                dtype=torch.uint8,
                pin_memory=device.type == "cuda" and num_swap_blocks > 0,
            )

    def checksum(self, block: int, num_tokens: int) -> int:
        """Return a checksum over the K and V of a block's first tokens in all layers."""
        total = 0
        for tensor in (*self.keys, *self.values):
            content = tensor[block, :num_tokens].contiguous().cpu().view(torch.uint8)
            total = zlib.crc32(content.numpy().tobytes(), total)
        return total

    def poison(self, blocks: list[int], value: float = float("nan")) -> None:
        """Overwrite blocks; a read of one that was not written since then shows up."""
        for tensor in (*self.keys, *self.values):
            bits = bytes_or_numbers(torch.tensor(value).to(tensor.dtype))
            bytes_or_numbers(tensor)[blocks] = bits.to(tensor.device)


@contextmanager
def _refused(what: str, keys: str) -> Iterator[None]:
    """Return what there was no memory for, and which keys make it smaller."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error):
            # What an earlier launch did wrong, and a GPU says only now.
            raise
        raise UsageError(f"no memory for {what}; lower {keys}: {error}") from error


def _block_moves(tensors: list[torch.Tensor], uses_triton: bool) -> BlockMoves:
    if not uses_triton:
        return TorchBlockMoves(tensors)
    # triton is on Linux only.
    from batchgen.kernels.triton.copy_blocks import BlockCopier

    return BlockCopier(tensors)


def _allocate(
    layers: list[LayerGeometry],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    def pool(layer: LayerGeometry, size: int) -> torch.Tensor:
        shape = (num_blocks, block_size, layer.num_kv_heads, size)
        return torch.empty(shape, dtype=dtype, device=device)

    keys = [pool(layer, layer.key_size) for layer in layers]
    values = [pool(layer, layer.value_size) for layer in layers]
    return keys, values
