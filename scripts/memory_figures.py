"""The figures of compare_memory.py: as a table, as files, as a plot."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from memory_runs import VARIANTS, Figures

# Heading, then how a figure is worded.
COLUMNS: dict[str, Callable[[Figures], str]] = {
    "": lambda figures: VARIANTS[figures.variant],
    "rows at once": lambda figures: f"{figures.peak_rows:,}",
    "mean": lambda figures: f"{figures.mean_rows:.1f}",
    "tokens/s out": lambda figures: f"{figures.output_tokens_per_s:,.1f}",
    "and in": lambda figures: f"{figures.total_tokens_per_s:,.0f}",
    "TTFT p50 ms": lambda figures: f"{figures.ttft_p50_ms:,.0f}",
    "p90": lambda figures: f"{figures.ttft_p90_ms:,.0f}",
    "p99": lambda figures: f"{figures.ttft_p99_ms:,.0f}",
    "peak KV MiB": lambda figures: f"{figures.peak_kv_bytes / 2**20:,.1f}",
    "unused": lambda figures: f"{figures.unused_share:.1%}",
    "prefill tokens": lambda figures: f"{figures.prefill_tokens:,}",
    "preempted": lambda figures: f"{figures.preemptions:,}",
}


def table(every: Sequence[Figures]) -> str:
    """Write the figures as an aligned table, a line for each variant."""
    lines = [list(COLUMNS), *([word(figures) for word in COLUMNS.values()] for figures in every)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def notes(every: Sequence[Figures], num_rows: int) -> str:
    """Return what the table does not: refusals, and whether all made the same tokens."""
    lines = [_refusals(figures) for figures in every if figures.variant == "contiguous_fit"]
    different = [
        f"{VARIANTS[figures.variant]}: {num_rows - figures.equal_outputs} rows made other tokens"
        for figures in every
        if figures.equal_outputs < num_rows
    ]
    if not every[0].simulated:
        lines += different or ["every row has the same tokens in all of them"]
    return "\n".join(lines)


def _refusals(figures: Figures) -> str:
    line = (
        f"{VARIANTS[figures.variant]}: {figures.refused_rows} rows were refused, in "
        f"{figures.refusals} steps, although enough slots were free in total"
    )
    if not figures.refusals:
        return line
    return (
        f"{line}; at worst {figures.free_at_refusal:,} were free, the largest hole "
        f"{figures.hole_at_refusal:,}"
    )


def save(every: Sequence[Figures], folder: Path) -> None:
    """Write ``figures.json``, ``figures.parquet`` and ``figures.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [asdict(figures) for figures in every]
    (folder / "figures.json").write_text(json.dumps(records, indent=1) + "\n")
    pq.write_table(pa.Table.from_pylist(records), folder / "figures.parquet")
    plot(every, folder / "figures.png")


def plot(every: Sequence[Figures], path: Path) -> None:
    """Draw a line of panels for each number of shared tokens."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    scenarios = list(dict.fromkeys(figures.shared_tokens for figures in every))
    figure, axes = plt.subplots(
        len(scenarios), 4, figsize=(16, 3.2 * len(scenarios)), squeeze=False, layout="constrained"
    )
    for line, shared in zip(axes, scenarios, strict=True):
        chosen = [figures for figures in every if figures.shared_tokens == shared]
        _bars(line[0], chosen, "rows at once, peak", [f.peak_rows for f in chosen])
        simulated = " (simulated)" if chosen[0].simulated else ""
        speeds = [f.output_tokens_per_s for f in chosen]
        _bars(line[1], chosen, f"output tokens/s{simulated}", speeds)
        _percentiles(line[2], chosen, f"time to first token, s{simulated}")
        _bars(line[3], chosen, "slots unused, %", [100 * f.unused_share for f in chosen])
        line[0].set_ylabel(f"{shared:,} tokens shared")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, every: Sequence[Figures], title: str, values: Sequence[float]) -> None:
    bars = axis.barh([VARIANTS[figures.variant] for figures in every], values)
    axis.bar_label(bars, fmt="{:,.4g}", padding=2)
    axis.margins(x=0.25)
    axis.set_title(title)
    axis.invert_yaxis()


def _percentiles(axis: Any, every: Sequence[Figures], title: str) -> None:
    places = np.arange(len(every))
    for at, percent in enumerate((50, 90, 99)):
        values = [getattr(figures, f"ttft_p{percent}_ms") / 1000 for figures in every]
        axis.barh(places + 0.27 * (at - 1), values, height=0.25, label=f"p{percent}")
    axis.set_yticks(places, [VARIANTS[figures.variant] for figures in every])
    axis.set_title(title)
    axis.margins(x=0.35)
    axis.legend(loc="right")
    axis.invert_yaxis()
