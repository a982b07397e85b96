"""The kernels compiled ahead of time, and what decides which variant of them runs."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.attention import prepare_attend
from batchgen.kernels.triton.batch import PagedRows, new_parts
from batchgen.kernels.triton.join import prepare_join
from batchgen.kernels.triton.launch import Launch
from batchgen.kernels.triton.store_kv import prepare_store_kv
from batchgen.kernels.triton.tiles import AttentionTile, attention_tile, num_splits

ROOT = Path(__file__).parents[2]
# Shared memory that a program may have, in bytes, by capability.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# What most jobs run in every layer of every step, and the kernels beside attention.
EVERYWHERE = [
    "llama-8b (decode|prefill|shared prefix)",
    "(llama-8b|fp8-pool) store",
    "join of .*",
    "blocks, .*",
]
# All families on all targets take minutes, which scripts/kernel_resources.py takes.
SOMEWHERE = {
    80: ["qwen2-0.5b prefill", "phi-3-mini decode", "llama-8b fixed order, shared"],
    90: ["llama-8b decode, split", "gpt-oss prefill", "fp8-pool decode", "llama-8b fixed order"],
    100: ["gpt-oss decode", "float32-64 prefill", "gemma-2 prefill"],
}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_for_gpus_that_are_not_here_and_spill_nothing(capability: int) -> None:
    chosen = "|".join(EVERYWHERE + SOMEWHERE[capability])
    script = ROOT / "scripts" / "kernel_resources.py"
    command = [sys.executable, str(script), "--json", "--only", f"^({chosen})$"]
    # Compiling fails where the interpreter is on.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--sm", str(capability)], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    print(*rows, sep="\n")
    # Three of attention, six of joins and copies, and a store into each dtype that there is.
    assert len(rows) == 3 + 6 + 1 + (capability >= 89) + len(SOMEWHERE[capability])
    for row in rows:
        # With engine.deterministic a prefill tile may spill a little: it is not for speed.
        assert row["spilled_bytes"] <= (64 if "fixed order" in row["name"] else 0), row
        assert row["shared_bytes"] <= SHARED_BYTES[capability], row


def _specialization(launch: Launch) -> tuple[object, ...]:
    """What decides whether a launch finds a compiled kernel."""
    kernel = launch.kernel
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return (bind(**launch.arguments)[1], launch.options)


def test_rows_tokens_and_blocks_of_a_step_do_not_compile_the_kernels_anew() -> None:
    pool = torch.empty(4, 16, 2, 64, dtype=torch.bfloat16)

    def attend(num_rows: int, padding: int, width: int) -> list[object]:
        num_tokens = num_rows + padding
        # As the model gives them: heads before tokens.
        query = torch.empty(14, num_tokens, 64, dtype=torch.bfloat16).transpose(0, 1)
        new = torch.empty(2, num_tokens, 64, dtype=torch.bfloat16).transpose(0, 1)
        slots = torch.empty(num_tokens, dtype=torch.int64)
        counts = torch.empty(num_rows, dtype=torch.int32)
        rows = PagedRows(torch.empty(num_rows + 1, dtype=torch.int32), counts, 50)
        tables = torch.empty(num_rows, width, dtype=torch.int32)
        tile = attention_tile(90, query.dtype, 64, 7, 50)
        parts = new_parts(query, 64, 4, num_tokens)
        launches = [
            prepare_store_kv(new, new, pool, pool, slots),
            prepare_attend(
                query, pool, pool, tables, rows, AttentionOptions(0.1), parts.out, parts.lse,
                None, tile,
            ),
            prepare_join(parts, torch.empty_like(query, memory_format=torch.contiguous_format)),
        ]  # fmt: skip
        return [_specialization(launch) for launch in launches]

    first, *others = [attend(*size) for size in product((1, 5, 16, 64), (0, 16), (1, 7, 16))]
    assert all(other == first for other in others)


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
