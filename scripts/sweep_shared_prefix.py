"""Find out from where on attending to a shared prefix once is faster than once for each row.

    python scripts/sweep_shared_prefix.py
    python scripts/sweep_shared_prefix.py --own-tokens 16 --device cuda

One layer's attention in a decode step, for several numbers of rows and shared tokens, with
``engine.shared_prefix_attention`` on and off; what is printed is off over on, so above 1 it
pays. The last line names the least rows times shared tokens from which on it always paid:
``_MIN_SHARED_READS`` of batchgen/runtime/shared_prefixes.py. Let nothing else run meanwhile.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from job_rows import positive

from batchgen.engine.step import SampleBatch, StepPlan
from batchgen.kernels.cascade import CascadeLayout, cascade_attention
from batchgen.runtime.shared_prefixes import SharedPrefix, cascade_layout

BLOCK_SIZE = 16
ROWS = (2, 4, 8, 16, 64)
SHARED = (16, 32, 64, 128, 256, 512, 1024)
# The demo's model: 9 query heads, 3 for keys and values, of 64.
HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64
REPEATS = 15


def decode_step(rows: int, shared: int, own: int) -> StepPlan:
    """Make a step of rows that decode one token behind a shared prefix and their own tokens."""
    prefix, width = shared // BLOCK_SIZE, -(-own // BLOCK_SIZE)
    tables = np.empty((rows, prefix + width), dtype=np.int32)
    tables[:, :prefix] = np.arange(prefix)
    tables[:, prefix:] = prefix + np.arange(rows * width).reshape(rows, width)
    none, places = np.zeros((0, 2), dtype=np.int64), np.arange(rows)
    zeros = np.zeros(rows)
    return StepPlan(
        step=0,
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=np.full(rows, shared + own - 1),
        slots=places,
        query_starts=np.arange(rows + 1),
        context_lens=np.full(rows, shared + own),
        block_tables=tables,
        samples=SampleBatch(
            rows=places, temperature=zeros, top_p=zeros, min_p=zeros, top_k=places,
            noise_keys=places.astype(np.uint64), positions=places,
        ),
        swap_out=none,
        swap_in=none,
        copies=none,
    )  # fmt: skip


def seconds(layouts: dict[SharedPrefix, CascadeLayout], tensors: list[torch.Tensor]) -> list[float]:
    """Time both layouts in turn; return the medians, on and off."""
    query, keys, values = tensors
    times: dict[SharedPrefix, list[float]] = {mode: [] for mode in layouts}
    for _ in range(REPEATS):
        for mode, layout in layouts.items():
            started = time.perf_counter()
            cascade_attention(query, keys, values, layout, scale=HEAD_SIZE**-0.5)
            if query.is_cuda:
                torch.cuda.synchronize()
            times[mode].append(time.perf_counter() - started)
    return [statistics.median(times[mode]) for mode in (SharedPrefix.ON, SharedPrefix.OFF)]


def gain(rows: int, shared: int, own: int, device: torch.device) -> float:
    """Return the time without sharing over the time with it."""
    plan = decode_step(rows, shared, own)
    num_blocks = int(plan.block_tables.max()) + 1
    tensors = [
        torch.randn(rows, HEADS, HEAD_SIZE, device=device),
        torch.randn(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device=device),
        torch.randn(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device=device),
    ]

    def put(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    modes = (SharedPrefix.ON, SharedPrefix.OFF)
    on, off = seconds({m: cascade_layout(plan, BLOCK_SIZE, put, m) for m in modes}, tensors)
    return off / on


def break_even(gains: dict[int, list[float]]) -> int | None:
    """Return the least product of rows and tokens from which on no gain is below 1."""
    losing = [reads for reads, values in gains.items() if min(values) < 1]
    paying = sorted(reads for reads in gains if reads > max(losing, default=0))
    return paying[0] if paying else None


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--own-tokens", type=positive, default=64)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"time off / time on, {options.own_tokens} own tokens a row, on {device}")
    print("rows \\ shared " + "".join(f"{shared:>7}" for shared in SHARED))
    gains: dict[int, list[float]] = {}
    for rows in ROWS:
        line = [gain(rows, shared, options.own_tokens, device) for shared in SHARED]
        for shared, value in zip(SHARED, line, strict=True):
            gains.setdefault(rows * shared, []).append(value)
        print(f"{rows:>13} " + "".join(f"{value:>7.2f}" for value in line))
    print(f"sharing pays from {break_even(gains)} reads (rows x shared tokens) on")


if __name__ == "__main__":
    main()
