"""Random ragged batches over a poisoned pool, and what attention to them is in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from batchgen.kernels.reference import AttentionOptions

NAN = float("nan")
# On a CPU, an entry of a block table that must not be followed: it lies far outside of every
# pool. On a GPU that would end the CUDA context, and with it all later checks.
_NO_BLOCK = 1 << 30


@dataclass(frozen=True)
class Shape:
    """Heads and sizes of a layer, and the pool's block size.

    Attributes:
        value_size: of a value; 0 is the size of a key.
    """

    heads: int
    kv_heads: int
    size: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    value_size: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of a key and a value."""
        return self.size, self.value_size or self.size


@dataclass(frozen=True)
class Batch:
    """R rows over a pool.

    Attributes:
        rows: context and queries of each row; a context of 0 is a padded row.
        query: [T, Hq, D], padding tokens behind the last row included.
        keys, values: of each row [C, Hkv, D or Dv].
        key_cache, value_cache: [N, B, Hkv, D or Dv]; what no row may read is NaN.
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
        """[T, Hq, Dv] in float64; zeros for padded rows and tokens."""
        shape = (*self.query.shape[:2], self.shape.sizes[1])
        out = torch.zeros(shape, dtype=torch.float64, device=self.query.device)
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
    window: int | None = None,
    unusual: bool = False,
) -> Batch:
    """Scatter rows over a pool in random order.

    Args:
        generator: draws everything, on its device.
        shape: heads and sizes.
        rows: context and queries of each; a context of 0 is a padded row.
        padding: tokens behind the last row.
        groups: rows fall into so many groups of neighbours, one after another.
        shared: leading tokens that a group has in the same blocks; a multiple of the block size.
        window: blocks wholly behind a row's window are not in its table.
        unusual: strides and integers that the engine does not use, but may: elements of
            queries and blocks of the pool stand apart, numbers are of 64 bits by lot.
    """
    device, size = generator.device, shape.block_size
    counts = [-(-context // size) for context, _ in rows]
    # The last block belongs to nobody.
    num_blocks = sum(counts) + groups * (shared // size) + 1
    order = torch.randperm(num_blocks - 1, generator=generator, device=device).tolist()
    caches = make_pool(shape, num_blocks, device, unusual=unusual)
    stray = num_blocks - 1 if device.type == "cuda" else _NO_BLOCK
    tables = torch.full((len(rows), max(counts) + 1), stray, dtype=torch.int32)
    contents: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    a_group = -(-len(rows) // groups)
    for row, (context, n) in enumerate(rows):
        if row % a_group == 0:
            common = [order.pop() for _ in range(shared // size)]
            prefix = [_normal(generator, shape, shared, shape.kv_heads, d) for d in shape.sizes]
        blocks = (common + [order.pop() for _ in range(counts[row])])[: counts[row]]
        first = 0 if window is None else max(0, context - n - window + 1) // size
        tables[row, first : counts[row]] = torch.tensor(blocks[first:], dtype=torch.int32)
        slots = _slots(blocks, size, context, device)[first * size :]
        for cache, start, kept in zip(caches, prefix, contents, strict=True):
            new = max(0, context - shared)
            own = _normal(generator, shape, new, shape.kv_heads, start.shape[2])
            whole = torch.cat((start, own))[:context]
            cache[slots // size, slots % size] = whole[first * size :]
            kept.append(whole)
    query = _queries(generator, shape, sum(n for _, n in rows) + padding, unusual=unusual)
    starts = torch.tensor([0] + [n for _, n in rows]).cumsum(0)
    lengths = torch.tensor([context for context, _ in rows])
    is_long = unusual and bool(torch.rand(1, generator=generator, device=device) < 0.5)
    integer = torch.int64 if is_long else torch.int32
    return Batch(
        shape, rows, query, *contents, *caches, tables.to(device, integer),
        starts.to(device, integer), lengths.to(device, integer),
    )  # fmt: skip


def make_pool(
    shape: Shape, num_blocks: int, device: torch.device, *, unusual: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two poisoned caches; unusual ones' blocks stand apart, with heads before tokens."""
    caches = []
    for size in shape.sizes:
        if unusual:
            whole = (num_blocks, 2, shape.kv_heads, shape.block_size, size + 3)
            poisoned = torch.full(whole, NAN, dtype=shape.dtype, device=device)
            caches.append(poisoned[:, 1, :, :, :size].transpose(1, 2))
        else:
            whole = (num_blocks, shape.block_size, shape.kv_heads, size)
            caches.append(torch.full(whole, NAN, dtype=shape.dtype, device=device))
    return caches[0], caches[1]


def _slots(blocks: list[int], size: int, context: int, device: torch.device) -> torch.Tensor:
    starts = torch.tensor(blocks, dtype=torch.int64, device=device)[:, None] * size
    return (starts + torch.arange(size, device=device)).flatten()[:context]


def _queries(
    generator: torch.Generator, shape: Shape, num_tokens: int, *, unusual: bool
) -> torch.Tensor:
    """[T, Hq, D] with heads before tokens, as half of the model families have them."""
    query = _normal(generator, shape, shape.heads, num_tokens, shape.size).transpose(0, 1)
    if not unusual:
        return query
    apart = torch.full((*query.shape, 2), NAN, dtype=shape.dtype, device=query.device)
    apart[..., 1] = query
    return apart[..., 1]


def _normal(generator: torch.Generator, shape: Shape, *sizes: int) -> torch.Tensor:
    """Draw numbers of the shape's dtype."""
    drawn = torch.randn(sizes, generator=generator, device=generator.device)
    return drawn.to(shape.dtype)


def exact_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """One row in float64, [n, Hq, Dv]: the n queries are the last of C tokens."""
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
    return torch.einsum("nkgc,ckd->nkgd", weights, value.double()).reshape(n, heads, -1)


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
    """Return the largest error beside 1 + the expected size; NaN where anything is NaN."""
    errors = (out.double() - expected).abs() / (1 + expected.abs())
    return float(errors.max())
