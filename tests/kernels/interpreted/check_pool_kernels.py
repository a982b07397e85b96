"""Stores into the pool and copies of its blocks, in the interpreter."""

import os

import numpy as np
import pytest
import torch
from gpu_check_parts.batches import Shape, make_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.triton.batch import KVScales
from batchgen.kernels.triton.copy_blocks import BlockCopier
from batchgen.kernels.triton.store_kv import store_kv
from batchgen.runtime.device.api import HostDevice
from batchgen.runtime.device.swap import SwapLink
from batchgen.runtime.kv_cache import KVCache, LayerGeometry

# See check_paged_attention.py.
EXAMPLES = int(os.environ.get("KERNEL_EXAMPLES", "12"))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare with NaN equal to itself."""
    return torch.equal(a.float().nan_to_num(12345.0), b.float().nan_to_num(12345.0))


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_store_kv_writes_its_slots_and_nothing_else(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    shape = Shape(
        heads=1,
        kv_heads=data.draw(st.integers(1, 3)),
        size=data.draw(st.sampled_from([8, 20, 80])),
        value_size=data.draw(st.sampled_from([16, 12])),
        block_size=data.draw(st.sampled_from([1, 4, 5])),
        dtype=dtype,
    )
    caches = make_pool(shape, 9, torch.device("cpu"), unusual=True)
    expected = [cache.clone() for cache in caches]
    num_tokens = data.draw(st.integers(0, 25))
    slots = torch.tensor(rng.permutation(9 * shape.block_size)[:num_tokens], dtype=torch.int64)
    slots[torch.tensor(rng.random(len(slots)) < 0.2)] = -1
    new = []
    for cache, target in zip(caches, expected, strict=True):
        # Heads before tokens; one family's values are a slice of a fused projection.
        whole = torch.tensor(rng.normal(size=(shape.kv_heads, len(slots), cache.shape[3] + 4)))
        tensor = whole.to(dtype)[..., 4:].transpose(0, 1)
        new.append(tensor)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                target[slot // shape.block_size, slot % shape.block_size] = tensor[token]
    if data.draw(st.booleans()):
        slots = slots.int()
    store_kv(*new, *caches, slots)
    for cache, target in zip(caches, expected, strict=True):
        assert _same(cache, target)


def _pool(rng: np.random.Generator, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Layers of two geometries; the last ones' blocks stand apart."""
    tensors = []
    for dtype in dtypes:
        dense = torch.tensor(rng.normal(size=(7, 4, 2, 6))).to(dtype)
        apart = torch.tensor(rng.normal(size=(7, 2, 4, 3, 5))).to(dtype)
        tensors += [dense, dense.clone().neg(), apart[:, 0], apart[:, 1]]
    return tensors


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_copies_within_the_pool_touch_their_targets_only(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    pool = _pool(rng, data.draw(st.sampled_from([[torch.float32], [torch.bfloat16, torch.uint8]])))
    sources, targets = np.split(rng.permutation(7)[:6], 2)
    sources[rng.random(3) < 0.3] = -1
    expected = [tensor.clone() for tensor in pool]
    for tensor in expected:
        for source, target in zip(sources, targets, strict=True):
            if source >= 0:
                tensor[target] = tensor[source]
    pairs = torch.tensor(np.stack((sources, targets), 1))
    BlockCopier(pool).copy(*pairs.unbind(1))
    assert all(torch.equal(*both) for both in zip(pool, expected, strict=True))


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(data=st.data())
def test_blocks_survive_a_round_through_the_staging_buffer(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    dtypes = [[torch.float32, torch.float16], [torch.bfloat16, torch.uint8]]
    pool = _pool(rng, data.draw(st.sampled_from(dtypes)))
    copier, count = BlockCopier(pool), data.draw(st.integers(1, 6))
    sources, targets = rng.permutation(7)[:count], rng.permutation(7)[:count]
    sources[rng.random(count) < 0.2] = -1
    targets[(rng.random(count) < 0.2) | (sources < 0)] = -1
    staging = torch.full((count + 1, copier.staging_bytes), 255, dtype=torch.uint8)
    copier.gather(torch.tensor(sources), staging)
    assert (staging[[*np.flatnonzero(sources < 0), count]] == 255).all()
    expected = [tensor.clone() for tensor in pool]
    for tensor in expected:
        before = tensor.clone()
        for source, target in zip(sources, targets, strict=True):
            if target >= 0:
                tensor[target] = before[source]
    # Each row holds a block of every tensor, so that it can travel alone.
    order = rng.permutation(count)
    copier.scatter(staging[torch.tensor(order)], torch.tensor(targets[order]))
    assert all(torch.equal(*both) for both in zip(pool, expected, strict=True))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_an_fp8_pool_keeps_values_divided_by_their_scale(scale: float) -> None:
    rng = np.random.default_rng(2)
    # Exact in e4m3 at any scale that is a power of two, or beyond its largest number.
    exact = torch.tensor(rng.integers(-16, 17, size=(6, 2, 16)), dtype=torch.float32) * scale
    exact[0, 0, 0] = 1e6
    pool = torch.zeros(3, 4, 2, 16, dtype=torch.float8_e4m3fn)
    scales = torch.tensor([scale, 2 * scale])
    store_kv(exact, -exact, pool, other := torch.zeros_like(pool), torch.arange(6),
             KVScales(scales, scales))  # fmt: skip
    kept = pool.flatten(0, 1)[:6].float() * scales[None, :, None]
    assert kept[0, 0, 0] == 448 * scale
    exact[0, 0, 0] = 448 * scale
    assert torch.equal(kept, exact)
    assert torch.equal(other.flatten(0, 1)[:6].float() * scales[None, :, None], -exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("uses_triton", [True, False])
def test_swapped_and_copied_blocks_keep_every_bit(dtype: torch.dtype, uses_triton: bool) -> None:
    layers = [LayerGeometry(2, 8, 6), LayerGeometry(1, 4, 4)]
    scale = KVScales(torch.ones(2), torch.ones(2))
    cache = KVCache(
        layers, 7, 3, num_swap_blocks=4, dtype=dtype, device=torch.device("cpu"),
        uses_triton=uses_triton, scales=[scale] * 2 if dtype.itemsize == 1 else None,
    )  # fmt: skip
    # A staging buffer of two blocks: three are moved in two pieces.
    link = SwapLink(HostDevice(), cache.moves, cache.swap_pool, staging_blocks=2)
    rng = np.random.default_rng(3)
    pool = [tensor.view(torch.uint8) for tensor in (*cache.keys, *cache.values)]
    for tensor in pool:
        tensor.copy_(torch.tensor(rng.integers(0, 256, size=tensor.shape), dtype=torch.uint8))
    before = [tensor.clone() for tensor in pool]
    link.send(np.array([[6, 1], [0, 3], [2, 0]]), first=np.array([0]))
    cache.moves.copy(torch.tensor([3, 4]), torch.tensor([6, 0]))
    cache.poison([2, 5])
    assert cache.keys[0][[2, 5]].float().isnan().all()
    link.fetch(link.prepare_return(np.array([[1, 5], [0, 2], [3, 1]]), torch.from_numpy))
    for tensor, old in zip(pool, before, strict=True):
        expected = old[[4, 0, 2, 3, 4, 6, 3]]
        assert torch.equal(tensor, expected)
