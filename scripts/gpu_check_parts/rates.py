"""Part 3: what each kernel reaches of a measured copy and a measured matrix product.

Beside each time stands the roofline of scripts/kernel_roofline.py at the measured rates: a
share of 100 % is a kernel that loses nothing. The shape is a layer of Llama-3.1-8B in bfloat16.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import kernel_roofline as roofline
import torch
from kernel_roofline import Cost, Layer

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.batch import PagedRows, SharedSegments
from batchgen.kernels.triton.copy_blocks import BlockCopier
from batchgen.kernels.triton.paged_attention import paged_attention
from batchgen.kernels.triton.prefix_attention import cascade_attention
from batchgen.kernels.triton.store_kv import store_kv
from gpu_check_parts.batches import Batch, Shape, make_batch
from gpu_check_parts.clock import launch_s, time_host, time_kernels
from gpu_check_parts.context import Context
from gpu_check_parts.machine import data_sheet, measured_card

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Rate:
    """A kernel at a shape: what it must cost, and what makes its calls."""

    name: str
    cost: Cost
    calls: Callable[[], Sequence[Call]]


def run(context: Context) -> None:
    """Measure the card, then the kernels against it."""
    with context.attempt("copy and matrix product"):
        card, sheet = measured_card(context.device, context.dry_run), data_sheet(context.device)
        context.figure(
            "copy",
            card.bytes_per_s / 1e9,
            "GB/s",
            sheet and sheet.bytes_per_s / 1e9,
            context.choose("1 GiB", "1 MiB"),
        )
        context.figure(
            "matrix product", card.flops_per_s / 1e12, "TFLOP/s",
            sheet and sheet.flops_per_s / 1e12,
            context.choose("8192 x 8192 x 8192, bf16", "256 x 256 x 256, fp32"),
        )  # fmt: skip
    for rate in context.in_time(list(_rates(context)), lambda rate: rate.name):
        with context.attempt(rate.name):
            _measure(context, rate)
    with context.attempt("link to the host"):
        _link(context)


def _measure(context: Context, rate: Rate) -> None:
    card = measured_card(context.device, context.dry_run)
    calls = rate.calls()
    warm_up, repeats, launches = context.choose((3, 9, 50), (1, 1, 1))
    timing = time_kernels(context.device, calls, warm_up=warm_up, repeats=repeats)
    host = launch_s(context.device, calls[0], calls=launches, repeats=repeats)
    note = (
        f"{rate.cost.bytes / timing.median_s / 1e9:,.0f} GB/s, "
        f"{rate.cost.flops / timing.median_s / 1e12:.0f} TFLOP/s, bound by "
        f"{rate.cost.bound(card)}, {timing.least_s * 1e6:.1f} to {timing.most_s * 1e6:.1f} us, "
        f"host {host * 1e6:.0f} us"
    )
    context.figure(rate.name, timing.median_s * 1e6, "us", rate.cost.seconds(card) * 1e6, note)


def _rates(context: Context) -> Iterator[Rate]:
    """All kernels at the shapes of kernel_roofline.STATED."""
    heads, kv_heads, size = context.choose((32, 8, 128), (4, 1, 16))
    layer = Layer(heads, kv_heads, size, size)
    shape = Shape(heads, kv_heads, size)
    tokens = context.choose(8192, 32)
    yield Rate(
        f"store_kv, {tokens:,} tokens",
        roofline.store_kv(layer, tokens),
        lambda: _store_calls(context, shape, tokens),
    )
    many, context_len, long_rows, long_len = context.choose((256, 2048, 8, 32_768), (4, 40, 2, 64))
    prompt, chunk, behind = context.choose((2048, 2048, 16_384), (24, 16, 40))
    splits = context.choose(8, 2)
    for name, rows, num_splits in (
        (f"decode, {many} rows of {context_len:,}", [(context_len, 1)] * many, 1),
        (f"decode, {long_rows} rows of {long_len:,} in {splits} splits",
         [(long_len, 1)] * long_rows, splits),
        (f"prefill, 4 rows of {prompt:,}", [(prompt, prompt)] * 4, 1),
        (f"chunk, {chunk:,} queries at the end of {behind:,}", [(behind, chunk)], 1),
    ):  # fmt: skip
        cost = roofline.attention(layer, rows, num_splits)
        if num_splits > 1:
            cost += roofline.join(layer, len(rows), num_splits)
        yield Rate(name, cost, _attention_calls(context, shape, rows, num_splits))
    yield from _prefix_rates(context, layer, shape)
    layers, blocks = context.choose((32, 64), (2, 4))
    yield Rate(
        f"copy of {blocks} blocks of 16, {layers} layers",
        roofline.move_blocks(layer, layers, 16, blocks),
        lambda: _copy_calls(context, shape, layers, blocks),
    )


def _prefix_rates(context: Context, layer: Layer, shape: Shape) -> Iterator[Rate]:
    """Decode on a shared prefix, once for every row and once for all."""
    rows, prefix, own = context.choose((256, 1504, 60), (4, 32, 5))
    each = [(prefix + own, 1)] * rows
    place = f"decode, {rows} rows on a prefix of {prefix:,} with {own} own"
    yield Rate(
        f"{place}, not shared", roofline.attention(layer, each),
        _attention_calls(context, shape, each, 1, shared=prefix),
    )  # fmt: skip
    cost = (
        roofline.attention(layer, [(own, 1)] * rows)
        + roofline.shared_prefix(layer, prefix, rows, 2)
        + roofline.join(layer, rows, 3)
    )
    yield Rate(f"{place}, shared", cost, lambda: [_cascade_call(context, shape, each, prefix)])


def _store_calls(context: Context, shape: Shape, tokens: int) -> list[Call]:
    device, num_blocks = context.device, 2 * -(-tokens // shape.block_size)
    calls: list[Call] = []
    for _ in range(context.choose(4, 1)):
        size = (tokens, shape.kv_heads, shape.size)
        key, value = (torch.randn(size, device=device).to(shape.dtype) for _ in range(2))
        pool = (num_blocks, shape.block_size, shape.kv_heads, shape.size)
        caches = [torch.empty(pool, dtype=shape.dtype, device=device) for _ in range(2)]
        slots = torch.randperm(num_blocks * shape.block_size, device=device)[:tokens]
        calls.append(
            lambda key=key, value=value, caches=caches, slots=slots: store_kv(
                key, value, caches[0], caches[1], slots
            )
        )
    return calls


def _batch(context: Context, shape: Shape, rows: list[tuple[int, int]], shared: int = 0) -> Batch:
    return make_batch(context.generator("rates"), shape, rows, shared=shared)


def _attention_calls(
    context: Context,
    shape: Shape,
    rows: list[tuple[int, int]],
    num_splits: int,
    shared: int = 0,
) -> Callable[[], Sequence[Call]]:
    def make() -> Sequence[Call]:
        batch = _batch(context, shape, rows, shared)
        of_rows = PagedRows(batch.query_starts, batch.context_lens, batch.max_query_len)
        options = AttentionOptions(shape.size**-0.5)
        return [
            lambda: paged_attention(
                batch.query, batch.key_cache, batch.value_cache, batch.block_tables, of_rows,
                options, num_splits=num_splits,
            )
        ]  # fmt: skip

    return make


def _cascade_call(context: Context, shape: Shape, rows: list[tuple[int, int]], prefix: int) -> Call:
    batch, device = _batch(context, shape, rows, prefix), context.device

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    count = len(rows)
    of_rows = PagedRows(
        batch.query_starts, batch.context_lens, 1, torch.full_like(batch.context_lens, prefix)
    )
    segments = SharedSegments(
        place_starts=numbers(0, count),
        first_tokens=numbers(0),
        table_rows=numbers(0),
        key_starts=numbers(0),
        key_ends=numbers(prefix),
        token_places=torch.arange(count, dtype=torch.int32, device=device)[:, None],
        num_places=count,
        max_query_len=count,
    )
    options = AttentionOptions(shape.size**-0.5)
    return lambda: cascade_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables, of_rows, segments,
        options, num_shared_splits=2,
    )  # fmt: skip


def _copy_calls(context: Context, shape: Shape, layers: int, blocks: int) -> list[Call]:
    size = (16 * blocks, 16, shape.kv_heads, shape.size)
    tensors = [
        torch.zeros(size, dtype=shape.dtype, device=context.device) for _ in range(2 * layers)
    ]
    copier = BlockCopier(tensors)
    order = torch.randperm(16 * blocks, device=context.device).split(blocks)
    pairs = list(zip(order[::2], order[1::2], strict=True))
    return [
        lambda sources=sources, targets=targets: copier.copy(sources, targets)
        for sources, targets in pairs[: context.choose(8, 1)]
    ]


def _link(context: Context) -> None:
    """Copies to and from pinned memory, as swap makes them."""
    device, is_gpu = context.device, context.device.type == "cuda"
    pinned = torch.zeros(context.choose(1 << 28, 1 << 16), dtype=torch.uint8, pin_memory=is_gpu)
    there = torch.zeros_like(pinned, device=device)
    for name, call in (
        ("to the host", lambda: pinned.copy_(there, non_blocking=True)),
        ("from the host", lambda: there.copy_(pinned, non_blocking=True)),
    ):
        timing = time_host(device, [call])
        context.figure(f"link {name}", pinned.nbytes / timing.median_s / 1e9, "GB/s")
