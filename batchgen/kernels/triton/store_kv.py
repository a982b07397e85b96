"""Scatter a step's new keys and values into the pool."""

import torch
import triton
import triton.language as tl

from batchgen.kernels.triton.batch import KVScales
from batchgen.kernels.triton.launch import Launch, ceil_div, next_power_of_2, stride_unit

# Elements that a program moves at a time: 16 bytes for each of 128 threads in half precision.
_ELEMENTS = 1024


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Write new keys and values to their slots, converted to the pool's dtype.

    Args:
        key: [T, Hkv, D], any strides.
        value: [T, Hkv, Dv], any strides.
        key_cache: [N, B, Hkv, D] pool of one layer, any strides, changed in place.
        value_cache: [N, B, Hkv, Dv].
        slots: [T] int32 or int64 ``block * B + offset``; -1 is a padded row and writes nothing.
        scales: what an fp8 pool divides by; None stores values as they are.
    """
    prepare_store_kv(key, value, key_cache, value_cache, slots, scales).run()


def prepare_store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: KVScales | None = None,
) -> Launch:
    """Prepare the launch of :func:`store_kv`."""
    num_tokens, num_heads, key_size = key.shape
    value_size = value.shape[2]
    key_pad, value_pad = next_power_of_2(key_size), next_power_of_2(value_size)
    tokens = max(1, _ELEMENTS // max(key_pad, value_pad))
    unit = stride_unit(*key.stride()[:2], *value.stride()[:2])
    arguments = {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slots": slots,
        "key_scales": None if scales is None else scales.key,
        "value_scales": None if scales is None else scales.value,
        "num_tokens": num_tokens,
        "key_token_step": key.stride(0) // unit,
        "key_head_step": key.stride(1) // unit,
        "value_token_step": value.stride(0) // unit,
        "value_head_step": value.stride(1) // unit,
        "key_stride": key.stride(2),
        "value_stride": value.stride(2),
        "key_cache_strides": key_cache.stride(),
        "value_cache_strides": value_cache.stride(),
        "slot_stride": slots.stride(0),
        "stride_unit": unit,
        "block_size": key_cache.shape[1],
        "key_size": key_size,
        "key_pad": key_pad,
        "value_size": value_size,
        "value_pad": value_pad,
        "tile_tokens": tokens,
        "limit": _largest(key_cache.dtype),
    }
    return Launch(_store_kv, (ceil_div(num_tokens, tokens), num_heads, 1), arguments)


def _largest(dtype: torch.dtype) -> float | None:
    """Return what values of an fp8 dtype are cut off at; None if nothing is."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else None


# What changes from step to step must not compile the kernel anew.
@triton.jit(
    do_not_specialize=[
        "num_tokens", "key_token_step", "key_head_step", "value_token_step", "value_head_step",
    ]
)  # fmt: skip
def _store_kv(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    num_tokens: tl.tensor,
    key_token_step: tl.tensor,
    key_head_step: tl.tensor,
    value_token_step: tl.tensor,
    value_head_step: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    key_cache_strides: tl.tuple,
    value_cache_strides: tl.tuple,
    slot_stride: tl.tensor,
    stride_unit: tl.constexpr,
    block_size: tl.constexpr,
    key_size: tl.constexpr,
    key_pad: tl.constexpr,
    value_size: tl.constexpr,
    value_pad: tl.constexpr,
    tile_tokens: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """A program: some tokens, one head."""
    token = (tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token * slot_stride, mask=token < num_tokens, other=-1).to(tl.int64)
    starts = token * (key_token_step * stride_unit) + head * (key_head_step * stride_unit)
    _store_one(
        key, key_cache, key_scales, starts, key_stride, slot, head, key_cache_strides,
        block_size, key_size, key_pad, limit,
    )  # fmt: skip
    starts = token * (value_token_step * stride_unit) + head * (value_head_step * stride_unit)
    _store_one(
        value, value_cache, value_scales, starts, value_stride, slot, head, value_cache_strides,
        block_size, value_size, value_pad, limit,
    )  # fmt: skip


@triton.jit
def _store_one(
    new: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    starts: tl.tensor,
    stride: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    cache_strides: tl.tuple,
    block_size: tl.constexpr,
    size: tl.constexpr,
    pad: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    at = tl.arange(0, pad)
    mask = (slot >= 0)[:, None] & (at < size)[None, :]
    content = tl.load(new + starts[:, None] + (at * stride)[None, :], mask=mask)
    if limit is not None:
        content = content.to(tl.float32) / tl.load(scales + head)
        content = tl.clamp(content, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    target = slot // block_size * cache_strides[0] + slot % block_size * cache_strides[1]
    places = (target + head * cache_strides[2])[:, None] + (at * cache_strides[3])[None, :]
    tl.store(cache + places, content.to(cache.dtype.element_ty), mask=mask)
