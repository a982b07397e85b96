"""Compile the kernels ahead of time and show what they take of a GPU; needs none.

    python scripts/kernel_resources.py                       # all variants, as Markdown
    python scripts/kernel_resources.py --main                # decode, prefill, shared prefixes
    python scripts/kernel_resources.py --only llama --json   # some, one JSON object a line
    python scripts/kernel_resources.py --write docs/kernels.md   # the main ones into the page

The variants are all that the engine can launch for layers of some model families
(scripts/kernel_variants.py), with the tiles that the table gives for each target. Spilled bytes
are local memory that a thread needs beyond its registers. What was compiled before is taken from
Triton's cache, which knows a kernel by its source, options, target and compiler.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_variants import Layer, layer_variants
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import create_function_from_signature

from batchgen.kernels.triton.launch import Launch, Target

CAPABILITIES = (80, 90, 100)
# Of an H100; no variant depends on it.
_PROCESSORS = 132
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Shared memory that a program may have, in bytes, by the capability that is compiled for. Tiles
# of 8.0 also serve cards of 8.6, 8.9 and 12.0, which have less than an A100.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# What the docs show: all that a layer may meet.
SHOWN = "^llama-8b: "
# What most of a job's time goes into, in either order of sums.
MAIN = "^[^:]+: (decode|prefill|shared prefix)(, fixed order)?$"
_BEGIN, _END = "<!-- kernel_resources.py begins -->\n", "<!-- kernel_resources.py ends -->"

FAMILIES = {
    "llama-8b": Layer(32, 8, 128),
    "llama-2-7b": Layer(32, 32, 128, torch.float16),
    "qwen2-0.5b": Layer(14, 2, 64),
    "gemma-2": Layer(8, 4, 256, softcap=50.0),
    "gemma-2 window": Layer(8, 4, 256, window=4096, softcap=50.0),
    "gpt-oss": Layer(64, 8, 64, has_sinks=True),
    "gpt-oss window": Layer(64, 8, 64, window=128, has_sinks=True),
    "phi-3-mini": Layer(32, 32, 96),
    "float32-64": Layer(9, 3, 64, torch.float32),
    "float32-128": Layer(32, 8, 128, torch.float32),
    "fp8-pool": Layer(32, 8, 128, kv_dtype=torch.float8_e4m3fn),
}


@dataclass(frozen=True)
class Variant:
    """A kernel to compile for a capability."""

    name: str
    capability: int
    launch: Launch


@dataclass(frozen=True)
class Resources:
    """What a compiled variant takes.

    Attributes:
        tile: query vectors and keys of a program's step; empty where a kernel has none.
        registers: of a thread.
        shared_bytes: shared memory of a program.
        spilled_bytes: local memory of a thread.
    """

    name: str
    capability: int
    tile: str
    warps: int
    stages: int
    registers: int
    shared_bytes: int
    spilled_bytes: int


def variants(capabilities: Sequence[int] = CAPABILITIES, only: str = "") -> Iterator[Variant]:
    """Return every variant of every family whose name a regular expression finds."""
    for family, layer in FAMILIES.items():
        for capability in capabilities:
            # e4m3 begins with capability 8.9.
            if layer.kv_dtype is not None and capability < 89:
                continue
            for name, launch in layer_variants(layer, Target(capability, _PROCESSORS)).items():
                if re.search(only, f"{family}: {name}"):
                    yield Variant(f"{family}: {name}", capability, launch)


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


def resources(variant: Variant) -> Resources:
    """Compile a variant and read what the assembler made of it."""
    launch = variant.launch
    compiled = compile_launch(launch, variant.capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", shown)
    assert found is not None, shown
    registers, stack, local = map(int, found.groups())
    given = launch.arguments
    tile = f"{given['tile_rows']} x {given['tile_keys']}" if "tile_rows" in given else ""
    return Resources(
        variant.name, variant.capability, tile, launch.warps, launch.stages, registers,
        compiled.metadata.shared, stack + local,
    )  # fmt: skip


def table(rows: Iterable[Resources]) -> str:
    """Write Markdown: a line for each variant, its targets side by side."""
    by_name: dict[str, dict[int, Resources]] = {}
    for row in rows:
        by_name.setdefault(row.name, {})[row.capability] = row
    present = sorted({capability for found in by_name.values() for capability in found})
    lines = [
        "| kernel | " + " | ".join(f"sm_{capability}" for capability in present) + " |",
        "|---|" + "---|" * len(present),
    ]
    for name, found in by_name.items():
        cells = (_cell(found.get(capability)) for capability in present)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Resources | None) -> str:
    if row is None:
        return ""
    shape = f"{row.tile}, {row.warps} warps, " if row.tile else ""
    spilled = f", **{row.spilled_bytes} bytes spilled**" if row.spilled_bytes else ""
    return f"{shape}{row.registers} registers, {row.shared_bytes / 1024:.0f} KiB{spilled}"


def write(page: Path, content: str) -> None:
    """Put content between the page's markers."""
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, found, after = rest.partition(_END)
    assert found, f"{page} has no place for the table"
    page.write_text(f"{before}{_BEGIN}{content}{_END}{after}", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Compile and show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression over variants' names")
    parser.add_argument(
        "--main", dest="only", action="store_const", const=MAIN, help="each family's main ones"
    )
    parser.add_argument("--sm", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--write", type=Path, help="put the main variants' table between this page's markers"
    )
    chosen = parser.parse_args(arguments)
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "unset TRITON_INTERPRET"
    if chosen.write is not None:
        write(chosen.write, table(map(resources, variants(only=SHOWN))))
        return
    rows = map(resources, variants(chosen.sm, chosen.only))
    if chosen.json:
        for row in rows:
            print(json.dumps(asdict(row)), flush=True)
    else:
        print(table(rows), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
