"""Paged attention over a packed, ragged batch: prefill, chunks and decode in one launch."""

import torch

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.attention import prepare_attend
from batchgen.kernels.triton.batch import KVScales, PagedRows, new_parts
from batchgen.kernels.triton.join import prepare_join
from batchgen.kernels.triton.tiles import AttentionTile


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: PagedRows,
    options: AttentionOptions,
    *,
    num_splits: int = 1,
    lse: torch.Tensor | None = None,
    scales: KVScales | None = None,
    tile: AttentionTile | None = None,
) -> torch.Tensor:
    """Attend causally to each row's own blocks, with float32 sums.

    Query head ``h`` reads key/value head ``h // (Hq // Hkv)``.

    Args:
        query: [T, Hq, D], any strides. float32 stays float32; half precision is multiplied on
            tensor cores.
        key_cache: [N, B, Hkv, D], any strides.
        value_cache: [N, B, Hkv, Dv].
        block_tables: [R, W] int32 or int64 blocks of each row; rows may stand apart.
        rows: which tokens and keys belong together.
        options: scale, window, soft cap, sinks.
        num_splits: programs over which the keys of a row are split.
        lse: [T, Hq] float32, contiguous, receives the log-sum-exp of each query's scores.
        scales: of an fp8 pool.
        tile: replaces the table's choice.

    Returns:
        [T, Hq, Dv] in the query's dtype; zeros for padded rows.
    """
    out = query.new_empty((*query.shape[:2], value_cache.shape[3]))
    if num_splits == 1:
        sums = None if lse is None else lse[None]
        prepare_attend(
            query, key_cache, value_cache, block_tables, rows, options, out[None], sums,
            scales, tile,
        ).run()  # fmt: skip
        return out
    parts = new_parts(query, value_cache.shape[3], num_splits, query.shape[0])
    prepare_attend(
        query, key_cache, value_cache, block_tables, rows, options, parts.out, parts.lse,
        scales, tile,
    ).run()  # fmt: skip
    prepare_join(parts, out, lse).run()
    return out
