"""Prepare the attention kernel's launch from tensors and options."""

from typing import NamedTuple

import torch
import triton.language as tl

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.attend import attend_kernel
from batchgen.kernels.triton.batch import Carry, PagedRows, SharedSegments
from batchgen.kernels.triton.launch import (
    Launch,
    ceil_div,
    device_capability,
    is_interpreted,
    next_power_of_2,
    num_processors,
)
from batchgen.kernels.triton.scales import KVScales
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
        lse: [S, P, Hq] float32, contiguous; None where it is not wanted. A must for S above 1.
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
    work = _work(query, key_cache, value_cache, ranges, tile)
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
        "query_strides": query.stride(),
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


def choose_splits(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    ranges: PagedRows | SharedSegments,
    max_keys: int,
) -> int:
    """Choose over how many programs keys are split, so that a launch fills the device.

    It depends on the batch: a run whose results may not takes one.

    Args:
        query: [T, Hq, D].
        key_cache: [N, B, Hkv, D].
        value_cache: [N, B, Hkv, Dv].
        ranges: which queries see which keys.
        max_keys: most keys of a range.
    """
    work = _work(query, key_cache, value_cache, ranges, None)
    processors = num_processors(query.device)
    return num_splits(work.num_tiles * work.num_heads, max_keys, work.tile, processors)


class _Work(NamedTuple):
    """How a launch is cut into programs.

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
    value_cache: torch.Tensor,
    ranges: PagedRows | SharedSegments,
    tile: AttentionTile | None,
) -> _Work:
    num_kv_heads, max_len = key_cache.shape[2], ranges.max_query_len
    group = query.shape[1] // num_kv_heads
    if tile is None:
        size = max(key_cache.shape[3], value_cache.shape[3])
        tile = attention_tile(device_capability(query.device), query.dtype, size, group, max_len)
    tile_heads = min(group, tile.rows)
    if isinstance(ranges, SharedSegments):
        num_rows, num_places, one_query = ranges.key_ends.shape[0], ranges.num_places, False
    else:
        num_rows, num_places = ranges.context_lens.shape[0], query.shape[0]
        one_query = max_len == 1 and num_places == num_rows
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
