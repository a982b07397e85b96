"""Random ragged batches over a poisoned pool, and what attention to them is in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from batchgen.kernels.reference import AttentionOptions

NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    """Heads and sizes of a layer, and the pool's block size."""

    heads: int
    kv_heads: int
    size: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Batch:
    """R rows over a pool.

    Attributes:
        rows: context and queries of each row; a context of 0 is a padded row.
        query: [T, Hq, D], padding tokens behind the last row included.
        keys, values: of each row [C, Hkv, D].
        key_cache, value_cache: [N, B, Hkv, D]; what no row may read is NaN.
        block_tables: [R, W].
        query_starts: [R + 1].
        context_lens: [R].
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
        """The most queries of a row."""
        return max(n for _, n in self.rows)

    def expected(self, options: AttentionOptions) -> torch.Tensor:
        """[T, Hq, D] in float64; zeros for padded rows and tokens."""
        out = torch.zeros(self.query.shape, dtype=torch.float64, device=self.query.device)
        start = 0
        for (context, n), key, value in zip(self.rows, self.keys, self.values, strict=True):
            if context:
                query = self.query[start : start + n]
                out[start : start + n] = exact_attention(query, key, value, options)
            start += n
        return out


def make_batch(
    generator: torch.Generator,
    shape: Shape,
    rows: list[tuple[int, int]],
    *,
    padding: int = 0,
    groups: int = 1,
    shared: int = 0,
) -> Batch:
    """Scatter rows over a pool in random order.

    Args:
        generator: draws everything, on its device.
        shape: heads and sizes.
        rows: context and queries of each.
        padding: tokens behind the last row.
        groups: rows fall into so many groups of neighbours, one after another.
        shared: leading tokens that a group has in the same blocks; a multiple of the block size.
    """
    device, size = generator.device, shape.block_size
    counts = [-(-context // size) for context, _ in rows]
    # The last block belongs to nobody: table entries behind a row's own lead there. (An entry
    # far outside the pool would end the CUDA context, and with it all later checks.)
    num_blocks = sum(counts) + groups * (shared // size) + 1
    order = torch.randperm(num_blocks - 1, generator=generator, device=device).tolist()
    caches = [_new_pool(shape, num_blocks, device) for _ in range(2)]
    tables = torch.full((len(rows), max(counts) + 1), num_blocks - 1, dtype=torch.int32)
    contents: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    a_group = -(-len(rows) // groups)
    for row, (context, _) in enumerate(rows):
        if row % a_group == 0:
            common = [order.pop() for _ in range(shared // size)]
            prefix = [_normal(generator, shape, shared, shape.kv_heads) for _ in range(2)]
        blocks = (common + [order.pop() for _ in range(counts[row])])[: counts[row]]
        tables[row, : counts[row]] = torch.tensor(blocks, dtype=torch.int32)
        slots = _slots(blocks, size, context, device)
        for cache, start, kept in zip(caches, prefix, contents, strict=True):
            own = _normal(generator, shape, max(0, context - shared), shape.kv_heads)
            whole = torch.cat((start, own))[:context]
            cache[slots // size, slots % size] = whole
            kept.append(whole)
    num_tokens = sum(n for _, n in rows) + padding
    # Heads before tokens, as half of the model families have them.
    query = _normal(generator, shape, shape.heads, num_tokens).transpose(0, 1)
    starts = torch.tensor([0] + [n for _, n in rows]).cumsum(0)
    lengths = torch.tensor([context for context, _ in rows])
    return Batch(
        shape, rows, query, *contents, *caches, tables.to(device),
        starts.int().to(device), lengths.int().to(device),
    )  # fmt: skip


def _new_pool(shape: Shape, num_blocks: int, device: torch.device) -> torch.Tensor:
    size = (num_blocks, shape.block_size, shape.kv_heads, shape.size)
    return torch.full(size, NAN, dtype=shape.dtype, device=device)


def _slots(blocks: list[int], size: int, context: int, device: torch.device) -> torch.Tensor:
    starts = torch.tensor(blocks, dtype=torch.int64, device=device)[:, None] * size
    return (starts + torch.arange(size, device=device)).flatten()[:context]


def _normal(generator: torch.Generator, shape: Shape, outer: int, heads: int) -> torch.Tensor:
    """[outer, heads, size] in the shape's dtype."""
    drawn = torch.randn((outer, heads, shape.size), generator=generator, device=generator.device)
    return drawn.to(shape.dtype)


def exact_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """One row in float64: [n, Hq, D] queries are the last of C tokens."""
    n, heads, size = query.shape
    num_keys, kv_heads, _ = key.shape
    grouped = query.double().view(n, kv_heads, heads // kv_heads, size)
    scores = torch.einsum("nkgd,ckd->nkgc", grouped, key.double()) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    positions = torch.arange(num_keys - n, num_keys, device=query.device)[:, None]
    places = torch.arange(num_keys, device=query.device)[None]
    hidden = places > positions
    if options.window is not None:
        hidden |= places <= positions - options.window
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.double().view(1, kv_heads, -1, 1).expand(n, -1, -1, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys]
    return torch.einsum("nkgc,ckd->nkgd", weights, value.double()).reshape(n, heads, size)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every new tensor with NaN, so that an element that nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Give the largest error beside 1 + the expected size; NaN where anything is NaN."""
    errors = (out.double() - expected).abs() / (1 + expected.abs())
    return float(errors.max())
