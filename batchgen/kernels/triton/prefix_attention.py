"""Attention to what rows share, once for all of them, joined to what is their own.

The keys of a row fall into segments that it shares with its neighbours, and its own. Results
join exactly by their log-sum-exp (Hydragen, FlashInfer's cascade).
"""

import torch

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.attention import prepare_attend
from batchgen.kernels.triton.batch import KVScales, PagedRows, SharedSegments, new_carry, new_parts
from batchgen.kernels.triton.join import prepare_join
from batchgen.kernels.triton.tiles import AttentionTile


def cascade_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: PagedRows,
    segments: SharedSegments,
    options: AttentionOptions,
    *,
    num_splits: int = 1,
    num_shared_splits: int = 1,
    scales: KVScales | None = None,
    tile: AttentionTile | None = None,
    shared_tile: AttentionTile | None = None,
) -> torch.Tensor:
    """Attend to each row's own keys and to the segments that it shares.

    Args:
        query: [T, Hq, D], any strides.
        key_cache: [N, B, Hkv, D], any strides.
        value_cache: [N, B, Hkv, Dv].
        block_tables: [R, W] int32 or int64 blocks of each row; rows may stand apart.
        rows: the step's rows; their ``key_starts`` say where their own keys begin.
        segments: the rest of the keys.
        options: scale, soft cap, sinks; no window.
        num_splits: programs over which the own keys of a row are split.
        num_shared_splits: programs over which the keys of a segment are split.
        scales: of an fp8 pool.
        tile, shared_tile: replace the table's choice for the own keys and for segments.

    Returns:
        [T, Hq, Dv] in the query's dtype; zeros for padded rows.
    """
    value_size = value_cache.shape[3]
    own = new_parts(query, value_size, num_splits, query.shape[0])
    shared = new_parts(query, value_size, num_shared_splits, segments.num_places)
    # Sinks belong to the rows' own part.
    of_segments = AttentionOptions(options.scale, softcap=options.softcap)
    launches = ((rows, options, own, tile), (segments, of_segments, shared, shared_tile))
    for ranges, of_ranges, parts, of_launch in launches:
        prepare_attend(
            query, key_cache, value_cache, block_tables, ranges, of_ranges, parts.out, parts.lse,
            scales, of_launch,
        ).run()  # fmt: skip
    out = query.new_empty((*query.shape[:2], value_size))
    prepare_join(own, out, None, shared, segments.token_places).run()
    return out


def fixed_order_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: PagedRows,
    segments: SharedSegments | None,
    options: AttentionOptions,
    tile: AttentionTile,
    *,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attend as :func:`cascade_attention` does, with results that depend on no neighbour.

    A query goes over its tiles of keys one after another, from the first: nothing is split,
    and the launch over a row's own keys goes on with the sums that the segments' launch left,
    so that sharing changes no bit.

    Args:
        query: [T, Hq, D], any strides.
        key_cache: [N, B, Hkv, D], any strides.
        value_cache: [N, B, Hkv, Dv].
        block_tables: [R, W] int32 or int64 blocks of each row; rows may stand apart.
        rows: the step's rows; key starts are multiples of the tile's keys.
        segments: the rest of the keys, at most one segment a row, from key 0; or None.
        options: scale, soft cap, sinks; a window only without segments.
        tile: the same for every batch.
        scales: of an fp8 pool.

    Returns:
        [T, Hq, Dv] in the query's dtype; zeros for padded rows.
    """
    value_size = value_cache.shape[3]
    out = query.new_empty((*query.shape[:2], value_size))
    carry = None if segments is None else new_carry(query, value_size)
    for ranges in (segments, rows):
        if ranges is not None:
            prepare_attend(
                query, key_cache, value_cache, block_tables, ranges, options, out[None], None,
                scales, tile, fixed_order=True, carry=carry,
            ).run()  # fmt: skip
    return out
