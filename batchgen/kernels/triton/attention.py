"""Prepare the attention kernel's launch from tensors and options."""

import torch
import triton
import triton.language as tl

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.attend import attend_kernel
from batchgen.kernels.triton.batch import PagedRows, SharedSegments
from batchgen.kernels.triton.launch import (
    Launch,
    ceil_div,
    device_capability,
    next_power_of_2,
)
from batchgen.kernels.triton.scales import KVScales
from batchgen.kernels.triton.tiles import LEAST_SIDE, AttentionTile, attention_tile


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
) -> Launch:
    """Prepare attention of all ranges, split over as many programs as ``out`` has parts.

    Args:
        query: [T, Hq, D], any strides.
        key_cache: [N, B, Hkv, D], any strides.
        value_cache: [N, B, Hkv, Dv].
        block_tables: [R, W] int32 or int64, any strides.
        ranges: which queries see which keys.
        options: scale, window, soft cap, sinks. Segments know no window, and take no sinks:
            those belong to the rows' own part.
        out: [S, P, Hq, Dv], any strides; P is T for rows.
        lse: [S, P, Hq] float32; None where it is not wanted. A must for S above 1.
        scales: of an fp8 pool.
        tile: replaces the table's choice.
    """
    # Rows end at their context and begin with their own queries; segments say both.
    first_tokens: torch.Tensor | None = None
    table_rows: torch.Tensor | None = None
    if isinstance(ranges, SharedSegments):
        assert options.window is None and options.sinks is None
        token_starts, key_ends = ranges.place_starts, ranges.key_ends
        first_tokens, table_rows = ranges.first_tokens, ranges.table_rows
    else:
        token_starts, key_ends = ranges.query_starts, ranges.context_lens
    assert lse is not None or out.shape[0] == 1
    num_places, num_kv_heads = out.shape[1], key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    key_size, value_size = key_cache.shape[3], value_cache.shape[3]
    if tile is None:
        capability, size = device_capability(query.device), max(key_size, value_size)
        tile = attention_tile(capability, query.dtype, size, group, ranges.max_query_len)
    tile_heads = min(group, tile.rows)
    num_rows = key_ends.shape[0]
    one_query = (
        isinstance(ranges, PagedRows) and ranges.max_query_len == 1 and num_places == num_rows
    )
    # One more for the places behind the last row.
    num_tiles = num_rows if one_query else num_places // (tile.rows // tile_heads) + num_rows + 1
    arguments = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "out": out,
        "lse": lse,
        "sinks": options.sinks,
        "key_scales": None if scales is None else scales.key,
        "value_scales": None if scales is None else scales.value,
        "token_starts": token_starts,
        "first_tokens": first_tokens,
        "table_rows": table_rows,
        "key_starts": ranges.key_starts,
        "key_ends": key_ends,
        "block_tables": block_tables,
        "num_rows": num_rows,
        "num_tokens": num_places,
        "scale": options.scale,
        "softcap": options.softcap,
        "window": options.window,
        "query_strides": query.stride(),
        "key_strides": key_cache.stride(),
        "value_strides": value_cache.stride(),
        "out_strides": out.stride(),
        "lse_strides": (0, 0, 0) if lse is None else lse.stride(),
        "table_strides": block_tables.stride(),
        "group": group,
        "tile_heads": tile_heads,
        "key_size": key_size,
        "key_pad": next_power_of_2(key_size, LEAST_SIDE),
        "value_size": value_size,
        "value_pad": next_power_of_2(value_size, LEAST_SIDE),
        "block_size": key_cache.shape[1],
        "tile_rows": tile.rows,
        "tile_keys": tile.keys,
        "one_query": one_query,
        "dot_dtype": _dot_dtype(query),
    }
    assert all(
        tensor.is_contiguous()
        for tensor in arguments.values()
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 1
    )
    grid = (num_tiles, num_kv_heads * ceil_div(group, tile_heads), out.shape[0])
    return Launch(attend_kernel, grid, arguments, tile.warps, tile.stages)


_DOT_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def _dot_dtype(query: torch.Tensor) -> tl.dtype:
    """Choose in what products are taken, before they are summed in float32."""
    # The interpreter multiplies the bit patterns of bfloat16 as integers.
    is_interpreted = not isinstance(attend_kernel, triton.JITFunction)
    if query.dtype == torch.bfloat16 and is_interpreted:
        return tl.float32
    return _DOT_DTYPES[query.dtype]
