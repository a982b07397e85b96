"""Find the attention kernel's tiles on the GPU at hand and print them as the table's lines.

    python scripts/tune_tiles.py                       # every class of the table, some minutes each
    python scripts/tune_tiles.py --size 128 --bytes 2  # one class
    python scripts/tune_tiles.py --dry-run             # a few tiles in Triton's interpreter

A class is what batchgen/kernels/triton/tiles.py looks a tile up by: the element's bytes and the
padded head size. Each has a tile for many queries (timed on a prefill and on a chunk behind a
long context) and one for few (timed on decode). A tile counts only if its result equals that of
the table's tile; one that does not fit the card is passed over. Near ties go to the smaller tile.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "--dry-run" in sys.argv:
    # Triton reads it when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from gpu_check_parts.attention_right import TOLERANCES
from gpu_check_parts.batches import Batch, Shape, make_batch, relative_error
from gpu_check_parts.clock import time_kernels

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.batch import PagedRows
from batchgen.kernels.triton.launch import device_capability
from batchgen.kernels.triton.paged_attention import paged_attention
from batchgen.kernels.triton.tiles import AttentionTile, attention_tile

DTYPES = {2: torch.bfloat16, 4: torch.float32}
SIZES = (64, 128, 256)
# Tiles slower than the best by less than this are as good.
_AS_GOOD = 1.02


@dataclass(frozen=True)
class Work:
    """A batch that a tile is timed on, with what the table's tile makes of it."""

    batch: Batch
    expected: torch.Tensor
    tolerance: float

    def run(self, tile: AttentionTile | None) -> torch.Tensor:
        """Attend with a tile; None is the table's."""
        return attend(self.batch, tile)


def attend(batch: Batch, tile: AttentionTile | None) -> torch.Tensor:
    """Attend to a whole batch with a tile."""
    return paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables,
        PagedRows(batch.query_starts, batch.context_lens, batch.max_query_len),
        AttentionOptions(batch.shape.size**-0.5), tile=tile,
    )  # fmt: skip


def many_tiles(dry_run: bool) -> Iterator[AttentionTile]:
    """Tiles for prefill, chunks and shared prefixes."""
    if dry_run:
        yield AttentionTile(16, 16, 4, 1)
        return
    for rows, keys, warps, stages in product((32, 64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4)):
        yield AttentionTile(rows, keys, warps, stages)


def few_tiles(dry_run: bool) -> Iterator[AttentionTile]:
    """Tiles for decode."""
    if dry_run:
        yield AttentionTile(16, 16, 4, 1)
        return
    for keys, warps, stages in product((16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4, 5)):
        yield AttentionTile(16, keys, warps, stages)


def make_work(device: torch.device, shape: Shape, rows: list[tuple[int, int]]) -> Work:
    """Draw a batch and let the table's tile attend to it."""
    batch = make_batch(torch.Generator(device).manual_seed(0), shape, rows)
    return Work(batch, attend(batch, None).double(), TOLERANCES[shape.dtype])


def time_tile(device: torch.device, works: Sequence[Work], tile: AttentionTile) -> float | None:
    """Return the seconds of all work with a tile; None if it does not fit or is wrong."""
    total = 0.0
    for work in works:
        try:
            error = relative_error(work.run(tile), work.expected)
        except Exception as problem:  # each release of Triton has its own for what does not fit
            print(f"  {tuple(tile)}: {type(problem).__name__}", file=sys.stderr)
            return None
        if not error <= work.tolerance:
            print(f"  {tuple(tile)}: wrong by {error:.1e}", file=sys.stderr)
            return None
        call = [lambda work=work: work.run(tile)]
        warm_up, repeats = (3, 5) if device.type == "cuda" else (0, 1)
        total += time_kernels(device, call, warm_up=warm_up, repeats=repeats).median_s
    return total


def best_tile(
    device: torch.device, works: Sequence[Work], tiles: Iterator[AttentionTile]
) -> tuple[AttentionTile, float, float]:
    """Return the best tile, its seconds, and those of the table's tile.

    Raises:
        SystemExit: none is right.
    """
    shape, most = works[0].batch.shape, works[0].batch.max_query_len
    group = shape.heads // shape.kv_heads
    present = attention_tile(device_capability(device), shape.dtype, shape.size, group, most)
    times = {tile: time_tile(device, works, tile) for tile in dict.fromkeys([present, *tiles])}
    right = {tile: seconds for tile, seconds in times.items() if seconds is not None}
    if not right:
        sys.exit(f"no tile works for heads of {shape.size} in {shape.dtype}")
    bound = _AS_GOOD * min(right.values())
    good = [tile for tile, seconds in right.items() if seconds <= bound]
    chosen = min(good, key=lambda tile: (tile.rows * tile.keys, tile.stages, tile.warps))
    return chosen, right[chosen], right.get(present, float("nan"))


def tune_class(device: torch.device, num_bytes: int, size: int, dry_run: bool) -> str:
    """Tune one class; return its line of the table, times beside it."""
    heads, kv_heads, head = (4, 1, 16) if dry_run else (32, 8, size)
    shape = Shape(heads, kv_heads, head, dtype=DTYPES[num_bytes])
    prefill, chunk, decode = (
        ([(12, 12)], [(20, 6)], [(33, 1)])
        if dry_run
        else ([(2048, 2048)] * 4, [(16_384, 1024)], [(2048, 1)] * 128)
    )
    many = best_tile(
        device, [make_work(device, shape, rows) for rows in (prefill, chunk)], many_tiles(dry_run)
    )
    few = best_tile(device, [make_work(device, shape, decode)], few_tiles(dry_run))
    key = (device_capability(device) // 10 * 10, num_bytes, size)
    tiles = ", ".join(f"AttentionTile{tuple(tile)}" for tile, _, _ in (many, few))
    times = ", ".join(f"{best * 1e6:.0f} us (was {was * 1e6:.0f})" for _, best, was in (many, few))
    return f"    {key}: ({tiles}),  # {times}"


def main() -> int:
    """Tune the classes that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, choices=tuple(DTYPES), help="of an element")
    parser.add_argument("--size", type=int, choices=SIZES, help="padded head size")
    parser.add_argument("--dry-run", action="store_true", help="a few tiles, in the interpreter")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print("tune_tiles: torch sees no GPU; --dry-run goes through the code", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    for num_bytes, size in product(DTYPES, SIZES):
        if options.bytes in (None, num_bytes) and options.size in (None, size):
            print(tune_class(device, num_bytes, size, options.dry_run), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
