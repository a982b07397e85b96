"""Attention kernels against float64: a step's rows, shared prefixes, fp8 pools, fixed order."""

from dataclasses import dataclass, replace
from math import lcm

import torch

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.batch import KVScales, PagedRows, SharedSegments
from batchgen.kernels.triton.launch import device_capability
from batchgen.kernels.triton.paged_attention import paged_attention
from batchgen.kernels.triton.prefix_attention import cascade_attention, fixed_order_attention
from batchgen.kernels.triton.tiles import MOST_KEYS, fixed_order_tile
from gpu_check_parts.batches import Batch, Shape, make_batch, poisoned_memory, relative_error
from gpu_check_parts.context import Context, Verdict

# Of 1 + the expected size.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class AttentionCase:
    """A layer of a model family, and how it is launched.

    Attributes:
        unusual: see :func:`gpu_check_parts.batches.make_batch`.
        in_dry_run: with the others of its kind it leaves out no feature.
    """

    name: str
    shape: Shape
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    splits: int = 1
    unusual: bool = False
    in_dry_run: bool = False

    def options(self, generator: torch.Generator) -> AttentionOptions:
        """Options of the layer, sinks drawn."""
        sinks = None
        if self.has_sinks:
            sinks = torch.randn(self.shape.heads, generator=generator, device=generator.device)
        return AttentionOptions(self.shape.size**-0.5, self.window, self.softcap, sinks)


def attention_cases(dry_run: bool) -> list[AttentionCase]:
    """Families by what their attention has that others' has not."""

    def shape(heads: int, kv_heads: int, size: int, block_size: int = 16, **other: object) -> Shape:
        small = min(size, 16 if size % 16 == 0 else 24) if dry_run else size
        kept = max(1, kv_heads // 4) if dry_run else kv_heads
        return Shape(heads // kv_heads * kept, kept, small, block_size, **other)  # type: ignore[arg-type]

    fp32, fp16 = torch.float32, torch.float16
    every = [
        AttentionCase("llama 8B, bf16", shape(32, 8, 128), in_dry_run=True),
        AttentionCase("llama 8B, fp32", shape(32, 8, 128, dtype=fp32)),
        AttentionCase("llama 8B, fp16, 4 splits", shape(32, 8, 128, dtype=fp16), splits=4),
        AttentionCase("llama 7B, every head its own", shape(16, 16, 128)),
        AttentionCase("gemma2: soft cap, heads of 256", shape(8, 4, 256), softcap=50.0),
        AttentionCase(
            "gemma2: window", shape(8, 4, 256), softcap=50.0, window=100, in_dry_run=True
        ),
        AttentionCase("gpt_oss: sinks, window", shape(64, 8, 64), has_sinks=True, window=128),
        AttentionCase(
            "gpt_oss: sinks, 2 splits", shape(64, 8, 64), has_sinks=True, splits=2, in_dry_run=True
        ),
        AttentionCase("smollm: groups of 3", shape(9, 3, 64, 32)),
        AttentionCase(
            "values smaller than keys, unusual strides",
            shape(8, 2, 128, value_size=64),
            unusual=True,
        ),
        AttentionCase("heads of 80, blocks of 4", shape(32, 32, 80, 4)),
        AttentionCase("heads of 96, blocks of 256", shape(32, 32, 96, 256)),
        AttentionCase(
            "one key/value head for 20", shape(20, 1, 128, 8, dtype=fp32), in_dry_run=True
        ),
    ]
    return [case for case in every if case.in_dry_run or not dry_run]


# Context and queries: decode, chunks, whole prompts, a padded row, lengths around a block's.
_MIXED = [
    (1, 1), (700, 1), (2049, 1), (333, 333), (1500, 60), (64, 64), (0, 3), (17, 16), (900, 257),
]  # fmt: skip
_MIXED_SMALL = [(1, 1), (20, 1), (17, 17), (0, 2), (24, 5)]
_DECODE = [(context, 1) for context in (1, 15, 16, 17, 500, 1024, 3000, 31)]
_DECODE_SMALL = [(context, 1) for context in (1, 16, 33)]


def check_rows(context: Context, case: AttentionCase, *, decode: bool) -> Verdict:
    """A step of prompts, chunks and decoding rows, or of decoding rows alone."""
    generator = context.generator(case.name)
    rows = (
        context.choose(_DECODE, _DECODE_SMALL) if decode else context.choose(_MIXED, _MIXED_SMALL)
    )
    batch = make_batch(
        generator, case.shape, rows, padding=0 if decode else 5, unusual=case.unusual
    )
    options = case.options(generator)
    with poisoned_memory():
        out = paged_attention(
            batch.query, batch.key_cache, batch.value_cache, batch.block_tables, _rows_of(batch),
            options, num_splits=case.splits,
        )  # fmt: skip
    return judge(batch.shape, relative_error(out, batch.expected(options)))


def _rows_of(batch: Batch, key_starts: torch.Tensor | None = None) -> PagedRows:
    return PagedRows(batch.query_starts, batch.context_lens, batch.max_query_len, key_starts)


def check_prefixes(context: Context, case: AttentionCase) -> Verdict:
    """Two groups of rows on a prefix each."""
    generator = context.generator(case.name)
    size = case.shape.block_size
    shared, own = size * context.choose(max(1, 512 // size), 1), context.choose(60, 5)
    rows = [(shared + own + i, 1 + i % 3) for i in range(context.choose(12, 2))]
    batch = make_batch(generator, case.shape, rows, groups=2, shared=shared)
    options = case.options(generator)
    with poisoned_memory():
        out = cascade_attention(
            batch.query, batch.key_cache, batch.value_cache, batch.block_tables,
            _rows_of(batch, torch.full_like(batch.context_lens, shared)),
            _segments(batch, groups=2, shared=shared), options,
            num_splits=case.splits, num_shared_splits=2,
        )  # fmt: skip
    return judge(batch.shape, relative_error(out, batch.expected(options)))


def _segments(batch: Batch, groups: int, shared: int) -> SharedSegments:
    """The prefix of each group as one segment of all its rows."""
    device, num_rows, num_tokens = batch.query.device, len(batch.rows), batch.query.shape[0]
    firsts = [group * num_rows // groups for group in range(groups)]
    starts = batch.query_starts[[*firsts, num_rows]]

    def numbers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return SharedSegments(
        place_starts=starts,
        first_tokens=starts[:-1].contiguous(),
        table_rows=numbers(firsts),
        key_starts=numbers([0] * groups),
        key_ends=numbers([shared] * groups),
        token_places=numbers(list(range(num_tokens)))[:, None],
        num_places=num_tokens,
        max_query_len=num_tokens,
    )


def check_fixed_order(context: Context, case: AttentionCase) -> Verdict:
    """Rows on a prefix as engine.deterministic takes them: together, and each by itself."""
    generator, shape = context.generator(case.name), case.shape
    # A row's queries are all behind the prefix.
    shared, own = lcm(MOST_KEYS, shape.block_size), context.choose(200, 8)
    rows = [(shared + own + i, 1 + 5 * i % 7) for i in range(context.choose(9, 2))]
    batch = make_batch(generator, shape, rows, shared=shared)
    options = case.options(generator)
    tile = fixed_order_tile(
        device_capability(context.device), shape.dtype, shape.size, shape.heads // shape.kv_heads
    )

    def attend(first: int, end: int, segments: SharedSegments | None) -> torch.Tensor:
        starts = batch.query_starts[first : end + 1]
        begin, stop = int(starts[0]), int(starts[-1])
        lengths = batch.context_lens[first:end]
        key_starts = None if segments is None else torch.full_like(lengths, shared)
        rows = PagedRows(starts - begin, lengths, batch.max_query_len, key_starts)
        with poisoned_memory():
            return fixed_order_attention(
                batch.query[begin:stop], batch.key_cache, batch.value_cache,
                batch.block_tables[first:end], rows, segments, options, tile,
            )  # fmt: skip

    together = attend(0, len(rows), _segments(batch, groups=1, shared=shared))
    alone = torch.cat([attend(row, row + 1, None) for row in range(len(rows))])
    passed, detail = judge(shape, relative_error(together, batch.expected(options)))
    differing = int((together != alone).sum())
    # The interpreter's products are a CPU library's, which rounds a row by its place.
    return passed and (context.dry_run or not differing), f"{detail}, {differing} elements differ"


def check_fp8(context: Context, case: AttentionCase) -> Verdict:
    """Attention to an fp8 pool, against float64 over what the pool holds."""
    generator, shape = context.generator(case.name), case.shape
    batch = make_batch(generator, shape, context.choose(_DECODE, _DECODE_SMALL))
    scales = torch.rand(shape.kv_heads, generator=generator, device=generator.device) + 0.5
    heads = scales[:, None]
    caches = [(cache.float() / heads).to(FP8) for cache in (batch.key_cache, batch.value_cache)]
    rounded = [
        [(row.float() / heads).to(FP8).double() * heads for row in kept]
        for kept in (batch.keys, batch.values)
    ]
    options = case.options(generator)
    with poisoned_memory():
        out = paged_attention(
            batch.query, caches[0], caches[1], batch.block_tables, _rows_of(batch), options,
            scales=KVScales(scales, scales),
        )  # fmt: skip
    stored = replace(batch, keys=rounded[0], values=rounded[1])
    return judge(shape, relative_error(out, stored.expected(options)))


def judge(shape: Shape, error: float) -> Verdict:
    """Hold an error against what the dtype allows; a NaN is not below anything."""
    tolerance = TOLERANCES[shape.dtype]
    return error <= tolerance, f"error {error:.1e}, allowed {tolerance:.0e}"
