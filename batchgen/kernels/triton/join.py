"""Join attention to parts of the keys by their log-sum-exp."""

import torch
import triton
import triton.language as tl

from batchgen.kernels.triton.batch import Parts
from batchgen.kernels.triton.launch import Launch, ceil_div, next_power_of_2

# Elements of the parts that a program holds at a time, and splits of a part.
_ELEMENTS = 2048
_TILE_SPLITS = 4


def prepare_join(
    own: Parts,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    shared: Parts | None = None,
    token_places: torch.Tensor | None = None,
) -> Launch:
    """Prepare ``out = sum(part * exp(lse)) / sum(exp(lse))`` over all parts of each token.

    All tensors are contiguous.

    Args:
        own: S parts of each of the T tokens.
        out: [T, Hq, Dv]; zeros where a token has seen nothing.
        lse: [T, Hq] float32, receives the joined log-sum-exp; None if it is not wanted.
        shared: parts of each place in shared segments.
        token_places: [T, L] places of each token, -1 for none.
    """
    num_tokens, num_heads, value_size = out.shape
    value_pad = next_power_of_2(value_size)
    heads = max(1, _ELEMENTS // (value_pad * _TILE_SPLITS))
    heads = min(heads, next_power_of_2(num_heads))
    arguments = {
        "own": own.out,
        "own_lse": own.lse,
        "shared": None if shared is None else shared.out,
        "shared_lse": None if shared is None else shared.lse,
        "token_places": token_places,
        "out": out,
        "lse": lse,
        "num_tokens": num_tokens,
        "num_places": 0 if shared is None else shared.out.shape[1],
        "own_splits": own.out.shape[0],
        "shared_splits": 0 if shared is None else shared.out.shape[0],
        "levels": 0 if token_places is None else token_places.shape[1],
        "num_heads": num_heads,
        "value_size": value_size,
        "value_pad": value_pad,
        "tile_heads": heads,
        "tile_splits": _TILE_SPLITS,
    }
    assert all(
        tensor.is_contiguous() for tensor in arguments.values() if isinstance(tensor, torch.Tensor)
    )
    return Launch(_join, (num_tokens, ceil_div(num_heads, heads), 1), arguments)


# What changes from step to step must not compile the kernel anew.
@triton.jit(do_not_specialize=["num_tokens", "num_places", "own_splits", "shared_splits", "levels"])
def _join(
    own: tl.tensor,
    own_lse: tl.tensor,
    shared: tl.tensor,
    shared_lse: tl.tensor,
    token_places: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_tokens: tl.tensor,
    num_places: tl.tensor,
    own_splits: tl.tensor,
    shared_splits: tl.tensor,
    levels: tl.tensor,
    num_heads: tl.constexpr,
    value_size: tl.constexpr,
    value_pad: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_splits: tl.constexpr,
) -> None:
    """A program: one token, some heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    mixed = tl.full([tile_heads, value_pad], 0.0, tl.float32)
    most = tl.full([tile_heads], float("-inf"), tl.float32)
    total = tl.full([tile_heads], 0.0, tl.float32)
    mixed, most, total = _add_parts(
        mixed, most, total, own, own_lse, token, head, num_tokens, own_splits,
        num_heads, value_size, value_pad, tile_splits,
    )  # fmt: skip
    if shared is not None:
        for level in range(levels):
            place = tl.load(token_places + token * levels + level).to(tl.int64)
            mixed, most, total = _add_parts(
                mixed, most, total, shared, shared_lse, place, head, num_places,
                tl.where(place < 0, 0, shared_splits),
                num_heads, value_size, value_pad, tile_splits,
            )  # fmt: skip
    dims = tl.arange(0, value_pad)
    has_seen = total > 0
    total = tl.where(has_seen, total, 1.0)
    factor = tl.where(has_seen, 1.0 / total, 0.0)
    result = token * num_heads + head
    mask = (head < num_heads)[:, None] & (dims < value_size)[None, :]
    tl.store(
        out + (result * value_size)[:, None] + dims[None, :],
        (mixed * factor[:, None]).to(out.dtype.element_ty),
        mask=mask,
    )
    if lse is not None:
        sums = tl.where(has_seen, most + tl.log(total), float("-inf"))
        tl.store(lse + result, sums, mask=head < num_heads)


@triton.jit
def _add_parts(
    mixed: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    parts: tl.tensor,
    parts_lse: tl.tensor,
    place: tl.tensor,
    head: tl.tensor,
    num_places: tl.tensor,
    num_splits: tl.tensor,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    pad: tl.constexpr,
    tile_splits: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add all splits of one place, some at a time. What has no weight is not read."""
    dims = tl.arange(0, pad)
    for first in range(0, num_splits, tile_splits):
        split = first + tl.arange(0, tile_splits)
        is_real = (head < num_heads)[:, None] & (split < num_splits)[None, :]
        split_starts = split.to(tl.int64) * num_places
        results = (split_starts + place)[None, :] * num_heads + head[:, None]
        lse = tl.load(parts_lse + results, mask=is_real, other=float("-inf"))
        now_most = tl.maximum(most, tl.max(lse, 1))
        shift = tl.where(now_most == float("-inf"), 0.0, now_most)
        weights = tl.exp(lse - shift[:, None])
        found = tl.load(
            parts + (results * size)[:, :, None] + dims[None, None, :],
            mask=(weights > 0)[:, :, None] & (dims < size)[None, None, :],
            other=0.0,
        )
        decay = tl.exp(most - shift)
        mixed = mixed * decay[:, None] + tl.sum(weights[:, :, None] * found, 1)
        total = total * decay + tl.sum(weights, 1)
        most = now_most
    return mixed, most, total
