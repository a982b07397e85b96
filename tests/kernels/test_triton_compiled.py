"""What decides which variant of the kernels is compiled and runs."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from gpu_check_parts import compiling
from gpu_check_parts.context import Context
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_resources import FAMILIES, compile_launch
from kernel_variants import Layer, layer_variants, recorded_launches, step_launches, variant_key
from triton.backends.compiler import GPUTarget

from batchgen.kernels.triton.launch import Launch, Target
from batchgen.kernels.triton.tiles import AttentionTile, attention_tile, num_splits
from batchgen.runtime.attention_metadata import InputShape

# -- which variants there are -------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def _in(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


targets = st.builds(Target, _in(80, 86, 89, 90, 100, 103, 120), _in(16, 108, 132, 160))
layers = st.builds(
    lambda group, kv_heads, **given: Layer(group * kv_heads, kv_heads, **given),
    _in(1, 3, 7, 8, 16, 24, 71),
    _in(1, 2, 8, 32),
    size=_in(8, 64, 72, 80, 128, 256),
    value_size=_in(0, 0, 64),
    dtype=_in(torch.bfloat16, torch.float16, torch.float32),
    window=_in(None, None, 128, 100),
    softcap=_in(None, 50.0),
    has_sinks=st.booleans(),
    kv_dtype=_in(None, None, torch.float8_e4m3fn),
    block_size=_in(4, 16, 48, 256),
)


@st.composite
def steps(draw: st.DrawFn, max_rows: int = 3000) -> InputShape:
    """Bounds of a step of any kind and size."""
    num_rows = draw(st.integers(1, max_rows))
    longest = draw(st.one_of(st.just(1), st.integers(2, 40), st.integers(2, 5000)))
    num_tokens = num_rows if longest == 1 else draw(st.integers(longest, num_rows * longest))
    shape = InputShape(
        num_tokens, num_rows, width=draw(st.integers(1, 4000)), max_query_len=longest,
        max_keys=longest + draw(st.integers(0, 200_000)),
    )  # fmt: skip
    if draw(st.booleans()):
        return shape
    num_places = draw(st.integers(2, 5000))
    return replace(
        shape,
        num_segments=draw(st.integers(1, 40)),
        num_places=num_places,
        num_levels=draw(st.integers(1, 40)),
        max_segment_len=draw(st.integers(2, num_places)),
    )


@settings(max_examples=40, deadline=None)
@given(layer=layers, target=targets, deterministic=st.booleans(), data=st.data())
def test_a_step_of_any_size_launches_only_what_is_listed(
    layer: Layer, target: Target, deterministic: bool, data: st.DataObject
) -> None:
    listed = {variant_key(launch, target) for launch in layer_variants(layer, target).values()}
    # Some families lay a token's heads side by side: that compiles nothing anew.
    laid_out = replace(layer, heads_first=data.draw(st.booleans()))
    for shape in data.draw(st.lists(steps(), min_size=1, max_size=4)):
        for launch in step_launches(laid_out, shape, target, deterministic=deterministic):
            assert variant_key(launch, target) in listed, shape


@pytest.mark.parametrize("size", [64, 72])
@pytest.mark.parametrize("heads_first", [True, False])
def test_steps_of_a_kind_share_their_kernels(size: int, heads_first: bool) -> None:
    layer, target = Layer(14, 2, size, heads_first=heads_first), Target(90, 132)

    def keys(shape: InputShape) -> list[str]:
        return [variant_key(launch, target) for launch in step_launches(layer, shape, target)]

    decode = InputShape(1, 1, width=1, max_query_len=1, max_keys=100_000)
    chunks = replace(decode, num_segments=1, num_places=40, num_levels=1, max_segment_len=40)
    chunks = replace(chunks, num_tokens=50, max_query_len=50)
    sizes = product((1, 5, 16, 64), (1, 7, 16), (1, 2, 3))
    for rows, width, levels in sizes:
        other = replace(decode, num_tokens=rows, num_rows=rows, width=width)
        assert keys(other) == keys(decode)
        for tokens in (49 + rows, 64 * rows):
            other = replace(
                chunks, num_tokens=tokens, num_rows=rows, width=width,
                num_places=40 * levels, num_levels=levels, num_segments=levels,
            )  # fmt: skip
            assert keys(other) == keys(chunks)
    assert keys(decode) != keys(chunks)


def test_a_step_has_few_variants() -> None:
    """What a run may have to compile: seconds of a user's time for each."""
    variants = layer_variants(Layer(32, 8, 128), Target(90, 132))
    attention = [name for name in variants if "fixed order" not in name and "blocks" not in name]
    assert sorted(attention) == [
        "decode", "decode, behind a shared prefix", "decode, split", "join",
        "join, with what is shared", "prefill", "prefill, behind a shared prefix",
        "prefill, behind a shared prefix, few queries", "prefill, few queries", "prefill, split",
        "prefill, split, few queries", "shared prefix", "shared prefix, few queries", "store",
    ]  # fmt: skip


def test_moved_blocks_are_found_wherever_their_numbers_lie() -> None:
    target, moves = Target(90, 132), Layer(32, 8, 128).cache().moves
    pairs = torch.empty(64, 2, dtype=torch.int64)
    keys = set()
    for count in (1, 2, 16):
        # Slices of an upload: their addresses and strides are of no matter.
        for first in (0, 1, 2):
            with recorded_launches() as launches:
                moves.copy(*pairs[first : first + count].unbind(1))
                moves.copy(*pairs[first : first + count].T.contiguous())
            keys |= {variant_key(launch, target) for launch in launches}
    assert len(keys) == 1


def test_the_page_shows_every_variant_of_a_layer() -> None:
    listed = layer_variants(FAMILIES["llama-8b"], Target(90, 132))
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    shown = [line.split(" | ")[0] for line in lines if line.startswith("| llama-8b: ")]
    assert shown == [f"| llama-8b: {name}" for name in listed]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Triton takes an H100 for the current device, and nothing is compiled already."""
    number = 1 << 20  # that no device of this process has
    driver = SimpleNamespace(
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


@pytest.mark.usefixtures("no_gpu")
def test_what_is_compiled_beforehand_is_found_later() -> None:
    target, found = Target(90, 132), list[bool]()
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    launch = layer_variants(FAMILIES["llama-8b"], target)["store"]
    launch.compile()
    launch.compile()
    # Once, and the same that is compiled without a device at all.
    assert found == [False]
    compile_launch(launch, 90)
    # By another process.
    launch.kernel.device_caches.clear()
    launch.compile()
    assert found == [False, True, True]


def test_gpu_check_compiles_beforehand_what_its_timed_shapes_may_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target(90, 132)
    layers = compiling.layers(dry_run=False)
    assert layers["8B"] == FAMILIES["llama-8b"]
    assert (layers["1B"], layers["7B"]) == (Layer(32, 8, 64), Layer(32, 32, 128))
    started = list[Launch]()
    monkeypatch.setattr(compiling, "target_of", lambda device: target)

    def note(launch: Launch) -> None:
        started.append(launch)

    monkeypatch.setattr(Launch, "compile", note)
    # After each of them, over all objects of the tests' process.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    records = list[Any]()
    for lane in range(2):
        device = torch.device("cpu")
        context = Context(
            device, dry_run=False, seed=1, seconds=600, emit=records.append, lane=lane, lanes=2
        )
        compiling.run(context)
    expected = [
        f"{model}: {name} compiles"
        for model, layer in layers.items()
        for name in layer_variants(layer, target)
    ]
    assert sorted(record.name for record in records) == sorted(expected)
    assert len(started) == len(expected)


# -- tiles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [75, 80, 86, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_shape_has_a_tile_that_holds_its_group(capability: int, dtype: torch.dtype) -> None:
    for size, group, length in product((8, 64, 80, 128, 256), (1, 7, 24, 71, 128), (1, 9, 4096)):
        tile = attention_tile(capability, dtype, size, group, length)
        assert tile.rows >= 16
        assert tile.rows & (tile.rows - 1) == 0
        assert tile.keys & (tile.keys - 1) == 0
    decode, prefill = (attention_tile(capability, dtype, 64, 4, n) for n in (1, 4096))
    assert decode.rows <= prefill.rows


@pytest.mark.parametrize("size", [64, 128])
def test_a_newer_card_without_a_line_of_its_own_takes_that_of_the_card_before(size: int) -> None:
    for length in (1, 4096):
        tiles = {attention_tile(c, torch.bfloat16, size, 4, length) for c in (90, 100, 103)}
        assert len(tiles) == 1
        # Not that of larger heads, which has fewer keys.
        assert tiles != {attention_tile(100, torch.bfloat16, 256, 4, length)}


def test_keys_are_split_where_programs_are_few_and_keys_many() -> None:
    tile = AttentionTile(16, 64, 4, 5)
    # 256 rows on 8 heads fill 132 multiprocessors by themselves.
    assert num_splits(256 * 8, 32768, tile, 132) == 1
    assert num_splits(1 * 8, 32768, tile, 132) == 32
    assert num_splits(1 * 8, 300, tile, 132) == 1
    assert num_splits(8 * 8, 4096, tile, 132) == 8
