"""What the benchmark found: compared in words, and kept as Parquet."""

import datetime
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from batchgen.report.machine import versions
from bench_parts.engines import Measurement
from bench_parts.floor import Floor

OURS = "ours"
# Whose tokens all others are held against: `generate` of the stock model.
REFERENCE = "static"
FLOOR = "floor"
MIB = 1 << 20

RESULTS_SCHEMA = pa.schema(
    [
        ("workload", pa.string()),
        ("size", pa.string()),
        ("engine", pa.string()),
        ("repeat", pa.int32()),
        ("rows", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("seconds", pa.float64()),
        ("generate_s", pa.float64()),
        ("model_s", pa.float64()),
        ("prefill_tokens", pa.int64()),
        ("prefill_tokens_floor", pa.int64()),
        ("prefill_tokens_floor_block", pa.int64()),
        ("equal_rows", pa.int64()),
        ("compared_rows", pa.int64()),
        ("weights_bytes", pa.int64()),
        ("pool_bytes", pa.int64()),
        ("peak_memory_bytes", pa.int64()),
        ("floor_s", pa.map_(pa.string(), pa.float64())),
        ("engine_version", pa.string()),
        ("arguments", pa.list_(pa.string())),
        ("started", pa.timestamp("s", tz="UTC")),
        ("versions", pa.map_(pa.string(), pa.string())),
        ("threads", pa.int32()),
        ("load_average", pa.float64()),
        ("machine", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the repeats."""

    values: Sequence[float]

    def show(self, spec: str = ".2f") -> str:
        """Write the median, and the least and the most where there are several."""
        median = f"{statistics.median(self.values):{spec}}"
        if len(self.values) == 1:
            return median
        return f"{median} ({min(self.values):{spec}}..{max(self.values):{spec}})"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a workload asks for; token counts.

    Attributes:
        workload, size: its name and size.
        rows: of the input.
        prompt_tokens: of all rows.
        output_tokens: that all rows ask for.
        floor_tokens, floor_tokens_block: prefill that sharing by the token (E_1) and by whole
            blocks leaves.
        arguments: of the job.
    """

    workload: str
    size: str
    rows: int
    prompt_tokens: int
    output_tokens: int
    floor_tokens: int
    floor_tokens_block: int
    arguments: Sequence[str]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when it ran.

    Attributes:
        name: processor and cores, and the GPU.
        threads: that torch uses.
        load_average: of the last minute, before the benchmark began.
        started: when it began.
        versions: of Python and the packages.
    """

    name: str
    threads: int
    load_average: float
    started: datetime.datetime
    versions: Mapping[str, str | None]

    @classmethod
    def here(cls) -> "Machine":
        """Describe this machine."""
        return cls(
            name=_machine_name(),
            threads=torch.get_num_threads(),
            load_average=os.getloadavg()[0],
            started=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
            versions=versions(),
        )

    def describe(self) -> str:
        """Say it in a line, with a warning where something else is running."""
        busy = self.load_average > 0.5
        load = f"load {self.load_average:.1f} before the start"
        note = f"; {load}: OTHER WORK IS RUNNING, the times mean little" if busy else f"; {load}"
        packages = ", ".join(
            f"{name} {self.versions[name]}" for name in ("batchgen", "torch", "transformers")
        )
        return f"{self.name}; {self.threads} threads; {packages}{note}"


@dataclass(slots=True)
class Results:
    """All measurements of one workload, by engine, in the order they were made."""

    facts: Facts
    runs: dict[str, list[Measurement]] = field(default_factory=dict)
    floors: list[Floor] = field(default_factory=list)

    def describe(self) -> str:
        """Say times, ratios, the floor, memory and agreement."""
        lines = [self._heading(), *self._table()]
        if OURS in self.runs:
            lines += [self._ratio(engine) for engine in self.runs if engine != OURS]
            lines += [*self._floor(), *self._memory()]
        return "\n".join(lines)

    def agreement(self, engine: str, repeat: int) -> tuple[int, int] | None:
        """Count rows with the reference's tokens, and rows that both ran.

        Returns:
            The two; None if the reference did not run.
        """
        reference = self.runs.get(REFERENCE)
        if not reference:
            return None
        outputs, expected = self.runs[engine][repeat].outputs, reference[0].outputs
        both = outputs.keys() & expected.keys()
        return sum(outputs[row] == expected[row] for row in both), len(both)

    def slowdowns(self, engine: str) -> Spread:
        """Return how much longer an engine takes for a row than ours does, repeat by repeat."""
        pairs = zip(self.runs[OURS], self.runs[engine], strict=True)
        return Spread([ours.rows_per_s / other.rows_per_s for ours, other in pairs])

    def _heading(self) -> str:
        facts = self.facts
        return (
            f"{facts.workload} ({facts.size}): {facts.rows:,} rows, {facts.prompt_tokens:,} "
            f"prompt tokens, E_1 = {facts.floor_tokens:,} ({facts.floor_tokens_block:,} by "
            f"blocks), {facts.output_tokens:,} tokens out"
        )

    def _table(self) -> Iterator[str]:
        columns: dict[str, Callable[[str], str]] = {
            "seconds": lambda engine: Spread([run.seconds for run in self.runs[engine]]).show(),
            "rows": lambda engine: f"{len(self.runs[engine][0].outputs):,}",
            "rows/s": lambda engine: Spread([run.rows_per_s for run in self.runs[engine]]).show(),
            "out/s": lambda engine: Spread(
                [run.output_tokens / run.seconds for run in self.runs[engine]]
            ).show(".0f"),
            "prefill": self._prefill,
            "peak MiB": self._peak,
            "model idle": self._idle,
            f"= {REFERENCE}": self._equal,
        }
        cells = [["", *columns]]
        cells += [[engine, *(show(engine) for show in columns.values())] for engine in self.runs]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            padded = [row[0].ljust(widths[0])]
            padded += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            yield "  ".join(padded)

    def _prefill(self, engine: str) -> str:
        tokens = self.runs[engine][0].prefill_tokens
        if tokens is None:
            return "-"
        return f"{tokens:,} = {tokens / self.facts.floor_tokens:.3f} x E_1"

    def _peak(self, engine: str) -> str:
        peaks = [run.peak_memory_bytes for run in self.runs[engine]]
        known = [peak / MIB for peak in peaks if peak is not None]
        return Spread(known).show(",.0f") if known else "-"

    def _idle(self, engine: str) -> str:
        shares = [
            1 - run.model_s / run.generate_s
            for run in self.runs[engine]
            if run.model_s is not None and run.generate_s
        ]
        return Spread(shares).show(".1%") if shares else "-"

    def _equal(self, engine: str) -> str:
        counts = self.agreement(engine, 0)
        return f"{counts[0]} of {counts[1]}" if counts else "-"

    def _ratio(self, engine: str) -> str:
        return f"ours is {self.slowdowns(engine).show()} x as fast as {engine}"

    def _floor(self) -> Iterator[str]:
        if not self.floors:
            return
        pairs = list(zip(self.runs[OURS], self.floors, strict=True))
        ratio = Spread([(run.generate_s or run.seconds) / floor.seconds for run, floor in pairs])
        seconds = Spread([floor.seconds for floor in self.floors])
        parts = ", ".join(
            f"{name} {statistics.median(floor.parts[name] for floor in self.floors):.2f}"
            for name in self.floors[0].parts
        )
        yield f"ours generates in {ratio.show()} x the floor of {seconds.show()} s ({parts})"

    def _memory(self) -> Iterator[str]:
        run = self.runs[OURS][0]
        if run.peak_memory_bytes is None or run.weights_bytes is None or run.pool_bytes is None:
            return
        rest = run.peak_memory_bytes - run.weights_bytes - run.pool_bytes
        yield (
            f"memory of ours: peak {run.peak_memory_bytes / MIB:,.0f} MiB = weights "
            f"{run.weights_bytes / MIB:,.0f} + pool {run.pool_bytes / MIB:,.0f} "
            f"{'+' if rest >= 0 else '-'} {abs(rest) / MIB:,.0f}"
        )

    def records(self, machine: Machine) -> Iterator[dict[str, Any]]:
        """Return a row of the results' table for every run, the floor's too."""
        facts = self.facts
        common = {
            "workload": facts.workload,
            "size": facts.size,
            "prefill_tokens_floor": facts.floor_tokens,
            "prefill_tokens_floor_block": facts.floor_tokens_block,
            "arguments": list(facts.arguments),
            "prompt_tokens": facts.prompt_tokens,
            "started": machine.started,
            "versions": [(name, each) for name, each in machine.versions.items() if each],
            "threads": machine.threads,
            "load_average": machine.load_average,
            "machine": machine.name,
        }
        for engine, runs in self.runs.items():
            for repeat, run in enumerate(runs):
                equal, compared = self.agreement(engine, repeat) or (None, None)
                yield common | {
                    "engine": engine,
                    "repeat": repeat,
                    "rows": len(run.outputs),
                    "output_tokens": run.output_tokens,
                    "seconds": run.seconds,
                    "generate_s": run.generate_s,
                    "model_s": run.model_s,
                    "prefill_tokens": run.prefill_tokens,
                    "equal_rows": equal,
                    "compared_rows": compared,
                    "weights_bytes": run.weights_bytes,
                    "pool_bytes": run.pool_bytes,
                    "peak_memory_bytes": run.peak_memory_bytes,
                    "engine_version": run.version,
                }
        for repeat, floor in enumerate(self.floors):
            yield common | {
                "engine": FLOOR,
                "repeat": repeat,
                "rows": facts.rows,
                "output_tokens": facts.output_tokens,
                "seconds": floor.seconds,
                "prefill_tokens": facts.floor_tokens,
                "floor_s": list(floor.parts.items()),
            }


def results_table(results: Sequence[Results], machine: Machine) -> pa.Table:
    """Put all runs into one table."""
    records = [record for each in results for record in each.records(machine)]
    return pa.Table.from_pylist(records, RESULTS_SCHEMA)


def save_results(results: Sequence[Results], machine: Machine, path: Path) -> None:
    """Write one row for every run to a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(results_table(results, machine), path)


def _machine_name() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8"))
        name = found[1].strip() if found else name
    cores = f"{name}, {os.cpu_count()} cores"
    return f"{cores}, {torch.cuda.get_device_name()}" if torch.cuda.is_available() else cores
