"""Measure mode=plan over many rows: its tokens per second and its memory.

    python scripts/bench_plan.py                                 # 100,000 rows
    python scripts/bench_plan.py --rows 1000000 --dir out/plan   # keep rows and plan there
    python scripts/bench_plan.py --rows 20000 prompt.format=chat schedule.order=input

Rows are of the job "sentiment": eight examples before two or three real review sentences, drawn
from a fixed seed. The command runs in a process of its own, first over a tenth of the rows, so
that what grows with the rows shows. Pages of the mapped prompts count as resident, although the
kernel takes them back when it needs them; so anonymous memory is given beside the peak.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fetch_model import fetch_model
from job_rows import positive
from prepare_data import prepare_data

from batchgen.cli.escapes import in_quotes

SEED = 20_240_607
ROW_GROUP_ROWS = 1 << 16
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run of the command took.

    Attributes:
        rows, prompt_tokens: planned.
        wall_s: from the start of the process to its end.
        cpu_s: what all of its threads computed in that time.
        tokenize_s, order_s: of that, writing the prompts as ids and planning over them.
        peak_bytes: the most memory resident at once.
        anonymous_bytes: the most of it that is no page of a file, by samples.
        store_bytes: size of the prompts on disk.
    """

    rows: int
    prompt_tokens: int
    wall_s: float
    cpu_s: float
    tokenize_s: float
    order_s: float
    peak_bytes: int
    anonymous_bytes: int
    store_bytes: int

    def describe(self) -> str:
        """Say it in three lines."""
        rest = self.wall_s - self.tokenize_s - self.order_s
        return (
            f"{self.rows:,} rows, {self.prompt_tokens:,} prompt tokens: {self.wall_s:.1f} s "
            f"({self.cpu_s:.1f} s of CPU)\n"
            f"  tokenise {self.tokenize_s:.1f} s ({self._per_s(self.tokenize_s)}), plan "
            f"{self.order_s:.1f} s ({self._per_s(self.order_s)}), start and end {rest:.1f} s\n"
            f"  peak RSS {_mib(self.peak_bytes)}, anonymous {_mib(self.anonymous_bytes)}; "
            f"prompts on disk {_mib(self.store_bytes)}"
        )

    def _per_s(self, seconds: float) -> str:
        return f"{self.prompt_tokens / max(seconds, 1e-9):,.0f} tokens/s"


def growth(few: Figures, many: Figures) -> str:
    """Return what every further row costs in memory."""
    rows = many.rows - few.rows
    anonymous = (many.anonymous_bytes - few.anonymous_bytes) / rows
    peak = (many.peak_bytes - few.peak_bytes) / rows
    return (
        f"a further row takes {anonymous:.0f} bytes of anonymous memory, and {peak:.0f} bytes "
        f"with the pages of its prompt"
    )


def write_rows(path: Path, rows: int, sentences: Sequence[str]) -> None:
    """Write the rows, two or three sentences each, unless the file has as many already."""
    if path.exists() and pq.read_metadata(path).num_rows == rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with pq.ParquetWriter(temporary, SCHEMA) as writer:
        for group in _row_groups(rows, sentences):
            writer.write_table(group)
    temporary.replace(path)


def _row_groups(rows: int, sentences: Sequence[str]) -> Iterator[pa.Table]:
    rng = np.random.default_rng(SEED)
    for first in range(0, rows, ROW_GROUP_ROWS):
        ids = range(first, min(rows, first + ROW_GROUP_ROWS))
        picks = rng.integers(0, len(sentences), (len(ids), 3)).tolist()
        counts = rng.integers(2, 4, len(ids)).tolist()
        texts = [
            " ".join(sentences[at] for at in pick[:count])
            for pick, count in zip(picks, counts, strict=True)
        ]
        yield pa.table({"id": ids, "text": texts}, schema=SCHEMA)


def run_plan(
    input_path: Path, rows: int, output: Path, model: Path, overrides: Sequence[str]
) -> Figures:
    """Run mode=plan over the first rows of a file.

    Raises:
        SystemExit: the command failed, with what it said.
    """
    command = [sys.executable, "-m", "batchgen", "mode=plan", "job=sentiment"]
    command += [f"input.path={in_quotes(str(input_path))}", f"input.limit={rows}"]
    command += [f"model.path={in_quotes(str(model))}", f"output.dir={in_quotes(str(output))}"]
    watched = _run_watched([*command, *overrides])
    plan: dict[str, Any] = json.loads((output / "_plan.json").read_text())
    return Figures(
        rows=plan["rows"],
        prompt_tokens=plan["prompt_tokens"],
        wall_s=watched.wall_s,
        cpu_s=watched.usage.ru_utime + watched.usage.ru_stime,
        tokenize_s=plan["phases"]["tokenize_s"],
        order_s=plan["phases"]["order_s"],
        peak_bytes=watched.usage.ru_maxrss << 10,
        anonymous_bytes=watched.anonymous_bytes,
        store_bytes=(output / "_plan" / "prompts.arrow").stat().st_size,
    )


@dataclass(frozen=True, slots=True)
class _Watched:
    wall_s: float
    usage: resource.struct_rusage
    anonymous_bytes: int


def _run_watched(command: Sequence[str]) -> _Watched:
    started = time.perf_counter()
    anonymous_bytes = 0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        while True:
            anonymous_bytes = max(anonymous_bytes, _anonymous_bytes(process.pid))
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(_POLL_S)
        wall_s = time.perf_counter() - started
        # Popen must not wait for a process that has been waited for.
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            sys.exit(f"{said.read()}the command ended with exit code {process.returncode}")
    return _Watched(wall_s, usage, anonymous_bytes)


def _anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(
        (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon")),
        0,
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def bench(
    folder: Path, rows: int, sentences: Sequence[str], model: Path, overrides: Sequence[str]
) -> None:
    """Make the rows, run the command over a tenth and over all, and print the figures."""
    input_path = folder / f"rows-{rows}.parquet"
    write_rows(input_path, rows, sentences)
    few, many = (
        run_plan(input_path, count, folder / "plan", model, overrides)
        for count in (max(1, rows // 10), rows)
    )
    print(few.describe())
    print(many.describe())
    if many.rows > few.rows:
        print(growth(few, many))


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=positive, default=100_000)
    parser.add_argument("--dir", type=Path, help="where rows and plan are kept; else temporary")
    parser.add_argument("overrides", nargs="*", help="of the job, as for batchgen")
    options = parser.parse_args()
    sentences = pq.read_table(prepare_data() / "reviews.parquet")["text"].to_pylist()
    model = fetch_model()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.dir or Path(temporary)).resolve()
        bench(folder, options.rows, sentences, model, options.overrides)


if __name__ == "__main__":
    main()
