"""Run a million rows end to end over a model that costs nothing; watch memory and handles.

    python -m tests.stress.long_run --dir out/long                      # 1,000,000 rows
    python -m tests.stress.long_run --dir out/long --rows 50000 --growth-mib 64

Everything is the real thing but the forward pass: rows are read, rendered, tokenised, planned,
scheduled in blocks, detokenised and committed; only the tokens come out of a formula. A thread
notes what the process holds. In the end the output is compared with the input, row by row, and
the figures at the start, the middle and the end of the generate phase are told. It exits with 1
where memory grew by more than --growth-mib between a tenth of the rows and the last, or handles
did at all. The curve goes to --dir, as curve.json and curve.png.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from job_rows import positive

import batchgen.run
from batchgen.engine.core import EngineCore, FinishedOutput
from batchgen.engine.step import StepOutput, StepPlan
from batchgen.job.load import LoadedEngine
from batchgen.report.progress import Progress, Snapshot
from batchgen.report.terminal import TextDisplay
from tests.support.killed_job import composed, make_model, run_composed

MIB = 1 << 20
_EVERY_S = 0.5
_ROW_GROUP_ROWS = 1 << 16
_GROUPS = 997
# Bytes that the tiny model's tokenizer has as tokens of one letter each.
_LETTERS = 64


class FormulaExecutor:
    """Gives every sample a token made of its noise key and position; there is no KV."""

    def execute(self, plan: StepPlan) -> FinishedOutput:
        """Return the S tokens of a step."""
        keys = plan.samples.noise_keys.astype(np.uint64) >> np.uint64(7)
        numbers = keys + plan.samples.positions.astype(np.uint64) * 31
        return FinishedOutput(StepOutput((numbers % _LETTERS).astype(np.int64)))


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process held at a moment.

    Attributes:
        seconds: since the start.
        phase: of the job.
        rows: output rows so far.
        resident_bytes, anonymous_bytes: memory, and what of it is no page of a file.
        handles: open file descriptors.
        threads: of the process.
    """

    seconds: float
    phase: str
    rows: int
    resident_bytes: int
    anonymous_bytes: int
    handles: int
    threads: int


class Watch:
    """A display of progress that notes what the process holds, twice a second."""

    every_s = 0.1

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.phase = "start"
        self.rows = 0

    def say(self, text: str, level: str, event: str, fields: dict[str, Any]) -> None:
        """Others tell it."""

    def begin(self, phase: str) -> None:
        """Take the phase."""
        self.phase = phase

    def end(self, phase: str, seconds: float) -> None:
        """The next one follows."""

    def show(self, snapshot: Snapshot, tokens_per_s: float) -> None:
        """Take the rows."""
        self.rows = snapshot.rows

    def close(self, exit_code: int) -> None:
        """The caller has the code."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note while the context is open."""
        stopped, begun = threading.Event(), time.monotonic()

        def note() -> None:
            while not stopped.wait(_EVERY_S):
                self.samples.append(self._take(time.monotonic() - begun))

        thread = threading.Thread(target=note, name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _take(self, seconds: float) -> Sample:
        status = _status()
        return Sample(
            seconds=round(seconds, 3),
            phase=self.phase,
            rows=self.rows,
            resident_bytes=status["VmRSS"] * 1024,
            anonymous_bytes=status["RssAnon"] * 1024,
            handles=len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            threads=status["Threads"],
        )


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) for name, value in pairs if name in _STATUS}


_STATUS = ("VmRSS", "RssAnon", "Threads")


def write_rows(path: Path, num_rows: int) -> None:
    """Write short prompts of many groups, each group with a beginning of its own."""
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, _ROW_GROUP_ROWS):
            ids = range(start, min(num_rows, start + _ROW_GROUP_ROWS))
            prompts = [f"group {n * 7919 % _GROUPS:03}: row {n}" for n in ids]
            writer.write_table(pa.table({"id": list(ids), "prompt": prompts}, schema=schema))


def run(folder: Path, num_rows: int, watch: Watch, arguments: Sequence[str] = ()) -> int:
    """Run the job in this process; its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.parquet"
    write_rows(rows, num_rows)
    given = {
        "model.path": str(make_model(folder / "model")),
        "input.path": str(rows),
        "output.dir": str(folder / "out"),
        "output.overwrite": "true",
        "sampling.max_tokens": "4",
        "sampling.temperature": "1",
        "pool.num_blocks": "4096",
        "pool.swap_blocks": "64",
        "engine.max_num_seqs": "512",
        "log.every_s": "1",
    }
    values = composed(given | dict(each.split("=", 1) for each in arguments))
    build = batchgen.run.build_engine

    def build_fake(*given: Any, **named: Any) -> LoadedEngine:
        loaded = build(*given, **named)
        engine = EngineCore(loaded.engine.scheduler, FormulaExecutor(), clock=time.perf_counter)
        return replace(loaded, engine=engine)

    def make_watched(*, every_s: float, **_: Any) -> Progress:
        return Progress([TextDisplay(every_s), watch])

    with (
        mock.patch.object(batchgen.run, "build_engine", build_fake),
        mock.patch.object(batchgen.run, "make_progress", make_watched),
        watch.running(),
    ):
        return run_composed(values)


def check_output(folder: Path, num_rows: int) -> None:
    """Compare the output with the input.

    Raises:
        AssertionError: a row is missing, stands twice, or has no text.
    """
    table = pq.read_table(folder / "out", columns=["id", "row_index", "status", "generated_text"])
    assert len(table) == num_rows, f"{len(table):,} output rows for {num_rows:,}"
    assert pc.count_distinct(table.column("id")).as_py() == num_rows, "ids stand twice"
    assert pc.all(pc.equal(table.column("id"), table.column("row_index"))).as_py()
    assert pc.all(pc.equal(table.column("status"), "ok")).as_py(), "rows failed"
    assert table.column("generated_text").null_count == 0


def moments(samples: Sequence[Sample], num_rows: int) -> dict[str, Sample]:
    """Give what was held around a tenth, a half and the end of the generate phase's rows."""
    inside = [sample for sample in samples if sample.phase == "generate" and sample.rows]
    assert inside, "the run was too short to be watched"
    shares = {"start": (0.05, 0.15), "middle": (0.45, 0.55), "end": (0.9, 1.0)}
    found = {}
    for name, (low, high) in shares.items():
        near = [each for each in inside if low * num_rows <= each.rows <= high * num_rows]
        found[name] = _median(near or inside[-1:])
    return found


def _median(samples: Sequence[Sample]) -> Sample:
    """Give the middle one in time, with the medians of what was held."""
    middle = samples[len(samples) // 2]
    names = ("resident_bytes", "anonymous_bytes", "handles", "threads")
    held = {name: statistics.median_low(getattr(each, name) for each in samples) for name in names}
    return replace(middle, **held)


def describe(name: str, sample: Sample) -> str:
    """Say a sample in a line."""
    return (
        f"{name:7} {sample.rows:>9,} rows {sample.seconds:7.1f} s  resident "
        f"{sample.resident_bytes / MIB:7.1f} MiB, anonymous {sample.anonymous_bytes / MIB:7.1f} "
        f"MiB, {sample.handles} handles, {sample.threads} threads"
    )


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draw memory and handles over time."""
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    seconds = [sample.seconds for sample in samples]
    for name in ("resident_bytes", "anonymous_bytes"):
        values = [getattr(sample, name) / MIB for sample in samples]
        axis.plot(seconds, values, label=name.split("_", maxsplit=1)[0])
    axis.set(xlabel="seconds", ylabel="MiB", ylim=(0, None))
    handles = axis.twinx()
    handles.plot(seconds, [sample.handles for sample in samples], "k:", label="handles")
    handles.set(ylabel="open handles", ylim=(0, None))
    changes = [n for n in range(1, len(samples)) if samples[n].phase != samples[n - 1].phase]
    for n in changes:
        axis.axvline(seconds[n], color="0.8", zorder=0)
        axis.annotate(samples[n].phase, (seconds[n], 0), fontsize=8)
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Read the arguments, run, and say whether anything grew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="gets input, output and curve")
    parser.add_argument("--rows", type=positive, default=1_000_000)
    parser.add_argument("--growth-mib", type=positive, default=64)
    parser.add_argument("arguments", nargs="*", help="more key=value arguments of the command")
    given = parser.parse_args()
    watch = Watch()
    code = run(given.dir, given.rows, watch, given.arguments)
    if code != 0:
        print(f"the run ended with {code}")
        return 1
    check_output(given.dir, given.rows)
    curve = [asdict(sample) for sample in watch.samples]
    (given.dir / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")
    draw(watch.samples, given.dir / "curve.png")
    found = moments(watch.samples, given.rows)
    for name, sample in found.items():
        print(describe(name, sample))
    grown = found["end"].anonymous_bytes - found["start"].anonymous_bytes
    opened = found["end"].handles - found["start"].handles
    print(f"from start to end: {grown / MIB:+.1f} MiB of anonymous memory, {opened:+} handles")
    return int(grown > given.growth_mib * MIB or opened > 0)


if __name__ == "__main__":
    sys.exit(main())
