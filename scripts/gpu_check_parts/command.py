"""The command: which parts run for how long, and what is shown and written of them."""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_check_parts import (
    compiling,
    determinism,
    equality,
    kernels_right,
    memory,
    rates,
    syncs,
    throughput,
)
from gpu_check_parts.context import Context
from gpu_check_parts.forks import Emit, Part, run_part
from gpu_check_parts.machine import describe_machine, describe_software
from gpu_check_parts.outcome import Check, Figure, PartOutcome, Record
from gpu_check_parts.table import summary_table


@dataclass(frozen=True, slots=True)
class Entry:
    """A part: its module, its weight in the budget, and over how many processes it may spread.

    What is timed runs alone. What is only compared may not: compiling kernels takes most of its
    time, on one core each.
    """

    module: Any
    weight: float
    lanes: int = 1


# In the order in which they run.
PARTS = {
    "compiling": Entry(compiling, 25.0, lanes=16),
    "kernels": Entry(kernels_right, 50.0, lanes=12),
    "rates": Entry(rates, 45.0),
    "equality": Entry(equality, 60.0, lanes=14),
    "determinism": Entry(determinism, 30.0, lanes=4),
    "syncs": Entry(syncs, 20.0),
    "throughput": Entry(throughput, 160.0),
    "memory": Entry(memory, 55.0),
}
# Parts may overrun their share; this much of the budget is shared out.
_SHARED_OUT = 0.9
_DRY_RUN_BUDGET_S = 600.0
_BUDGET_S = 480.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return the exit code."""
    options = _parse(arguments)
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    device = torch.device("cpu" if options.dry_run else "cuda")
    found = run_part(Part("machine", _look_at(device)), 60.0, lambda _: None)
    if found.failed:
        print(f"gpu_check: {found.failed[0].detail}", file=sys.stderr)
        return 2
    machine = found.checks[0].detail
    print(f"{machine}; {describe_software()}; seed {seed}", flush=True)
    outcomes = _run_all(options, device, seed)
    print(summary_table(outcomes))
    if options.json is not None:
        _write(options.json, machine, seed, options, outcomes)
    failed = [check for outcome in outcomes for check in outcome.failed]
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description="Check and measure the engine on a GPU."
    )
    parser.add_argument(
        "--only", action="append", choices=tuple(PARTS), help="run this part; may be repeated"
    )
    parser.add_argument(
        "--budget-s", type=float, default=None, help=f"seconds for all parts ({_BUDGET_S:.0f})"
    )
    parser.add_argument("--json", type=Path, help="write all checks and figures to this file")
    parser.add_argument("--seed", type=int, help="of the random inputs; drawn and shown if absent")
    parser.add_argument(
        "--dry-run", action="store_true", help="go through all code on a CPU, with tiny shapes"
    )
    options = parser.parse_args(arguments)
    if options.budget_s is None:
        options.budget_s = _DRY_RUN_BUDGET_S if options.dry_run else _BUDGET_S
    return options


def _look_at(device: torch.device) -> Callable[[Emit, float, int], None]:
    """Make the part that asks for the machine; the parent must not touch a GPU itself."""

    def look(emit: Emit, seconds: float, lane: int) -> None:
        emit(describe_machine(device))

    return look


def _run_all(options: argparse.Namespace, device: torch.device, seed: int) -> list[PartOutcome]:
    names = [name for name in PARTS if options.only is None or name in options.only]
    end = time.monotonic() + _SHARED_OUT * options.budget_s
    outcomes = []
    for at, name in enumerate(names):
        entry = PARTS[name]
        # What earlier parts did not use, later ones have.
        share = entry.weight / sum(PARTS[later].weight for later in names[at:])
        seconds = max(1.0, share * (end - time.monotonic()))
        print(f"\n{name}", flush=True)
        lanes = max(1, min(entry.lanes, len(os.sched_getaffinity(0))))

        def run(
            emit: Emit, seconds: float, lane: int, entry: Entry = entry, lanes: int = lanes
        ) -> None:
            if options.dry_run:
                # Threads of small products on few cores wait for each other most of the time.
                torch.set_num_threads(1)
            context = Context(
                device,
                dry_run=options.dry_run,
                seed=seed,
                seconds=seconds,
                emit=emit,
                lane=lane,
                lanes=lanes,
            )
            entry.module.run(context)

        outcomes.append(run_part(Part(name, run, lanes), seconds, _show))
        print(f"  {outcomes[-1].seconds:.1f} s", flush=True)
    return outcomes


def _show(record: Record) -> None:
    """Print a record as it comes."""
    if isinstance(record, Check):
        line = f"{'ok  ' if record.passed else 'FAIL'} {record.name}: {record.detail}"
    elif isinstance(record, Figure):
        line = f"     {record.name}: {record.value:,.4g} {record.unit}"
        if record.predicted is not None:
            line += f" (roofline {record.predicted:,.4g})"
        if record.note:
            line += f", {record.note}"
    else:
        line = f"     left out for want of time: {record.name}"
    print(f"  {line}", flush=True)


def _write(
    path: Path,
    machine: str,
    seed: int,
    options: argparse.Namespace,
    outcomes: Sequence[PartOutcome],
) -> None:
    content = {
        "machine": machine,
        "software": describe_software(),
        "seed": seed,
        "dry_run": options.dry_run,
        "budget_s": options.budget_s,
        "parts": [outcome.to_json() for outcome in outcomes],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
