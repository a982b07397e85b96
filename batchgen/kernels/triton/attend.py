"""The attention kernel: ranges of packed queries against ranges of keys in the pool.

One kernel serves a step's rows (prefill, chunks and decode in one launch) and the segments
that several rows share. The heads that read one key/value head stand in one tile with their
tokens, as in vLLM's unified Triton kernel; a program finds its row by a search in the
cumulative lengths, so the host knows nothing but an upper bound of the tiles. Along the keys
a row may be split over programs, whose parts :mod:`batchgen.kernels.triton.join` puts
together: split ``s`` of ``S`` takes the key tiles ``s``, ``s + S``, ``s + 2 S``, ..., so that
the grid fits any length, the work is even, and the order of a sum depends on no other row.
"""

import triton
import triton.language as tl

from batchgen.kernels.triton.key_tiles import attend_keys

# Scores are in units of log(2).
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


# What changes from step to step must not compile the kernel anew.
@triton.jit(
    do_not_specialize=[
        "num_rows", "num_tokens", "num_carried", "token_step", "head_step", "table_stride",
    ]
)  # fmt: skip
def attend_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    carry_mixed: tl.tensor,
    carry_sums: tl.tensor,
    token_starts: tl.tensor,
    first_tokens: tl.tensor,
    table_rows: tl.tensor,
    key_starts: tl.tensor,
    key_ends: tl.tensor,
    block_tables: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    num_carried: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    token_step: tl.tensor,
    head_step: tl.tensor,
    query_stride: tl.tensor,
    key_strides: tl.tuple,
    value_strides: tl.tuple,
    table_stride: tl.tensor,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    tile_heads: tl.constexpr,
    key_size: tl.constexpr,
    key_pad: tl.constexpr,
    value_size: tl.constexpr,
    value_pad: tl.constexpr,
    block_size: tl.constexpr,
    stride_unit: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    one_query: tl.constexpr,
    all_masked: tl.constexpr,
    dot_dtype: tl.constexpr,
) -> None:
    """A program: a tile of one row's queries, one key/value head, one split of the keys.

    Programs along axis 0 are tiles, along axis 1 key/value heads (times parts of a group too
    large for a tile), along axis 2 splits. Shapes and meanings are those of
    :func:`batchgen.kernels.triton.attention.prepare_attend`; an absent feature is None.
    """
    tile_queries: tl.constexpr = tile_rows // tile_heads
    group_parts: tl.constexpr = (group + tile_heads - 1) // tile_heads
    # Later queries see more keys: begin with them.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, start, count, at = _find_queries(
        token_starts, tile, num_rows, num_tokens, tile_queries, one_query
    )
    if at >= count:
        return

    first_token, table_row, position, key_start, key_end = _find_keys(
        row, row < num_rows, start, count, first_tokens, table_rows, key_starts, key_ends
    )
    kv_head = (tl.program_id(1) // group_parts).to(tl.int64)
    lane = tl.arange(0, tile_rows)
    place = at + lane // tile_heads
    in_group = tl.program_id(1) % group_parts * tile_heads + lane % tile_heads
    is_real = (lane // tile_heads < tile_queries) & (place < count) & (in_group < group)
    head = kv_head * group + in_group
    dims = tl.arange(0, key_pad)
    num_known = tl.where(row < num_rows, count, 0)
    token = (first_token + place).to(tl.int64)
    at_query = token * (token_step * stride_unit) + head * (head_step * stride_unit)
    vectors = tl.load(
        query + at_query[:, None] + (dims * query_stride)[None, :],
        mask=(is_real & (place < num_known))[:, None] & (dims < key_size)[None, :],
        other=0.0,
    ).to(dot_dtype)

    last_position = position + tl.minimum(at + tile_queries, count) - 1
    low = key_start
    if window is not None:
        low = tl.maximum(low, position + at - window + 1)
    high = tl.minimum(key_end, last_position + 1)
    begin = (low - key_start) // tile_keys + tl.program_id(2)
    end = (tl.maximum(high - key_start, 0) + tile_keys - 1) // tile_keys

    most = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.full([tile_rows], 0.0, tl.float32)
    mixed = tl.full([tile_rows, value_pad], 0.0, tl.float32)
    if sinks is not None:
        # A logit without a value: it belongs to one split.
        bound = tl.where((begin < end) & (tl.program_id(2) == 0), group, 0)
        logit = tl.load(sinks + head, mask=is_real & (in_group < bound), other=float("-inf"))
        most = logit.to(tl.float32) * _LOG2_E
        total = tl.where(logit > float("-inf"), 1.0, 0.0)
    if carry_mixed is not None and first_tokens is None:
        mixed, most, total = _take_carry(
            mixed, most, total, carry_mixed, carry_sums, token * num_heads + head,
            is_real & (place < tl.where(key_start > 0, num_known, 0)), num_carried * num_heads,
            value_size, value_pad,
        )  # fmt: skip
    if key_scales is not None:
        scale *= tl.load(key_scales + kv_head)
    keys = key_cache + kv_head * key_strides[2]
    values = value_cache + kv_head * value_strides[2]
    mixed, most, total = attend_keys(
        (mixed, most, total), vectors, position + place, position + at, last_position,
        (keys, values, block_tables + table_row * table_stride), (key_strides, value_strides),
        key_start, low, high, begin, end, scale, softcap, window,
        key_size, key_pad, value_size, value_pad, block_size, tile_keys, all_masked, dot_dtype,
    )  # fmt: skip
    if carry_mixed is not None and first_tokens is not None:
        _leave_carry(
            mixed, most, total, carry_mixed, carry_sums, token * num_heads + head,
            is_real & (place < num_known), num_carried * num_heads, value_size, value_pad,
        )  # fmt: skip
    else:
        if value_scales is not None:
            mixed *= tl.load(value_scales + kv_head)
        # A part without keys has a sum only.
        has_part = (begin < end) | (tl.num_programs(2) == 1)
        split_start = tl.program_id(2).to(tl.int64) * num_tokens
        _store_result(
            mixed, most, total, out, lse, (split_start + start + place) * num_heads + head,
            is_real, is_real & (place < tl.where(has_part, count, 0)), value_size, value_pad,
        )  # fmt: skip


@triton.jit
def _find_queries(
    token_starts: tl.tensor,
    tile: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    tile_queries: tl.constexpr,
    one_query: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Find a tile's row, where the row starts, how many tokens it has, and the tile's first.

    Row ``num_rows`` stands for the tokens behind the last row.
    """
    if one_query:
        row, start, count, at = tile, tile, 1, 0
    else:
        # Row r's tiles begin at ``token_starts[r] // tile_queries + r``: that leaves room for
        # the last, partial tile of every row.
        row = tile * 0
        highest = row + num_rows
        while row < highest:
            middle = (row + highest + 1) // 2
            if tl.load(token_starts + middle).to(tl.int32) // tile_queries + middle <= tile:
                row = middle
            else:
                highest = middle - 1
        start = tl.load(token_starts + row).to(tl.int32)
        end = tl.load(token_starts + row + 1, mask=row < num_rows, other=num_tokens).to(tl.int32)
        count = end - start
        at = (tile - start // tile_queries - row) * tile_queries
    return row, start, count, at


@triton.jit
def _find_keys(
    row: tl.tensor,
    is_row: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    first_tokens: tl.tensor,
    table_rows: tl.tensor,
    key_starts: tl.tensor,
    key_ends: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Find a row's first token, its row in the block table, its first position, and its keys."""
    key_end = tl.load(key_ends + row, mask=is_row, other=0).to(tl.int32)
    key_start = 0
    if key_starts is not None:
        key_start = tl.load(key_starts + row, mask=is_row, other=0).to(tl.int32)
    if first_tokens is None:
        first_token, table_row, position = start, row, key_end - count
    else:
        first_token = tl.load(first_tokens + row, mask=is_row, other=0)
        table_row = tl.load(table_rows + row, mask=is_row, other=0)
        # Behind all keys: every query sees them all.
        position = key_end
    return first_token, table_row.to(tl.int64), position, key_start, key_end


@triton.jit
def _take_carry(
    mixed: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    carry_mixed: tl.tensor,
    carry_sums: tl.tensor,
    place: tl.tensor,
    is_carried: tl.tensor,
    num_places: tl.tensor,
    size: tl.constexpr,
    pad: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Go on from what the segments' launch has seen, where it has seen anything."""
    dims = tl.arange(0, pad)
    carried = tl.load(
        carry_mixed + (place * size)[:, None] + dims[None, :],
        mask=is_carried[:, None] & (dims < size)[None, :],
        other=0.0,
    )
    mixed = tl.where(is_carried[:, None], carried, mixed)
    most = tl.where(is_carried, tl.load(carry_sums + place, mask=is_carried, other=0.0), most)
    carried = tl.load(carry_sums + num_places + place, mask=is_carried, other=0.0)
    return mixed, most, tl.where(is_carried, carried, total)


@triton.jit
def _leave_carry(
    mixed: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    carry_mixed: tl.tensor,
    carry_sums: tl.tensor,
    place: tl.tensor,
    is_written: tl.tensor,
    num_places: tl.tensor,
    size: tl.constexpr,
    pad: tl.constexpr,
) -> None:
    """Leave what was seen to the launch of the rows' own keys."""
    dims = tl.arange(0, pad)
    tl.store(
        carry_mixed + (place * size)[:, None] + dims[None, :],
        mixed,
        mask=is_written[:, None] & (dims < size)[None, :],
    )
    tl.store(carry_sums + place, most, mask=is_written)
    tl.store(carry_sums + num_places + place, total, mask=is_written)


@triton.jit
def _store_result(
    mixed: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    result: tl.tensor,
    is_real: tl.tensor,
    is_written: tl.tensor,
    size: tl.constexpr,
    pad: tl.constexpr,
) -> None:
    """Store the mean of values; a query that saw nothing, as in a padded row, gives 0."""
    has_seen = total > 0
    total = tl.where(has_seen, total, 1.0)
    dims = tl.arange(0, pad)
    tl.store(
        out + (result * size)[:, None] + dims[None, :],
        (mixed * tl.where(has_seen, 1.0 / total, 0.0)[:, None]).to(out.dtype.element_ty),
        mask=is_written[:, None] & (dims < size)[None, :],
    )
    if lse is not None:
        sums = tl.where(has_seen, (most + tl.log2(total)) * _LN_2, float("-inf"))
        tl.store(lse + result, sums, mask=is_real)
