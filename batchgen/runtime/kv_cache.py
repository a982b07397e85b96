"""The KV pool's tensors, the CPU pool beside it, and the copies between the two."""

import time
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from batchgen.engine.step import IntArray


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


def window_of_all(layers: list[LayerGeometry]) -> int | None:
    """Give the tokens that any layer still sees; None where a layer sees all."""
    windows = [layer.window for layer in layers]
    return None if None in windows else max(window or 0 for window in windows)


class KVCache:
    """Keys and values of all layers, by block.

    Attributes:
        keys: for each layer [num_blocks, block_size, Hkv, D].
        values: for each layer [num_blocks, block_size, Hkv, Dv].
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
    ) -> None:
        self.block_size = block_size
        self.keys, self.values = _allocate(layers, num_blocks, block_size, dtype, device)
        # Pinned memory makes copies to and from a GPU run at the link's speed.
        pin = device.type == "cuda" and num_swap_blocks > 0
        self._swap_keys, self._swap_values = _allocate(
            layers, num_swap_blocks, block_size, dtype, torch.device("cpu"), pin_memory=pin
        )

    def swap_out(self, copies: IntArray) -> None:
        """Copy blocks to the CPU pool: [N, 2] of (pool block, CPU block)."""
        self._copy(copies, self.keys, self._swap_keys)
        self._copy(copies, self.values, self._swap_values)

    def swap_in(self, copies: IntArray) -> None:
        """Copy blocks back: [N, 2] of (CPU block, pool block)."""
        self._copy(copies, self._swap_keys, self.keys)
        self._copy(copies, self._swap_values, self.values)

    def copy(self, copies: IntArray) -> None:
        """Copy blocks within the pool: [N, 2] of (source, target)."""
        self._copy(copies, self.keys, self.keys)
        self._copy(copies, self.values, self.values)

    def measure_swap_s_per_block(self) -> float:
        """Time the copy of a block to the CPU pool, in seconds; 0 where there is none.

        Blocks 0 are copied as they are: the pool is empty when this is called.
        """
        if not len(self._swap_keys[0]):
            return 0.0
        pair = np.zeros((1, 2), dtype=np.int64)
        self.swap_out(pair)  # the first copy pays for allocation
        started = time.perf_counter()
        self.swap_out(pair)
        return time.perf_counter() - started

    def checksum(self, block: int, num_tokens: int) -> int:
        """Give a checksum over the K and V of a block's first tokens in all layers."""
        total = 0
        for tensor in (*self.keys, *self.values):
            content = tensor[block, :num_tokens].contiguous().cpu().view(torch.uint8)
            total = zlib.crc32(content.numpy().tobytes(), total)
        return total

    def poison(self, blocks: list[int], value: float = float("nan")) -> None:
        """Overwrite blocks; a read of one that was not written since then shows up."""
        for tensor in (*self.keys, *self.values):
            tensor[blocks] = value

    @staticmethod
    def _copy(copies: IntArray, source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
        if not len(copies):
            return
        from_blocks, to_blocks = torch.from_numpy(copies).unbind(1)
        for source_layer, target_layer in zip(source, target, strict=True):
            moved = source_layer.index_select(0, from_blocks.to(source_layer.device))
            target_layer.index_copy_(
                0, to_blocks.to(target_layer.device), moved.to(target_layer.device)
            )


def _allocate(
    layers: list[LayerGeometry],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    pin_memory: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    def pool(layer: LayerGeometry, size: int) -> torch.Tensor:
        shape = (num_blocks, block_size, layer.num_kv_heads, size)
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)

    keys = [pool(layer, layer.key_size) for layer in layers]
    values = [pool(layer, layer.value_size) for layer in layers]
    return keys, values
