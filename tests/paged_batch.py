"""A ragged batch over a paged pool, everything that may not be read poisoned."""

from dataclasses import dataclass

import numpy as np
import torch

from batchgen.kernels.reference import AttentionOptions
from tests.dense_attention import dense_attention

NAN = float("nan")
# An entry of a block table that must not be followed: it lies far outside of every pool.
NO_BLOCK = 1 << 30


@dataclass(frozen=True)
class Shape:
    """Heads and sizes of a layer, and the pool's block size."""

    heads: int = 4
    kv_heads: int = 2
    key_size: int = 16
    value_size: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Batch:
    """R rows of (context, queries), and perhaps tokens of no row behind them.

    ``keys`` and ``values`` are the rows' own, in order; the caches hold them by block.
    """

    shape: Shape
    rows: list[tuple[int, int]]
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor

    @property
    def max_query_len(self) -> int:
        return max(n for _, n in self.rows)

    def expected(self, options: AttentionOptions) -> torch.Tensor:
        """[T, Hq, Dv] in float64; zeros for padded rows and tokens."""
        size = self.shape.value_size
        out = torch.zeros(self.query.shape[0], self.shape.heads, size, dtype=torch.float64)
        start = 0
        for (context, n), key, value in zip(self.rows, self.keys, self.values, strict=True):
            query = self.query[start : start + n]
            if context:
                out[start : start + n] = dense_attention(query, key, value, options)
            start += n
        return out


def _normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.tensor(rng.normal(size=shape), dtype=torch.float32)


def make_pool(num_blocks: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Two poisoned caches whose blocks stand apart and whose heads come before tokens."""
    caches = []
    for size in (shape.key_size, shape.value_size):
        whole = torch.full((num_blocks, 2, shape.kv_heads, shape.block_size, size + 3), NAN)
        caches.append(whole.to(shape.dtype)[:, 1, :, :, :size].transpose(1, 2))
    return caches[0], caches[1]


def make_batch(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],
    shape: Shape,
    *,
    padding: int = 0,
    shared: int = 0,
    window: int | None = None,
) -> Batch:
    """Scatter rows over a poisoned pool.

    Args:
        rng: draws everything.
        rows: context and queries of each; a context of 0 is a padded row.
        shape: heads and sizes.
        padding: tokens behind the last row.
        shared: leading tokens that all rows have in the same blocks; whole blocks.
        window: blocks wholly behind a row's window are not in its table.
    """
    size = shape.block_size
    counts = [-(-context // size) for context, _ in rows]
    order = rng.permutation(sum(counts) + 2).tolist()
    common = [order.pop() for _ in range(shared // size)]
    key_cache, value_cache = make_pool(sum(counts) + 2, shape)
    tables = torch.full((len(rows), max(counts) + 1), NO_BLOCK, dtype=torch.int64)
    prefix = [_normal(rng, shared, shape.kv_heads, d) for d in (shape.key_size, shape.value_size)]
    keys, values = [], []
    for row, (context, n) in enumerate(rows):
        blocks = common + [order.pop() for _ in range(counts[row] - len(common))]
        first = 0 if window is None else max(0, context - n - window + 1) // size
        tables[row, first : counts[row]] = torch.tensor(blocks[first:], dtype=torch.int64)
        for cache, all_new, start in (
            (key_cache, keys, prefix[0]),
            (value_cache, values, prefix[1]),
        ):
            own = _normal(rng, context - min(shared, context), shape.kv_heads, cache.shape[3])
            new = torch.cat((start, own))[:context].to(shape.dtype)
            all_new.append(new)
            for at in range(first * size, context):
                cache[blocks[at // size], at % size] = new[at]
    num_tokens = sum(n for _, n in rows) + padding
    # Heads before tokens, as half of the model families have them, and elements apart.
    query = torch.full((shape.heads, num_tokens, shape.key_size, 2), NAN, dtype=shape.dtype)
    query[..., 1] = _normal(rng, shape.heads, num_tokens, shape.key_size)
    starts = np.cumsum([0] + [n for _, n in rows])
    lengths = [context for context, _ in rows]
    integer = (torch.int32, torch.int64)[int(rng.integers(2))]
    return Batch(
        shape, rows, query[..., 1].transpose(0, 1), keys, values, key_cache, value_cache,
        tables.to(integer), torch.tensor(starts, dtype=integer), torch.tensor(lengths),
    )  # fmt: skip
