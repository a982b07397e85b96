"""Draw what scripts/bench.py --save has written.

    python scripts/bench_plot.py results.parquet bench.png

One picture a workload: seconds a thousand rows, the median as a bar and all runs as dots, and
the floor as a line where it was measured.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = 2
FLOOR = "floor"
COLOURS = {"ours": "#1b6ca8"}
OUR_OTHERS = "#8fbcd9"
OTHERS = "#c9c9c9"


def seconds_by_workload(table: pa.Table) -> dict[str, dict[str, list[float]]]:
    """Return for each workload and engine the seconds a thousand rows of every run."""
    found: dict[str, dict[str, list[float]]] = {}
    columns = ["workload", "size", "engine", "seconds", "rows"]
    for run in table.select(columns).to_pylist():
        engines = found.setdefault(f"{run['workload']} ({run['size']})", {})
        engines.setdefault(run["engine"], []).append(1000 * run["seconds"] / run["rows"])
    return found


def plot_results(table: pa.Table, path: Path) -> None:
    """Draw the runs of a results' table into a picture file."""
    mpl.use("agg")
    from matplotlib import pyplot

    workloads = seconds_by_workload(table)
    columns = min(COLUMNS, len(workloads))
    lines = -(-len(workloads) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(6.5 * columns, 2.8 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(workloads) :]:
        axis.set_visible(False)
    for axis, (name, engines) in zip(axes.flat, workloads.items(), strict=False):
        _draw(axis, name, engines)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axis: Any, name: str, engines: Mapping[str, Sequence[float]]) -> None:
    bars = [engine for engine in engines if engine != FLOOR]
    medians = [statistics.median(engines[engine]) for engine in bars]
    colours = [
        COLOURS.get(engine, OUR_OTHERS if engine.startswith("ours") else OTHERS) for engine in bars
    ]
    axis.barh(bars, medians, color=colours, height=0.7)
    for engine, median in zip(bars, medians, strict=True):
        axis.plot(engines[engine], [engine] * len(engines[engine]), ".", color="black", ms=3)
        end = (max(engines[engine]), engine)
        axis.annotate(f" {_figure(median)}", end, va="center", fontsize="small")
    unit = "seconds for 1,000 rows"
    if FLOOR in engines:
        floor = statistics.median(engines[FLOOR])
        axis.axvline(floor, color="#c0392b", lw=1, ls="--")
        unit += f" (dashed: the matrix products alone, {_figure(floor)})"
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_title(name, fontsize="medium")
    axis.set_xlabel(unit, fontsize="small")
    axis.spines[["top", "right"]].set_visible(False)


def _figure(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def main() -> None:
    """Draw the file named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    plot_results(pq.read_table(options.results), options.picture)


if __name__ == "__main__":
    main()
