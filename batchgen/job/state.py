"""The state of a running job: in words for whoever wonders, in figures for its log."""

import time
from typing import Any

from batchgen.data.output.writer import PartWriter
from batchgen.engine.request import Request
from batchgen.job.load import LoadedEngine
from batchgen.job.stream import RequestStream
from batchgen.report.progress import Snapshot

_SHOWN_ROWS = 5


def describe_state(loaded: LoadedEngine, stream: RequestStream, writer: PartWriter) -> str:
    """Say how the scheduler, the pool, the oldest rows and the writer stand."""
    scheduler, stats = loaded.engine.scheduler, loaded.engine.stats
    counters = scheduler.counters
    started = [*scheduler.running, *scheduler.swapped]
    started.sort(key=lambda request: request.timeline.admitted or 0.0)
    return "\n".join(
        [
            f"state after {stats.steps} steps: {scheduler.describe()}",
            f"tokens: {counters.prefill_tokens} of prompts computed, {counters.sampled_tokens} "
            f"generated, {counters.recomputed_tokens} computed again; "
            f"{counters.preemptions} preemptions",
            f"rows: {counters.finished_requests} requests ended; the oldest that run:",
            *(f"  {_row(request, stream)}" for request in started[:_SHOWN_ROWS]),
            f"writer: {writer.num_pending} rows wait for their part, {writer.stats.parts} parts "
            f"are written",
        ]
    )


def step_metrics(loaded: LoadedEngine, snapshot: Snapshot) -> dict[str, Any]:
    """Give a line of ``_metrics.jsonl``; counters are totals since the run's start."""
    scheduler, stats = loaded.engine.scheduler, loaded.engine.stats
    pool = scheduler.blocks.pool
    counters = scheduler.counters
    computed = counters.computed_tokens
    return {
        "steps": stats.steps,
        "rows": snapshot.rows,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "swapped": snapshot.swapped,
        "blocks": {"free": pool.num_free, "cached": pool.num_cached, "owned": pool.num_owned},
        "swap_blocks_used": scheduler.swap_space.num_blocks - scheduler.swap_space.num_free,
        "hit_rate": round(snapshot.hit_rate, 4),
        "computed_tokens": computed,
        "generated_tokens": counters.sampled_tokens,
        "tokens_per_step": round(computed / stats.steps, 1) if stats.steps else 0.0,
        "preemptions": counters.preemptions,
        "evicted_needed": pool.evicted_needed,
        "evicted_unneeded": pool.evicted_unneeded,
    }


def _row(request: Request, stream: RequestStream) -> str:
    admitted = request.timeline.admitted
    age = "" if admitted is None else f", started {time.perf_counter() - admitted:.0f} s ago"
    return (
        f"{stream.name_of(request)}: {request.status}, {request.num_prompt_tokens} prompt tokens, "
        f"{request.num_output_tokens} of {request.params.max_tokens} generated, "
        f"{len(request.block_table)} blocks{age}"
    )
