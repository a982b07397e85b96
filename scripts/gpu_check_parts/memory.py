"""Part 8: the classic experiment: rows at once, tokens a second and TTFT under one KV budget.

A 7B shape with a key/value head for every query head (512 KiB of KV a token) under 24 GB. The
same rows run with a contiguous run of slots for the longest row there could be, in blocks, in
blocks whose prefixes are shared by whole blocks, and as batchgen runs them. Only admission and
the count of memory differ; scripts/compare_memory.py does the same at any size. Rows end after
numbers of tokens that no scheduler knows. All rows are there from the start, so that TTFT
counts the wait for memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from memory_machines import StopAt
from memory_managers import ContiguousManager, WholeBlockManager

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.block_manager import BlockManager
from batchgen.prompts.future import PlannedFuture
from batchgen.runtime.model import LoadedModel
from gpu_check_parts.context import Context
from gpu_check_parts.engines import (
    Row,
    Run,
    Settings,
    blocks_within,
    build_engine,
    lcps,
    make_requests,
    ordered,
    run_requests,
)
from gpu_check_parts.models import llama_config, random_model

BUDGET_BYTES = 24 * 10**9
# Of the budget, what weights and pool may fill, as pool.gpu_memory_utilization has it.
_UTILIZATION = 0.9
_BLOCK_SIZE = 16

VARIANTS = {
    "contiguous": "contiguous, longest",
    "paged": "paged",
    "paged_prefix": "paged, prefix blocks",
    "ours": "batchgen",
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """What all variants have in common.

    Attributes:
        longest_tokens: the slots of a row of unknown length.
        max_tokens: the most that a row may make.
    """

    rows: Sequence[Row]
    settings: Settings
    longest_tokens: int
    max_tokens: int


def run(context: Context) -> None:
    """Run the rows through every variant."""
    with context.attempt("7B shape"):
        loaded = random_model(
            llama_config("7B", context.dry_run),
            context.choose(torch.bfloat16, torch.float32),
            context.device,
            context.seed,
        )
        experiment = _experiment(context, loaded)
        # The first steps of a process are slow, whoever runs them.
        warm_up = replace(experiment, rows=experiment.rows[:4])
        run_variant("paged", loaded, warm_up)
        outputs: dict[str, dict[int, list[int]]] = {}
        for variant in context.in_time(VARIANTS, VARIANTS.__getitem__):
            with context.attempt(VARIANTS[variant]):
                done = run_variant(variant, loaded, experiment)
                outputs[variant] = done.outputs
                _report(context, variant, done)
        _compare(context, experiment.rows, outputs)


def _experiment(context: Context, loaded: LoadedModel) -> Experiment:
    rng = np.random.default_rng(context.seed)
    count, groups, shared, own, max_tokens, longest = context.choose(
        (64, 4, 512, 128, 64, 2048), (8, 2, 32, 12, 6, 96)
    )
    weights = loaded.weight_bytes
    budget = int(_UTILIZATION * BUDGET_BYTES) - weights
    num_blocks = blocks_within(loaded, budget, _BLOCK_SIZE) if not context.dry_run else 14
    prefixes = rng.integers(3, loaded.vocab_size, (groups, shared)).tolist()
    rows = []
    for index in rng.permutation(count).tolist():
        tail = rng.integers(3, loaded.vocab_size, int(rng.integers(own // 2, 2 * own))).tolist()
        output = int(rng.integers(max_tokens // 4, max_tokens + 1))
        rows.append(Row(prefixes[index % groups] + tail, max(1, output)))
    settings = Settings(num_blocks, _BLOCK_SIZE, step_tokens=context.choose(2048, 64))
    return Experiment(rows, settings, longest, max_tokens)


def run_variant(variant: str, loaded: LoadedModel, experiment: Experiment) -> Run:
    """Run all rows through a variant."""
    rows, settings = experiment.rows, experiment.settings
    order = list(range(len(rows)))
    if variant == "ours":
        order = ordered(rows)
        settings = replace(settings, swap_blocks=settings.num_blocks)
    elif variant == "contiguous":
        settings = replace(settings, admission=AdmissionPolicy.PROMPT)
    built = build_engine(
        loaded,
        settings,
        blocks=_manager(variant, experiment, order),
        stop_rules=StopAt(rows),
    )
    requests = make_requests(rows, order, loaded.max_model_len, experiment.max_tokens)
    return run_requests(built, requests, loaded)


def _manager(variant: str, experiment: Experiment, order: Sequence[int]) -> BlockManager:
    rows, settings = experiment.rows, experiment.settings
    size, num_blocks = settings.block_size, settings.num_blocks
    if variant == "ours":
        future = PlannedFuture(np.arange(len(order)), lcps(rows, order))
        return BlockManager(num_blocks, size, future=future)
    if variant == "paged_prefix":
        return WholeBlockManager(num_blocks, size)
    if variant == "paged":
        return BlockManager(num_blocks, size, prefix_caching=False)
    # A row's last block may be partly outside its run, and admission keeps one more.
    behind = 2 * min(settings.max_num_seqs, num_blocks * size // experiment.longest_tokens)
    return ContiguousManager(
        num_blocks + behind,
        size,
        capacity=num_blocks * size,
        run_tokens=lambda request: experiment.longest_tokens,
    )


def _report(context: Context, variant: str, done: Run) -> None:
    started = min(request.timeline.admitted or 0.0 for request in done.requests)
    waits = [1e3 * ((request.timeline.first_token or 0.0) - started) for request in done.requests]
    p50, p99 = np.percentile(waits, (50, 99)).tolist()
    tokens = sum(map(len, done.outputs.values()))
    stats, counters = done.stats, done.counters
    name = VARIANTS[variant]
    context.figure(
        f"{name}: rows at once", stats.peak_running, "rows",
        note=f"mean {stats.row_steps / stats.steps:.1f}, {stats.steps} steps",
    )  # fmt: skip
    context.figure(
        f"{name}: out", tokens / done.seconds, "tokens/s",
        note=f"{len(done.requests)} rows in {done.seconds:.1f} s, "
        f"{counters.prefill_tokens:,} prompt tokens computed",
    )  # fmt: skip
    context.figure(f"{name}: TTFT", p50, "ms", note=f"median; p99 {p99:,.0f} ms")


def _compare(
    context: Context, rows: Sequence[Row], outputs: dict[str, dict[int, list[int]]]
) -> None:
    """Rows must have their lengths; in half precision near-ties may fall either way."""
    first = next(iter(outputs.values()), {})
    wanted = {index: row.output_tokens for index, row in enumerate(rows)}
    for variant, made in outputs.items():
        equal = sum(made.get(row) == tokens for row, tokens in first.items())
        context.check(
            f"{VARIANTS[variant]}: all rows, all tokens",
            {row: len(tokens) for row, tokens in made.items()} == wanted,
            f"{equal} of {len(first)} rows have the tokens of the first variant",
        )
