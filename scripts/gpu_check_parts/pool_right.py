"""Kernels that store and move the pool's content, against torch's own operators."""

import torch

from batchgen.kernels.triton.batch import KVScales
from batchgen.kernels.triton.copy_blocks import BlockCopier
from batchgen.kernels.triton.store_kv import store_kv
from gpu_check_parts.batches import NAN
from gpu_check_parts.context import Context, Verdict

_FP8 = torch.float8_e4m3fn
# e4m3 keeps four significant bits: neighbours are an eighth apart at most.
_FP8_STEP = 0.126
_FP8_SELDOM = 1e-4


def check_store(context: Context, dtype: torch.dtype) -> Verdict:
    """Scatter keys and values out of one fused product, some tokens of them padding."""
    generator = context.generator(str(dtype))
    device, heads, size = context.device, context.choose(8, 2), context.choose(128, 16)
    tokens, num_blocks, block_size = context.choose((3000, 400, 16), (50, 12, 16))
    source_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    fused = torch.randn((tokens, 4, heads, size), generator=generator, device=device)
    scales = torch.rand(heads, generator=generator, device=device) + 0.5
    if context.dry_run:
        # The interpreter rounds to fp8 in a way of its own: numbers that need no rounding.
        fused, scales = fused.mul(4).round().clamp(-16, 16), torch.ones_like(scales)
    key, value = fused.to(source_dtype)[:, 1], fused.to(source_dtype)[:, 3]
    caches = [
        torch.full((num_blocks, block_size, heads, size), NAN, device=device).to(dtype)
        for _ in range(2)
    ]
    chosen = torch.randperm(num_blocks * block_size, generator=generator, device=device)
    slots = chosen[:tokens].clone()
    slots[::7] = -1
    given = KVScales(scales, scales) if dtype == _FP8 else None
    store_kv(key, value, caches[0], caches[1], slots, given)
    real = slots >= 0
    wrong = apart = 0
    for new, cache in ((key, caches[0]), (value, caches[1])):
        expected = torch.full_like(cache.float(), NAN).flatten(0, 1)
        scaled = new.float() / scales[:, None] if dtype == _FP8 else new
        expected[slots[real]] = scaled.to(dtype).float()[real]
        same = expected.view(-1), cache.float().view(-1)
        wrong += int((~torch.isclose(*same, rtol=_FP8_STEP, atol=0.01, equal_nan=True)).sum())
        apart += int((~torch.isclose(*same, rtol=0, atol=0, equal_nan=True)).sum())
    count = 2 * caches[0].numel()
    # A GPU divides by a scale to within an ulp or two, which seldom falls to another fp8 number.
    allowed = _FP8_SELDOM * count if dtype == _FP8 else 0
    return wrong == 0 and apart <= allowed, f"{apart} of {count:,} elements differ"


def _pool_of_layers(context: Context, generator: torch.Generator) -> list[torch.Tensor]:
    """[N, 16, 8, D] of layers that differ in D."""
    num_blocks = context.choose(300, 24)
    return [
        torch.randn((num_blocks, 16, 8, size), generator=generator, device=context.device).to(
            torch.bfloat16
        )
        for size in context.choose((128, 128, 64, 80), (16, 16, 8))
    ]


def _some_blocks(layers: list[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """Two lists of a third of the blocks each, none in both."""
    num_blocks = layers[0].shape[0]
    order = torch.randperm(num_blocks, generator=generator, device=generator.device)
    return list(order.split(num_blocks // 3)[:2])


def _differing(layers: list[torch.Tensor], expected: list[torch.Tensor]) -> Verdict:
    wrong = sum(int((a != b).sum()) for a, b in zip(layers, expected, strict=True))
    return wrong == 0, f"{wrong} elements differ"


def check_copies(context: Context) -> Verdict:
    """Copies within a pool, bit by bit."""
    generator = context.generator("moves")
    layers = _pool_of_layers(context, generator)
    sources, targets = _some_blocks(layers, generator)
    expected = [layer.index_copy(0, targets, layer[sources]) for layer in layers]
    BlockCopier(layers).copy(sources, targets)
    return _differing(layers, expected)


def check_moves(context: Context) -> Verdict:
    """Blocks go to a staging buffer, are wiped out, and come back bit by bit."""
    generator = context.generator("moves")
    layers = _pool_of_layers(context, generator)
    before = [layer.clone() for layer in layers]
    blocks, _ = _some_blocks(layers, generator)
    copier = BlockCopier(layers)
    staging = torch.empty(
        (len(blocks), copier.staging_bytes), dtype=torch.uint8, device=context.device
    )
    copier.gather(blocks, staging)
    for layer in layers:
        layer[blocks] = NAN
    copier.scatter(staging, blocks)
    return _differing(layers, before)
