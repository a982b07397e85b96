"""Compile the kernels ahead of time and show what they take of a GPU; needs none.

    python scripts/kernel_resources.py                      # all variants, as Markdown
    python scripts/kernel_resources.py --only llama --json  # some, one JSON object a line

A variant is a kernel at the shapes, dtypes and options of a model family, with the tile that the
table gives for the target. Spilled bytes are local memory that a thread needs beyond its
registers. What was compiled before is taken from Triton's cache, which knows a kernel by its
source, options, target and compiler.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import create_function_from_signature

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.attention import prepare_attend
from batchgen.kernels.triton.batch import (
    PagedRows,
    Parts,
    SharedSegments,
    new_carry,
    new_parts,
)
from batchgen.kernels.triton.copy_blocks import BlockCopier
from batchgen.kernels.triton.join import prepare_join
from batchgen.kernels.triton.launch import Launch
from batchgen.kernels.triton.scales import KVScales
from batchgen.kernels.triton.store_kv import prepare_store_kv
from batchgen.kernels.triton.tiles import MANY_QUERIES, attention_tile

CAPABILITIES = (80, 90, 100)
_ROWS = 64
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

Prepare = Callable[[int], Launch]


@dataclass(frozen=True)
class Family:
    """Attention of a model family; sizes are those of one layer."""

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    kv_dtype: torch.dtype | None = None

    @property
    def options(self) -> AttentionOptions:
        """The layer's options."""
        sinks = torch.empty(self.heads) if self.has_sinks else None
        return AttentionOptions(0.1, self.window, self.softcap, sinks)

    @property
    def scales(self) -> KVScales | None:
        """Scales of an fp8 pool."""
        scale = torch.empty(self.kv_heads)
        return None if self.kv_dtype is None else KVScales(scale, scale)

    def new(self, heads: int, *outer: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor [*outer, heads, size]."""
        return torch.empty((*outer, heads, self.size), dtype=dtype or self.dtype)

    def pool(self) -> torch.Tensor:
        """Keys or values of a small pool."""
        return self.new(self.kv_heads, 4, 16, dtype=self.kv_dtype)


FAMILIES = {
    "llama-8b": Family(32, 8, 128),
    "llama-2-7b": Family(32, 32, 128, torch.float16),
    "qwen2-0.5b": Family(14, 2, 64),
    "gemma-2": Family(8, 4, 256, window=4096, softcap=50.0),
    "gpt-oss": Family(64, 8, 64, window=128, has_sinks=True),
    "phi-3-mini": Family(32, 32, 96),
    "float32-64": Family(9, 3, 64, torch.float32),
    "float32-128": Family(32, 8, 128, torch.float32),
    "fp8-pool": Family(32, 8, 128, kv_dtype=torch.float8_e4m3fn),
}


@dataclass(frozen=True)
class Variant:
    """A kernel to compile: its name and how it is prepared for a capability."""

    name: str
    prepare: Prepare
    least_capability: int = 80


@dataclass(frozen=True)
class Resources:
    """What a compiled variant takes.

    Attributes:
        registers: of a thread.
        shared_bytes: shared memory of a program.
        spilled_bytes: local memory of a thread.
    """

    name: str
    capability: int
    warps: int
    stages: int
    registers: int
    shared_bytes: int
    spilled_bytes: int


def _attend(family: Family, max_query_len: int, splits: int, is_shared: bool) -> Prepare:
    """Attention of 64 rows or segments."""

    def prepare(capability: int) -> Launch:
        num_tokens = _ROWS * max_query_len
        counts = torch.empty(_ROWS, dtype=torch.int32)
        starts = torch.empty(_ROWS + 1, dtype=torch.int32)
        query = family.new(family.heads, num_tokens)
        ranges: PagedRows | SharedSegments = PagedRows(starts, counts, max_query_len)
        if is_shared:
            ranges = SharedSegments(
                starts, counts, counts, counts, counts, counts[:, None], num_tokens, max_query_len
            )
        parts = Parts(torch.empty_like(query)[None], torch.empty(0))
        if splits > 1 or is_shared:
            parts = new_parts(query, family.size, splits, num_tokens)
        group = family.heads // family.kv_heads
        tile = attention_tile(capability, family.dtype, family.size, group, max_query_len)
        return prepare_attend(
            query, family.pool(), family.pool(), torch.empty(_ROWS, 128, dtype=torch.int32),
            ranges, AttentionOptions(0.1, None, family.softcap) if is_shared else family.options,
            parts.out, parts.lse if splits > 1 or is_shared else None, family.scales, tile,
        )  # fmt: skip

    return prepare


def _attend_in_order(family: Family, is_shared: bool) -> Prepare:
    """Attention with engine.deterministic: to what rows share, or to their own keys behind it."""

    def prepare(capability: int) -> Launch:
        counts = torch.empty(_ROWS, dtype=torch.int32)
        starts = torch.empty(_ROWS + 1, dtype=torch.int32)
        query = family.new(family.heads, _ROWS)
        ranges: PagedRows | SharedSegments = PagedRows(starts, counts, 512, counts)
        if is_shared:
            ranges = SharedSegments(
                starts, counts, counts, counts, counts, counts[:, None], _ROWS, 512
            )
        group = family.heads // family.kv_heads
        tile = attention_tile(capability, family.dtype, family.size, group, MANY_QUERIES)
        options = family.options
        return prepare_attend(
            query, family.pool(), family.pool(), torch.empty(_ROWS, 128, dtype=torch.int32),
            ranges, AttentionOptions(0.1, None, options.softcap, options.sinks),
            torch.empty_like(query)[None], None, family.scales, tile,
            fixed_order=True, carry=new_carry(query, family.size),
        )  # fmt: skip

    return prepare


def _store(family: Family) -> Prepare:
    new = family.new(family.kv_heads, 256)
    slots = torch.empty(256, dtype=torch.int64)
    return lambda _: prepare_store_kv(new, new, family.pool(), family.pool(), slots, family.scales)


def _join(family: Family, splits: int, levels: int) -> Prepare:
    query = family.new(family.heads, 256)
    own = new_parts(query, family.size, splits, 256)
    if not levels:
        return lambda _: prepare_join(own, query)
    places = torch.empty(256, levels, dtype=torch.int32)
    return lambda _: prepare_join(own, query, None, own, places)


def _move(family: Family, mode: str) -> Prepare:
    blocks = torch.empty(8, dtype=torch.int64)
    copier = BlockCopier([family.pool(), family.pool()])
    staging = torch.empty(8, copier.staging_bytes, dtype=torch.uint8)
    arguments = {
        "copy": (blocks, blocks, None),
        "gather": (blocks, None, staging),
        "scatter": (None, blocks, staging),
    }[mode]
    return lambda _: next(copier.prepare(*arguments))


def variants() -> Iterator[Variant]:
    """Give every variant, the main ones first."""
    for name, family in FAMILIES.items():
        least = 80 if family.kv_dtype is None else 89
        yield Variant(f"{name} decode", _attend(family, 1, 1, False), least)
        yield Variant(f"{name} decode, split", _attend(family, 1, 8, False), least)
        yield Variant(f"{name} prefill", _attend(family, 512, 1, False), least)
        yield Variant(f"{name} shared prefix", _attend(family, 512, 4, True), least)
        yield Variant(f"{name} fixed order", _attend_in_order(family, False), least)
        yield Variant(f"{name} fixed order, shared", _attend_in_order(family, True), least)
        yield Variant(f"{name} store", _store(family), least)
    llama = FAMILIES["llama-8b"]
    for splits, levels in ((8, 0), (1, 1), (4, 2)):
        name = f"join of {splits} parts, {levels} shared"
        yield Variant(name, _join(llama, splits, levels))
    for mode in ("copy", "gather", "scatter"):
        yield Variant(f"blocks, {mode}", _move(llama, mode))


def compile_launch(launch: Launch, capability: int) -> CompiledKernel:
    """Compile what a launch would run on a device, specialised as the launch would be."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel: Any = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(**launch.arguments)
    options, signature, constants, attributes = kernel._pack_args(
        backend, {**launch.options, "debug": False}, bound, specialization, rest
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def resources(variant: Variant, capability: int) -> Resources:
    """Compile a variant and read what the assembler made of it."""
    launch = variant.prepare(capability)
    compiled = compile_launch(launch, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", shown)
    assert found is not None, shown
    registers, stack, local = map(int, found.groups())
    return Resources(
        variant.name, capability, launch.warps, launch.stages, registers,
        compiled.metadata.shared, stack + local,
    )  # fmt: skip


def _show(rows: Iterator[Resources], as_json: bool) -> None:
    if not as_json:
        print("| kernel | sm | warps | stages | registers | shared memory, KiB | spilled, bytes |")
        print("|---|---|---|---|---|---|---|")
    for row in rows:
        if as_json:
            print(json.dumps(asdict(row)), flush=True)
            continue
        cells = (
            row.name, row.capability, row.warps, row.stages, row.registers,
            f"{row.shared_bytes / 1024:.1f}", row.spilled_bytes,
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main(arguments: list[str]) -> None:
    """Compile and show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression over variants' names")
    parser.add_argument("--sm", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    chosen = parser.parse_args(arguments)
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "unset TRITON_INTERPRET"
    wanted = (
        resources(variant, capability)
        for variant in variants()
        for capability in chosen.sm
        if re.search(chosen.only, variant.name) and capability >= variant.least_capability
    )
    _show(wanted, chosen.json)


if __name__ == "__main__":
    main(sys.argv[1:])
