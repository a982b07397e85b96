"""Join attention to parts of the keys by their log-sum-exp."""

import torch
import triton
import triton.language as tl

from batchgen.kernels.triton.batch import Parts
from batchgen.kernels.triton.launch import Launch, ceil_div, next_power_of_2

# Elements of the parts that a program holds at a time.
_ELEMENTS = 2048


def prepare_join(
    own: Parts,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    shared: Parts | None = None,
    token_places: torch.Tensor | None = None,
) -> Launch:
    """Prepare ``out = sum(part * exp(lse)) / sum(exp(lse))`` over all parts of each token.

    Args:
        own: S parts of each of the T tokens.
        out: [T, Hq, Dv], any strides; zeros where a token has seen nothing.
        lse: [T, Hq] float32, receives the joined log-sum-exp; None where it is not wanted.
        shared: parts of each place in shared segments.
        token_places: [T, L] places of each token, -1 for none.
    """
    num_tokens, num_heads, value_size = out.shape
    value_pad = next_power_of_2(value_size)
    own_pad = next_power_of_2(own.out.shape[0])
    shared_pad = 1 if shared is None else next_power_of_2(shared.out.shape[0])
    heads = max(1, _ELEMENTS // (value_pad * max(own_pad, shared_pad)))
    heads = min(heads, next_power_of_2(num_heads))
    arguments = {
        "own": own.out,
        "own_lse": own.lse,
        "shared": None if shared is None else shared.out,
        "shared_lse": None if shared is None else shared.lse,
        "token_places": token_places,
        "out": out,
        "lse": lse,
        "own_strides": own.out.stride(),
        "own_lse_strides": own.lse.stride(),
        "shared_strides": (0, 0, 0, 0) if shared is None else shared.out.stride(),
        "shared_lse_strides": (0, 0, 0) if shared is None else shared.lse.stride(),
        "place_strides": (0, 0) if token_places is None else token_places.stride(),
        "out_strides": out.stride(),
        "lse_strides": (0, 0) if lse is None else lse.stride(),
        "num_heads": num_heads,
        "own_splits": own.out.shape[0],
        "own_pad": own_pad,
        "shared_splits": 0 if shared is None else shared.out.shape[0],
        "shared_pad": shared_pad,
        "levels": 0 if token_places is None else token_places.shape[1],
        "value_size": value_size,
        "value_pad": value_pad,
        "tile_heads": heads,
    }
    return Launch(_join, (num_tokens, ceil_div(num_heads, heads), 1), arguments)


# What changes from step to step must not compile the kernel anew.
@triton.jit(
    do_not_specialize=["own_lse_strides", "shared_lse_strides", "place_strides", "lse_strides"]
)
def _join(
    own: tl.tensor,
    own_lse: tl.tensor,
    shared: tl.tensor,
    shared_lse: tl.tensor,
    token_places: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    own_strides: tl.tuple,
    own_lse_strides: tl.tuple,
    shared_strides: tl.tuple,
    shared_lse_strides: tl.tuple,
    place_strides: tl.tuple,
    out_strides: tl.tuple,
    lse_strides: tl.tuple,
    num_heads: tl.constexpr,
    own_splits: tl.constexpr,
    own_pad: tl.constexpr,
    shared_splits: tl.constexpr,
    shared_pad: tl.constexpr,
    levels: tl.constexpr,
    value_size: tl.constexpr,
    value_pad: tl.constexpr,
    tile_heads: tl.constexpr,
) -> None:
    """A program: one token, some heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    mixed = tl.full([tile_heads, value_pad], 0.0, tl.float32)
    most = tl.full([tile_heads], float("-inf"), tl.float32)
    total = tl.full([tile_heads], 0.0, tl.float32)
    mixed, most, total = _add_parts(
        mixed, most, total, own, own_lse, token, head, own_strides, own_lse_strides,
        num_heads, own_splits, own_pad, value_size, value_pad,
    )  # fmt: skip
    for level in tl.static_range(levels):
        place = tl.load(token_places + token * place_strides[0] + level * place_strides[1])
        mixed, most, total = _add_parts(
            mixed, most, total, shared, shared_lse, place.to(tl.int64), head, shared_strides,
            shared_lse_strides, num_heads, shared_splits, shared_pad, value_size, value_pad,
        )  # fmt: skip
    dims = tl.arange(0, value_pad)
    has_seen = total > 0
    total = tl.where(has_seen, total, 1.0)
    factor = tl.where(has_seen, 1.0 / total, 0.0)
    places = token * out_strides[0] + (head * out_strides[1])[:, None] + dims * out_strides[2]
    mask = (head < num_heads)[:, None] & (dims < value_size)[None, :]
    tl.store(out + places, (mixed * factor[:, None]).to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        sums = tl.where(has_seen, most + tl.log(total), float("-inf"))
        lse_places = token * lse_strides[0] + head * lse_strides[1]
        tl.store(lse + lse_places, sums, mask=head < num_heads)


@triton.jit
def _add_parts(
    mixed: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    parts: tl.tensor,
    parts_lse: tl.tensor,
    place: tl.tensor,
    head: tl.tensor,
    strides: tl.tuple,
    lse_strides: tl.tuple,
    num_heads: tl.constexpr,
    splits: tl.constexpr,
    splits_pad: tl.constexpr,
    size: tl.constexpr,
    pad: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add all splits of one place; -1 adds nothing. What has no weight is not read."""
    split = tl.arange(0, splits_pad)
    dims = tl.arange(0, pad)
    is_real = (head < num_heads)[:, None] & (split < tl.where(place < 0, 0, splits))[None, :]
    lse_places = split[None, :] * lse_strides[0] + place * lse_strides[1]
    lse = tl.load(
        parts_lse + lse_places + (head * lse_strides[2])[:, None],
        mask=is_real,
        other=float("-inf"),
    )
    now_most = tl.maximum(most, tl.max(lse, 1))
    shift = tl.where(now_most == float("-inf"), 0.0, now_most)
    weights = tl.exp(lse - shift[:, None])
    places = split.to(tl.int64) * strides[0] + place * strides[1]
    found = tl.load(
        parts
        + places[None, :, None]
        + (head * strides[2])[:, None, None]
        + (dims * strides[3])[None, None, :],
        mask=(weights > 0)[:, :, None] & (dims < size)[None, None, :],
        other=0.0,
    )
    decay = tl.exp(most - shift)
    mixed = mixed * decay[:, None] + tl.sum(weights[:, :, None] * found, 1)
    total = total * decay + tl.sum(weights, 1)
    return mixed, now_most, total
