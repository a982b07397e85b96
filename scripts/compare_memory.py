"""Run the same rows under one KV budget through five ways of keeping KV, and compare them.

    python scripts/compare_memory.py                      # the demo's model on real text
    python scripts/compare_memory.py --rows 64 model.path=/models/qwen3-0.6b
    python scripts/compare_memory.py --no-model           # large shapes, the scheduler alone

The five are: a run of slots a row for the longest row there could be (contiguous, maximum);
a run a row for just its prompt and the output it turns out to have, first fit (contiguous,
first fit: no real system knows that length, so this is the best such a system could do);
blocks without a prefix cache; blocks whose prefixes are shared by whole blocks and evicted
least recently used first; and batchgen with all it has: rows in prefix order, sharing by the
token, eviction by the known future, swap. Only the last may reorder the rows.

Only admission and the count of memory differ. Rows with contiguous memory wait at a gate until
a run of slots fits; what then executes them is the same paged engine, over a pool large enough
that the gate alone decides.

Each row ends after a number of tokens drawn beforehand, which no scheduler knows. Time to the
first token counts from the start of the run, when all rows are there: waiting for memory is
part of it. With --no-model a step takes a fixed time and a time a token: seconds, tokens/s and
TTFT are then simulated, all else is counted.

Writes figures.json, figures.parquet and figures.png to --out.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fetch_model import MODEL_DIR, ROOT, fetch_model
from memory_machines import Machine, ModelMachine, SimulatedMachine, StopAt
from memory_managers import ContiguousManager, WholeBlockManager
from memory_rows import Row, Shape, make_rows, random_stream, text_stream

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.loop import Engine, Executor
from batchgen.engine.request import Request
from batchgen.engine.scheduler import Scheduler, SchedulerLimits
from batchgen.engine.step import IntArray, StepPlan
from batchgen.engine.swap import PreemptionPolicy, SwapSpace
from batchgen.errors import BatchgenError, EngineError, UsageError
from batchgen.prompts.future import PlannedFuture
from batchgen.prompts.order import neighbour_lcp, prefix_order
from batchgen.prompts.tokenizer import load_tokenizer
from batchgen.runtime.model import ModelSource, load_model
from batchgen.sampling import SamplingParams

Ids = npt.NDArray[np.int32]

VARIANTS = {
    "contiguous_max": "contiguous, maximum",
    "contiguous_fit": "contiguous, first fit",
    "paged": "paged",
    "paged_prefix": "paged, prefix by blocks",
    "ours": "batchgen",
}


# -- one run ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """The budget and the step's bounds, the same for every variant.

    Attributes:
        block_size: slots in a block.
        num_blocks: the budget, in blocks.
        max_num_seqs: rows at once at most.
        step_tokens: tokens in a step at most.
        max_tokens: the most a row may generate.
        longest_tokens: the run of slots for a row of unknown length.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    step_tokens: int
    max_tokens: int
    longest_tokens: int

    @property
    def capacity(self) -> int:
        """The budget, in slots."""
        return self.num_blocks * self.block_size


@dataclass(slots=True)
class Figures:
    """What one variant did.

    Attributes:
        peak_rows, mean_rows: rows in a step.
        ttft_p50_ms, ttft_p90_ms, ttft_p99_ms: from the run's start to a row's first token.
        peak_kv_bytes: most of the budget in use at once; cached blocks are not in use.
        unused_share: of the slots in use, those without KV, summed over the steps.
        prefill_tokens, recomputed_tokens: tokens computed; those again after a preemption.
        refusals, refused_rows: see :class:`Refusals`.
        free_at_refusal, hole_at_refusal: free slots and the largest hole at the worst one.
        equal_outputs: rows with the same tokens as in the first variant run.
    """

    variant: str
    shared_tokens: int
    simulated: bool
    seconds: float = 0.0
    steps: int = 0
    peak_rows: int = 0
    mean_rows: float = 0.0
    output_tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0
    ttft_p50_ms: float = 0.0
    ttft_p90_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    peak_kv_bytes: int = 0
    unused_share: float = 0.0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    refusals: int = 0
    refused_rows: int = 0
    free_at_refusal: int = 0
    hole_at_refusal: int = 0
    equal_outputs: int = 0


class Watch:
    """Passes steps on to an executor and looks at the memory of each."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self.peak_slots = self.peak_rows = self.sum_slots = self.sum_unused = 0
        self._executor = executor
        self._scheduler = scheduler

    def execute(self, plan: StepPlan) -> IntArray:
        """Look, then run."""
        slots, unused = slots_in_use(self._scheduler)
        self.peak_slots = max(self.peak_slots, slots)
        self.peak_rows = max(self.peak_rows, len(self._scheduler.running))
        self.sum_slots += slots
        self.sum_unused += unused
        return self._executor.execute(plan)


def slots_in_use(scheduler: Scheduler) -> tuple[int, int]:
    """Count the slots that are taken, and those of them that hold no KV.

    A slot without KV lies behind a row's computed tokens, in blocks that are its alone.
    """
    manager, running = scheduler.blocks, list(scheduler.running)
    if isinstance(manager, ContiguousManager):
        taken = manager.slots.capacity - manager.slots.num_free
        return taken, taken - sum(request.num_computed for request in running)
    size = manager.block_size
    unused = sum(len(row.block_table) * size - row.num_computed for row in running)
    return manager.pool.num_owned * size, unused


def make_scheduler(
    variant: str, rows: Sequence[Row], limits: Limits, machine: Machine, order: Sequence[int]
) -> Scheduler:
    """Make the scheduler of a variant.

    Args:
        variant: one of ``VARIANTS``.
        rows: all rows; a request's number is its row's.
        limits: the budget.
        machine: gives the clock.
        order: the rows in the order in which they will be added.
    """
    ours, contiguous = variant == "ours", variant.startswith("contiguous")
    return Scheduler(
        make_manager(variant, rows, limits, order),
        SwapSpace(limits.num_blocks if ours else 0),
        StopAt(rows),
        SchedulerLimits(limits.max_num_seqs, limits.step_tokens),
        admission=AdmissionPolicy.PROMPT if contiguous else AdmissionPolicy.AUTO,
        preemption=PreemptionPolicy.AUTO if ours else PreemptionPolicy.RECOMPUTE,
        costs=machine.costs(limits.block_size),
        clock=machine.clock,
    )


def make_manager(
    variant: str, rows: Sequence[Row], limits: Limits, order: Sequence[int]
) -> BlockManager:
    """Make a variant's memory; see :func:`make_scheduler`."""
    size = limits.block_size
    if variant == "ours":
        future = PlannedFuture(np.arange(len(order)), neighbour_lcp(_ids_of(rows), _rows(order)))
        return BlockManager(limits.num_blocks, size, future=future)
    if variant == "paged_prefix":
        return WholeBlockManager(limits.num_blocks, size)
    if variant == "paged":
        return BlockManager(limits.num_blocks, size, prefix_caching=False)

    def real_length(request: Request) -> int:
        return request.num_prompt_tokens + rows[request.request_id].output_tokens

    def longest(request: Request) -> int:
        return limits.longest_tokens

    # A row's last block may be partly outside its run, and admission keeps one more.
    num_blocks = limits.num_blocks + 2 * limits.max_num_seqs
    run_tokens = real_length if variant == "contiguous_fit" else longest
    return ContiguousManager(num_blocks, size, capacity=limits.capacity, run_tokens=run_tokens)


def run_variant(
    variant: str, rows: Sequence[Row], limits: Limits, machine: Machine, shared_tokens: int
) -> tuple[Figures, dict[int, list[int]]]:
    """Run all rows through a variant.

    Returns:
        The figures, and each row's generated tokens.

    Raises:
        EngineError: a row did not get through.
    """
    order = list(range(len(rows)))
    if variant == "ours":
        order = prefix_order(_ids_of(rows), _rows(order)).tolist()
    scheduler = make_scheduler(variant, rows, limits, machine, order)
    swap_blocks = scheduler.swap_space.num_blocks
    watch = Watch(machine.executor(scheduler.blocks, swap_blocks), scheduler)
    engine = Engine(scheduler, watch, clock=machine.clock)
    params = SamplingParams(max_tokens=limits.max_tokens)
    requests = [
        Request.create(row, rows[row].prompt.tolist(), params, max_model_len=limits.capacity)
        for row in order
    ]
    started = machine.clock()
    finished = [request for batch in engine.run(requests) for request in batch]
    seconds = machine.clock() - started
    for request in finished:
        if request.num_output_tokens != rows[request.request_id].output_tokens:
            raise EngineError(f"row {request.request_id} ended early: {request.error}")
    figures = Figures(variant, shared_tokens, machine.simulated, seconds)
    _fill_memory(figures, watch, scheduler, machine)
    _fill_speed(figures, finished, engine, started)
    return figures, {request.request_id: request.output_token_ids for request in finished}


def _fill_memory(figures: Figures, watch: Watch, scheduler: Scheduler, machine: Machine) -> None:
    counters, manager = scheduler.counters, scheduler.blocks
    figures.peak_rows = watch.peak_rows
    figures.peak_kv_bytes = watch.peak_slots * machine.bytes_per_token
    figures.unused_share = watch.sum_unused / watch.sum_slots
    figures.prefill_tokens = counters.prefill_tokens
    figures.recomputed_tokens = counters.recomputed_tokens
    figures.preemptions = counters.preemptions
    if isinstance(manager, ContiguousManager):
        refusals = manager.refusals
        figures.refusals, figures.refused_rows = refusals.count, len(refusals.rows)
        figures.free_at_refusal = refusals.num_free
        figures.hole_at_refusal = refusals.largest_hole


def _fill_speed(
    figures: Figures, finished: Sequence[Request], engine: Engine, started: float
) -> None:
    waits = [1000 * ((request.timeline.first_token or 0.0) - started) for request in finished]
    p50, p90, p99 = np.percentile(waits, (50, 90, 99)).tolist()
    figures.ttft_p50_ms, figures.ttft_p90_ms, figures.ttft_p99_ms = p50, p90, p99
    figures.steps = engine.stats.steps
    figures.mean_rows = engine.stats.row_steps / engine.stats.steps
    output_tokens = sum(request.num_output_tokens for request in finished)
    total_tokens = sum(len(request.token_ids) for request in finished)
    figures.output_tokens_per_s = output_tokens / figures.seconds
    figures.total_tokens_per_s = total_tokens / figures.seconds


def _ids_of(rows: Sequence[Row]) -> Callable[[int], Ids]:
    return lambda row: rows[row].prompt


def _rows(order: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.asarray(order, dtype=np.int64)


def compare(
    rows: Sequence[Row], limits: Limits, machine: Machine, shared_tokens: int = 0
) -> list[Figures]:
    """Run the rows through every variant.

    Raises:
        UsageError: the budget does not hold the longest row.
    """
    longest = max(len(row.prompt) for row in rows) + limits.max_tokens
    limits = replace(limits, longest_tokens=limits.longest_tokens or longest)
    if not longest <= limits.longest_tokens <= limits.capacity:
        raise UsageError(
            f"a row may take {longest:,} tokens: that must not be above --longest-tokens "
            f"({limits.longest_tokens:,}), nor that above the budget ({limits.capacity:,} tokens)"
        )
    every: list[Figures] = []
    reference: dict[int, list[int]] = {}
    # The first steps of a process are slow, whoever runs them.
    run_variant("paged", rows[:2], limits, machine, shared_tokens)
    for variant, title in VARIANTS.items():
        print(f"running {title}", file=sys.stderr, flush=True)
        figures, outputs = run_variant(variant, rows, limits, machine, shared_tokens)
        reference = reference or outputs
        figures.equal_outputs = sum(outputs[row] == reference[row] for row in outputs)
        every.append(figures)
    return every


# -- what is shown ------------------------------------------------------------------------

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
    """Say what the table does not: refusals, and whether all made the same tokens."""
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


# -- the command --------------------------------------------------------------------------

# Shapes to start from; every entry is an option of the command.
WITH_MODEL = {
    "rows": 96,
    "groups": 4,
    "prompt_tokens": 296,
    "shared_tokens": [250],
    "output_tokens": 16,
    "spread": 0.5,
    "num_blocks": 160,
    "block_size": 16,
    "max_num_seqs": 64,
    "step_tokens": 512,
    "longest_tokens": 0,
}
# 16 rows of 4,096 tokens fill 4,096 blocks of 16; 205 blocks are the 80% that they share.
NO_MODEL = {
    **WITH_MODEL,
    "rows": 160,
    "groups": 1,
    "prompt_tokens": 3968,
    "shared_tokens": [0, 3280],
    "output_tokens": 128,
    "spread": 0.0,
    "num_blocks": 4096,
    "max_num_seqs": 256,
    "step_tokens": 8192,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, save, and give the exit code."""
    options = read_options(arguments)
    try:
        every = run(options)
        save(every, options.out)
    except BatchgenError as error:
        print(f"compare_memory: {error}", file=sys.stderr)
        return error.exit_code
    print(f"\nfigures and plot: {options.out}")
    return 0


def run(options: argparse.Namespace) -> list[Figures]:
    """Compare the variants for each number of shared tokens, and print the tables."""
    values = vars(options)
    machine, stream = open_machine(options)
    chosen = {item.name: values[item.name] for item in fields(Limits) if item.name in values}
    limits = Limits(**chosen, max_tokens=options.output_tokens)
    budget = limits.capacity * machine.bytes_per_token / 2**20
    print(
        f"KV budget: {limits.num_blocks:,} blocks of {limits.block_size} = {limits.capacity:,} "
        f"tokens, {budget:,.1f} MiB; steps of {limits.step_tokens:,} tokens"
    )
    if isinstance(machine, SimulatedMachine):
        print(machine.describe())
    every = []
    for shared_tokens in options.shared_tokens:
        shape = Shape(
            **{item.name: values[item.name] for item in fields(Shape)}
            | {"shared_tokens": shared_tokens}
        )
        rows = make_rows(shape, stream(shape))
        print(f"\n{shape.describe()}", flush=True)
        found = compare(rows, limits, machine, shared_tokens)
        print("\n".join((table(found), notes(found, len(rows)))).rstrip(), flush=True)
        every += found
    return every


def open_machine(options: argparse.Namespace) -> tuple[Machine, Callable[[Shape], Ids]]:
    """Give what runs the steps, and where the rows' tokens come from."""
    if options.no_model:
        machine = SimulatedMachine(step_s=options.step_ms / 1e3, token_s=options.token_us / 1e6)
        return machine, lambda shape: random_stream(shape, 50_000)
    path = str(options.model or fetch_model())
    loaded = load_model(
        ModelSource(path), dtype="float32", device=torch.device("cpu"), max_model_len=None
    )
    tokenizer = load_tokenizer(path, revision=None, trust_remote_code=False)
    if tokenizer is None:
        return ModelMachine(loaded), lambda shape: random_stream(shape, loaded.vocab_size)
    ids = text_stream(tokenizer)
    return ModelMachine(loaded), lambda shape: ids


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what it leaves out comes from the chosen shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-model", action="store_true", help="the scheduler alone")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "compare_memory")
    parser.add_argument("--shared-tokens", type=_counts, help="one shape for each: 0,3280")
    parser.add_argument("--spread", type=float, help="0 makes all rows equally long")
    for name in WITH_MODEL.keys() - {"shared_tokens", "spread"}:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--step-ms", type=float, default=8.0, help="with --no-model")
    parser.add_argument("--token-us", type=float, default=80.0, help="with --no-model")
    parser.add_argument(
        "model", nargs="?", type=_model_path, metavar="model.path=DIR", help=str(MODEL_DIR)
    )
    options = parser.parse_args(arguments)
    for name, value in (NO_MODEL if options.no_model else WITH_MODEL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def _model_path(text: str) -> str:
    key, _, path = text.partition("=")
    if key != "model.path" or not path:
        raise argparse.ArgumentTypeError(f"{text}: only model.path=DIR is taken")
    return path


if __name__ == "__main__":
    sys.exit(main())
