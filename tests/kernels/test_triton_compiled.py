"""The kernels compiled ahead of time for GPUs that are not here, each run in its own process."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import kernel_resources
import pytest
import torch

from batchgen.kernels.triton.tiles import AttentionTile, attention_tile, num_splits

ROOT = Path(__file__).parents[2]
# Shared memory that a program may have, in bytes, by capability.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# What most jobs run in every layer of every step.
MAIN = r"llama-8b (decode|prefill|shared prefix)"


def _compile(only: str, *capabilities: int) -> list[dict[str, Any]]:
    script = ROOT / "scripts" / "kernel_resources.py"
    targets = [str(capability) for capability in capabilities]
    command = [sys.executable, str(script), "--json", "--only", only, "--sm", *targets]
    # Compiling fails where the interpreter is on.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        print(row)
        assert row["shared_bytes"] <= SHARED_BYTES[row["capability"]], row
    return rows


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_main_variants_compile_and_spill_nothing(capability: int) -> None:
    rows = _compile(MAIN, capability)
    assert len(rows) == 4
    for row in rows:
        assert row["spilled_bytes"] == 0, row


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_stores_joins_and_copies_compile_and_spill_nothing(capability: int) -> None:
    rows = _compile(r"llama-8b store|fp8-pool store|join|blocks", capability)
    assert len(rows) == 7 + (capability >= 89)
    for row in rows:
        assert row["spilled_bytes"] == 0, row


def test_every_other_family_compiles_for_a_target() -> None:
    """All families on all targets take minutes, which `scripts/kernel_resources.py` takes."""
    families = [(n, f) for n, f in kernel_resources.FAMILIES.items() if n != "llama-8b"]
    for i, (name, family) in enumerate(families):
        mode = ("decode", "prefill")[i % 2]
        # No capability below 89 has fp8.
        target = 90 if family.kv_dtype is not None else (90, 80, 100)[i % 3]
        rows = _compile(f"^{name} {mode}$", target)
        assert len(rows) == 1
        assert rows[0]["spilled_bytes"] == 0, rows


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


def test_keys_are_split_where_programs_are_few_and_keys_many() -> None:
    tile = AttentionTile(16, 64, 4, 5)
    # 256 rows on 8 heads fill 132 multiprocessors by themselves.
    assert num_splits(256 * 8, 32768, tile, 132) == 1
    assert num_splits(1 * 8, 32768, tile, 132) == 32
    assert num_splits(1 * 8, 300, tile, 132) == 1
    assert num_splits(8 * 8, 4096, tile, 132) == 8
