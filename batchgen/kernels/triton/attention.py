"""Prepare the attention kernel's launch from tensors and options."""

from typing import NamedTuple

import torch
import triton.language as tl

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.attend import attend_kernel
from batchgen.kernels.triton.batch import Carry, KVScales, PagedRows, SharedSegments
from batchgen.kernels.triton.launch import (
    Launch,
    Target,
    ceil_div,
    is_interpreted,
    next_power_of_2,
    stride_unit,
    target_of,
)
from batchgen.kernels.triton.tiles import (
    LEAST_SIDE,
    AttentionTile,
    attention_tile,
    num_splits,
)


def prepare_attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    ranges: PagedRows | SharedSegments,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: KVScales | None = None,
    tile: AttentionTile | None = None,
    *,
    fixed_order: bool = False,
    carry: Carry | None = None,
) -> Launch:
    """Prepare attention of all ranges, split over as many programs as ``out`` has parts.

    Args:
        query: [T, Hq, D], any strides.
        key_cache: [N, B, Hkv, D], any strides.
        value_cache: [N, B, Hkv, Dv].
        block_tables: [R, W] int32 or int64; rows may stand apart.
        ranges: which queries see which keys.
        options: scale, window, soft cap, sinks. Segments know no window, and take no sinks:
            those belong to the rows' own part, but for a carry.
        out: [S, P, Hq, Dv] contiguous; P is T for rows. Segments with a carry do not write it.
        lse: [S, P, Hq] float32, contiguous; None if it is not wanted. A must for S above 1.
        scales: of an fp8 pool.
        tile: replaces the table's choice.
        fixed_order: every tile of keys is masked, so that a query's result does not depend on
            the queries in its tile.
        carry: what segments leave and rows with a key start go on from. Key starts are
            multiples of the tile's keys, and segments begin at 0.
    """
    # Rows end at their context and begin with their own queries; segments say both.
    first_tokens: torch.Tensor | None = None
    table_rows: torch.Tensor | None = None
    if isinstance(ranges, SharedSegments):
        assert options.window is None and (options.sinks is None or carry is not None)
        token_starts, key_ends = ranges.place_starts, ranges.key_ends
        first_tokens, table_rows = ranges.first_tokens, ranges.table_rows
    else:
        token_starts, key_ends = ranges.query_starts, ranges.context_lens
    assert lse is not None or out.shape[0] == 1
    assert out.is_contiguous() and (lse is None or lse.is_contiguous())
    assert block_tables.stride(1) == 1
    key_size, value_size = key_cache.shape[3], value_cache.shape[3]
    if tile is None:
        tile = _tile(query, key_cache, value_cache, ranges, target_of(query.device))
    work = _work(query, key_cache, ranges, tile)
    unit = stride_unit(query.stride(0), query.stride(1))
    arguments = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "out": out,
        "lse": lse,
        "sinks": options.sinks,
        "key_scales": None if scales is None else scales.key,
        "value_scales": None if scales is None else scales.value,
        "carry_mixed": None if carry is None else carry.mixed,
        "carry_sums": None if carry is None else carry.sums,
        "token_starts": token_starts,
        "first_tokens": first_tokens,
        "table_rows": table_rows,
        "key_starts": ranges.key_starts,
        "key_ends": key_ends,
        "block_tables": block_tables,
        "num_rows": work.num_rows,
        "num_tokens": work.num_places,
        "num_carried": query.shape[0],
        "scale": options.scale,
        "softcap": options.softcap,
        "window": options.window,
        "token_step": query.stride(0) // unit,
        "head_step": query.stride(1) // unit,
        "query_stride": query.stride(2),
        "key_strides": key_cache.stride(),
        "value_strides": value_cache.stride(),
        "table_stride": block_tables.stride(0),
        "num_heads": query.shape[1],
        "group": work.group,
        "tile_heads": work.tile_heads,
        "key_size": key_size,
        "key_pad": next_power_of_2(key_size, LEAST_SIDE),
        "value_size": value_size,
        "value_pad": next_power_of_2(value_size, LEAST_SIDE),
        "block_size": key_cache.shape[1],
        "stride_unit": unit,
        "tile_rows": work.tile.rows,
        "tile_keys": work.tile.keys,
        "one_query": work.one_query,
        "all_masked": work.one_query or fixed_order,
        "dot_dtype": _dot_dtype(query),
    }
    assert all(
        tensor.is_contiguous()
        for tensor in arguments.values()
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 1
    )
    grid = (work.num_tiles, work.num_heads, out.shape[0])
    return Launch(attend_kernel, grid, arguments, work.tile.warps, work.tile.stages)


class Cut(NamedTuple):
    """How a launch is cut into programs.

    Attributes:
        tile: of each program.
        num_splits: programs over which keys are split.
    """

    tile: AttentionTile
    num_splits: int


def choose_cut(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    ranges: PagedRows | SharedSegments,
    max_keys: int,
    target: Target,
) -> Cut:
    """Choose how a launch is cut, so that it fills the device.

    It depends on the batch: a run whose results may not takes one tile, and no splits.

    Args:
        query: [T, Hq, D].
        key_cache: [N, B, Hkv, D].
        value_cache: [N, B, Hkv, Dv].
        ranges: which queries see which keys.
        max_keys: most keys of a range.
        target: the device.
    """
    tile = _tile(query, key_cache, value_cache, ranges, target)
    work = _work(query, key_cache, ranges, tile)
    programs = work.num_tiles * work.num_heads
    return Cut(tile, num_splits(programs, max_keys, tile, target.processors))


def _tile(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    ranges: PagedRows | SharedSegments,
    target: Target,
) -> AttentionTile:
    size = max(key_cache.shape[3], value_cache.shape[3])
    group = query.shape[1] // key_cache.shape[2]
    return attention_tile(target.capability, query.dtype, size, group, ranges.max_query_len)


class _Work(NamedTuple):
    """What a launch's programs share out.

    Attributes:
        tile: of each program.
        group: query heads to a key/value head.
        tile_heads: of them in a tile.
        num_rows: rows or segments.
        num_places: their queries.
        one_query: whether row r is token r.
        num_tiles: programs over the queries of one key/value head.
        num_heads: programs over heads.
    """

    tile: AttentionTile
    group: int
    tile_heads: int
    num_rows: int
    num_places: int
    one_query: bool
    num_tiles: int
    num_heads: int


def _work(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    ranges: PagedRows | SharedSegments,
    tile: AttentionTile,
) -> _Work:
    num_kv_heads = key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    tile_heads = min(group, tile.rows)
    if isinstance(ranges, SharedSegments):
        num_rows, num_places, one_query = ranges.key_ends.shape[0], ranges.num_places, False
    else:
        num_rows, num_places = ranges.context_lens.shape[0], query.shape[0]
        one_query = ranges.max_query_len == 1 and num_places == num_rows
    # Every row may end in a partial tile; so may the places behind the last row.
    num_tiles = num_rows if one_query else num_places // (tile.rows // tile_heads) + num_rows + 1
    num_heads = num_kv_heads * ceil_div(group, tile_heads)
    return _Work(tile, group, tile_heads, num_rows, num_places, one_query, num_tiles, num_heads)


_DOT_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def _dot_dtype(query: torch.Tensor) -> tl.dtype:
    """Choose in what products are taken, before they are summed in float32."""
    # The interpreter multiplies the bit patterns of bfloat16 as integers.
    if query.dtype == torch.bfloat16 and is_interpreted():
        return tl.float32
    return _DOT_DTYPES[query.dtype]
