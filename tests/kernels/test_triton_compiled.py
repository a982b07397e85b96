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
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.attention import prepare_attend
from batchgen.kernels.triton.batch import PagedRows
from batchgen.kernels.triton.launch import Launch
from batchgen.kernels.triton.store_kv import prepare_store_kv
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
    """All families on all targets take minutes: docs/kernels.md holds that table."""
    names = [name for name in kernel_resources.FAMILIES if name != "llama-8b"]
    modes = ["decode", "prefill"]
    targets = [90, 80, 100]
    for i, name in enumerate(names):
        rows = _compile(f"^{name} {modes[i % 2]}$", targets[i % 3])
        assert len(rows) == 1
        assert rows[0]["spilled_bytes"] == 0, rows


def _specialization(launch: Launch) -> tuple[object, ...]:
    """What decides whether a launch finds a compiled kernel."""
    kernel = launch.kernel
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return (bind(**launch.arguments)[1], launch.options)


def test_rows_tokens_and_blocks_of_a_step_do_not_compile_the_kernel_anew() -> None:
    pool = torch.empty(4, 16, 2, 64, dtype=torch.bfloat16)

    def attend(num_rows: int, padding: int, width: int, splits: int, max_len: int) -> object:
        num_tokens = num_rows + padding
        # As the model gives them: heads before tokens.
        query = torch.empty(14, num_tokens, 64, dtype=torch.bfloat16).transpose(0, 1)
        counts = torch.empty(num_rows, dtype=torch.int32)
        rows = PagedRows(torch.empty(num_rows + 1, dtype=torch.int32), counts, max_len)
        out = torch.empty(splits, num_tokens, 14, 64)
        tables = torch.empty(num_rows, width, dtype=torch.int32)
        tile = attention_tile(90, query.dtype, 64, 7, max_len)
        lse = torch.empty(splits, num_tokens, 14)
        return _specialization(
            prepare_attend(
                query, pool, pool, tables, rows, AttentionOptions(0.1), out, lse, None, tile
            )
        )

    sizes = list(product((1, 5, 16, 64), (3, 16), (1, 7, 16), (1, 4)))
    for max_len in (2, 50):
        first = attend(*sizes[0], max_len)
        assert all(attend(*size, max_len) == first for size in sizes)

    def store(num_tokens: int) -> object:
        new = torch.empty(2, num_tokens, 64, dtype=torch.bfloat16).transpose(0, 1)
        slots = torch.empty(num_tokens, dtype=torch.int64)
        return _specialization(prepare_store_kv(new, new, pool, pool, slots))

    assert all(store(n) == store(2) for n in (1, 7, 16, 64))


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
