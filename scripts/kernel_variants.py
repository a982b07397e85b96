"""Every variant of the kernels that the engine can launch for a layer of a model.

A variant is what Triton compiles once: a kernel, the dtypes of its tensors, which of them are
absent, its constants, and the compiler's options. Launches follow from a step's bounds alone
(batchgen/runtime/attention_metadata.py). So the variants are found by asking the engine itself, on
tensors without content: steps on either side of every border that its choices have, each with the
launches that it would start. A test holds the list against steps of any size.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.batch import KVScales
from batchgen.kernels.triton.launch import Launch, Target
from batchgen.kernels.triton.tiles import MANY_QUERIES, AttentionTile, attention_tile
from batchgen.runtime.attention_metadata import AttentionMetadata, InputShape
from batchgen.runtime.kv_cache import KVCache, LayerGeometry
from batchgen.runtime.triton_attention import TritonAttention

META = torch.device("meta")
# Keys of a row: so few that they are not split, so many that they are wherever they may be.
_FEW_KEYS, _MANY_KEYS = 1, 1 << 20


@dataclass(frozen=True)
class Layer:
    """A layer's attention.

    Attributes:
        value_size: of a value; 0 is the size of a key.
        kv_dtype: of the pool; None is the layer's own.
        heads_first: whether vectors of a head stand together, not those of a token.
    """

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    kv_dtype: torch.dtype | None = None
    value_size: int = 0
    block_size: int = 16
    heads_first: bool = True

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of a key and a value."""
        return self.size, self.value_size or self.size

    @property
    def geometry(self) -> LayerGeometry:
        """What the engine knows of it."""
        group = self.heads // self.kv_heads
        return LayerGeometry(self.kv_heads, *self.sizes, self.window, group)

    @property
    def options(self) -> AttentionOptions:
        """What the layer asks for."""
        sinks = torch.empty(self.heads, device=META) if self.has_sinks else None
        return AttentionOptions(0.1, self.window, self.softcap, sinks)

    def cache(self) -> KVCache:
        """Make a pool without content."""
        scale = torch.empty(self.kv_heads, device=META)
        return KVCache(
            [self.geometry], 4, self.block_size, num_swap_blocks=0,
            dtype=self.kv_dtype or self.dtype, device=META, uses_triton=True,
            scales=None if self.kv_dtype is None else [KVScales(scale, scale)],
        )  # fmt: skip

    def vectors(self, num_tokens: int, heads: int, size: int) -> torch.Tensor:
        """Make [num_tokens, heads, size] of a step, laid out as the model does."""
        outer = (heads, num_tokens) if self.heads_first else (num_tokens, heads)
        made = torch.empty((*outer, size), dtype=self.dtype, device=META)
        return made.transpose(0, 1) if self.heads_first else made


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Return the launches of what runs inside, none of which is started."""
    launches: list[Launch] = []

    def note(launch: Launch) -> None:
        launches.append(launch)

    with patch.object(Launch, "run", note):
        yield launches


def step_launches(
    layer: Layer, shape: InputShape, target: Target, *, deterministic: bool = False
) -> list[Launch]:
    """Return what the engine launches for a layer in a step."""
    attention = TritonAttention([layer.geometry], deterministic=deterministic, target=target)
    inputs = AttentionMetadata(shape, layer.block_size)
    array = torch.empty(inputs.size, dtype=torch.int32, device=META)
    step = attention.over(inputs, array, layer.cache())
    of_model: Any = SimpleNamespace(layer_idx=0)
    key_size, value_size = layer.sizes
    query = layer.vectors(shape.num_tokens, layer.heads, key_size)
    key = layer.vectors(shape.num_tokens, layer.kv_heads, key_size)
    value = layer.vectors(shape.num_tokens, layer.kv_heads, value_size)
    with recorded_launches() as launches:
        step.attend(of_model, query, key, value, layer.options, {})
    return launches


def move_launches(layer: Layer) -> dict[str, Launch]:
    """Return what the engine launches to move blocks of a pool of such layers."""
    moves, blocks = layer.cache().moves, torch.empty(8, dtype=torch.int64, device=META)
    staging = torch.empty((8, moves.staging_bytes), dtype=torch.uint8, device=META)
    kinds = {
        "copy": lambda: moves.copy(blocks, blocks),
        "gather": lambda: moves.gather(blocks, staging),
        "scatter": lambda: moves.scatter(staging, blocks),
    }
    found: dict[str, Launch] = {}
    for kind, move in kinds.items():
        with recorded_launches() as launches:
            move()
        # Keys and values of different sizes are moved one after the other.
        parts = ("blocks",) if len(launches) == 1 else ("keys", "values")
        for part, launch in zip(parts, launches, strict=True):
            found[f"{kind} {part}"] = launch
    return found


def layer_variants(layer: Layer, target: Target) -> dict[str, Launch]:
    """Return a launch of every variant that a layer's steps can meet, by what it is for."""
    found: dict[str, tuple[str, Launch]] = {}
    for deterministic, shape in product((False, True), _bordering_steps(layer, target)):
        for launch in step_launches(layer, shape, target, deterministic=deterministic):
            name = _describe(launch, layer, target, deterministic)
            found.setdefault(variant_key(launch, target), (name, launch))
    named = dict(found.values())
    assert len(named) == len(found), "two variants have one name"
    return named | move_launches(layer)


def _bordering_steps(layer: Layer, target: Target) -> Iterator[InputShape]:
    """Steps of one row, or of one group of rows, on both sides of every choice.

    Keys are split where programs are few: a step is the smallest of its kind.
    """
    # One token, so few that a tile holds them, and one more.
    queries = (1, 2, max(2, _least_many(layer, target)))
    for count, keys, shared in product(queries, (_FEW_KEYS, _MANY_KEYS), (0, *queries[1:])):
        alone = InputShape(count, 1, width=8, max_query_len=count, max_keys=keys)
        yield (
            alone
            if not shared
            else replace(
                alone, num_segments=1, num_places=shared, num_levels=1, max_segment_len=shared
            )
        )


def _tile(layer: Layer, target: Target, max_query_len: int) -> AttentionTile:
    group = layer.heads // layer.kv_heads
    return attention_tile(target.capability, layer.dtype, max(layer.sizes), group, max_query_len)


def _least_many(layer: Layer, target: Target) -> int:
    """Return the least number of queries that gets the tile of many."""
    many = _tile(layer, target, MANY_QUERIES)
    return next(count for count in itertools.count(1) if _tile(layer, target, count) == many)


def variant_key(launch: Launch, target: Target) -> str:
    """Return what decides whether a launch finds a kernel that was compiled before."""
    specialization = _binder(launch.kernel, target.capability)(**launch.arguments)[1]
    return f"{launch.kernel.__name__} {specialization} {launch.options}"


@cache
def _binder(kernel: Any, capability: int) -> Any:
    backend = make_backend(GPUTarget("cuda", capability, 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


def _describe(launch: Launch, layer: Layer, target: Target, deterministic: bool) -> str:
    """Return what a launch of a step is for."""
    given, kind = launch.arguments, launch.kernel.__name__.strip("_")
    if kind == "store_kv":
        return "store"
    if kind == "join":
        return "join" if given["shared"] is None else "join, with what is shared"
    words = ["decode" if given["one_query"] else "prefill"]
    if given["first_tokens"] is not None:
        words = ["shared prefix"]
    elif given["key_starts"] is not None:
        words.append("behind a shared prefix")
    elif given["lse"] is not None:
        words.append("split")
    tile = (given["tile_rows"], given["tile_keys"], launch.warps, launch.stages)
    if deterministic:
        words.append("fixed order")
    elif not given["one_query"] and tile != _tile(layer, target, MANY_QUERIES):
        words.append("few queries")
    return ", ".join(words)
