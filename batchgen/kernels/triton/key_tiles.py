"""The attention kernel's loop over the keys: an online softmax, one tile of the pool at a time."""

import triton
import triton.language as tl

# exp2 is one instruction: scores are kept in units of log(2).
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    state: tl.tuple,
    vectors: tl.tensor,
    query_position: tl.tensor,
    first_position: tl.tensor,
    last_position: tl.tensor,
    pool: tl.tuple,
    strides: tl.tuple,
    key_start: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    key_size: tl.constexpr,
    key_pad: tl.constexpr,
    value_size: tl.constexpr,
    value_pad: tl.constexpr,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
    all_masked: tl.constexpr,
    dot_dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to this split's key tiles, without masks where all queries see a whole tile."""
    step = tl.num_programs(2)
    if not all_masked:
        if window is not None:
            # Tiles at the window's edge, before those that the last query sees whole.
            oldest = tl.maximum(last_position - window + 1 - key_start, 0)
            edge = tl.minimum((oldest + tile_keys - 1) // tile_keys, end)
            state = _attend_tiles(
                state, vectors, query_position, pool, strides, begin, edge, step,
                key_start, low, high, scale, softcap, window,
                key_size, key_pad, value_size, value_pad, block_size, tile_keys, dot_dtype, True,
            )  # fmt: skip
            begin += (tl.maximum(edge - begin, 0) + step - 1) // step * step
        # Tiles before the diagonal, which begins behind the first query.
        edge = tl.maximum(tl.minimum(first_position + 1, high) - key_start, 0) // tile_keys
        state = _attend_tiles(
            state, vectors, query_position, pool, strides, begin, edge, step,
            key_start, low, high, scale, softcap, window,
            key_size, key_pad, value_size, value_pad, block_size, tile_keys, dot_dtype, False,
        )  # fmt: skip
        begin += (tl.maximum(edge - begin, 0) + step - 1) // step * step
    return _attend_tiles(
        state, vectors, query_position, pool, strides, begin, end, step,
        key_start, low, high, scale, softcap, window,
        key_size, key_pad, value_size, value_pad, block_size, tile_keys, dot_dtype, True,
    )  # fmt: skip


@triton.jit
def _attend_tiles(
    state: tl.tuple,
    vectors: tl.tensor,
    query_position: tl.tensor,
    pool: tl.tuple,
    strides: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    step: tl.tensor,
    key_start: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    key_size: tl.constexpr,
    key_pad: tl.constexpr,
    value_size: tl.constexpr,
    value_pad: tl.constexpr,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
    dot_dtype: tl.constexpr,
    is_masked: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to key tiles ``begin``, ``begin + step``, ... below ``end``.

    ``mixed`` is the sum of values weighted by exp2(score - most), ``total`` that of weights.
    Keys outside [low, high) may never have been written: neither their K nor their V is read.
    """
    mixed, most, total = state
    all_keys, all_values, table = pool
    key_strides, value_strides = strides
    score_scale = scale * _LOG2_E if softcap is None else scale / softcap
    for tile in range(begin, end, step):
        keys = key_start + tile * tile_keys + tl.arange(0, tile_keys)
        is_known = (keys >= low) & (keys < high)
        entries = table + keys // block_size
        if is_masked:
            blocks = tl.load(entries, mask=is_known, other=0).to(tl.int64)
        else:
            blocks = tl.load(entries).to(tl.int64)
        slots = keys % block_size
        rows = all_keys + blocks * key_strides[0] + slots * key_strides[1]
        key = _load_vectors(rows, is_known, key_strides[3], key_size, key_pad, is_masked)
        # IEEE: float32 is not rounded to TF32.
        scores = tl.dot(vectors, tl.trans(key.to(dot_dtype)), input_precision="ieee") * score_scale
        if softcap is not None:
            scores = _tanh(scores) * (softcap * _LOG2_E)
        if is_masked:
            is_seen = is_known[None, :] & (keys[None, :] <= query_position[:, None])
            if window is not None:
                is_seen &= keys[None, :] > query_position[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))

        now_most = tl.maximum(most, tl.max(scores, 1))
        shift = now_most
        if is_masked:
            # Where nothing was seen yet, -inf less -inf would be no number.
            shift = tl.where(now_most == float("-inf"), 0.0, now_most)
        weights = tl.math.exp2(scores - shift[:, None])
        decay = tl.math.exp2(most - shift)
        total = total * decay + tl.sum(weights, 1)
        most = now_most

        rows = all_values + blocks * value_strides[0] + slots * value_strides[1]
        value = _load_vectors(rows, is_known, value_strides[3], value_size, value_pad, is_masked)
        mixed = tl.dot(
            weights.to(dot_dtype),
            value.to(dot_dtype),
            mixed * decay[:, None],
            input_precision="ieee",
        )
    return mixed, most, total


@triton.jit
def _load_vectors(
    rows: tl.tensor,
    is_known: tl.tensor,
    stride: tl.tensor,
    size: tl.constexpr,
    pad: tl.constexpr,
    is_masked: tl.constexpr,
) -> tl.tensor:
    """Load [keys, pad] elements, with zeros for what is unknown and behind ``size``."""
    dims = tl.arange(0, pad)
    places = rows[:, None] + (dims * stride)[None, :]
    if is_masked and size < pad:
        found = tl.load(places, mask=is_known[:, None] & (dims < size)[None, :], other=0.0)
    elif is_masked:
        found = tl.load(places, mask=is_known[:, None], other=0.0)
    elif size < pad:
        found = tl.load(places, mask=(dims < size)[None, :], other=0.0)
    else:
        found = tl.load(places)
    return found


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent; the sign is set last so that the exponential cannot overflow."""
    shrunk = tl.math.exp2(tl.abs(x) * (-2.0 * _LOG2_E))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)
