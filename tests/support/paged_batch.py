"""Batches of the kernels' tests: tiny, on a CPU, with strides and integers of any kind."""

from dataclasses import replace
from typing import Any

import torch
from gpu_check_parts.batches import Batch, Shape, make_batch

from batchgen.kernels.triton.batch import KVScales


def tiny_shape(heads: int = 4, kv_heads: int = 2, size: int = 16, **given: Any) -> Shape:
    """A layer in float32 over blocks of 4."""
    return Shape(heads, kv_heads, size, **({"block_size": 4, "dtype": torch.float32} | given))


def draw_batch(
    seed: int, rows: list[tuple[int, int]], shape: Shape | None = None, **given: Any
) -> Batch:
    """Rows of (context, queries); see :func:`gpu_check_parts.batches.make_batch`."""
    generator = torch.Generator().manual_seed(seed)
    return make_batch(generator, shape or tiny_shape(), rows, unusual=True, **given)


def in_fp8(batch: Batch, *scales: float) -> tuple[Batch, KVScales]:
    """The same rows over an fp8 pool, what they expect rounded with it; a scale for each head."""
    of_heads = torch.tensor(scales)

    def rounded(numbers: torch.Tensor) -> torch.Tensor:
        return (numbers / of_heads[:, None]).to(torch.float8_e4m3fn)

    kept = replace(
        batch,
        keys=[rounded(key).float() * of_heads[:, None] for key in batch.keys],
        values=[rounded(value).float() * of_heads[:, None] for value in batch.values],
        key_cache=rounded(batch.key_cache),
        value_cache=rounded(batch.value_cache),
    )
    return kept, KVScales(of_heads, of_heads)
