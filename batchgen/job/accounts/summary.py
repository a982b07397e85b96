"""`_summary.json`: what the run did, what it cost, and what sharing saved.

Totals over the output count the rows of all runs that made it. What the engine counted, the
plan's figures and all times are of the last run alone, and ``engine_figures_cover`` says
for how many of the rows that is: a run that was killed leaves no figures to add.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch

from batchgen.config import Config, OutputOrder
from batchgen.data.output.directory import SUMMARY, OutputDir
from batchgen.data.output.finished import FinishedRows
from batchgen.data.stores.store import Place
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.stats import EngineStats
from batchgen.job.load import LoadedEngine
from batchgen.job.planning import JobPlan
from batchgen.report.hits import HitFigures, PoolFigures, explain, explain_part, lost_tokens
from batchgen.report.machine import nvml_memory, peak_rss_bytes, versions
from batchgen.report.percentiles import Percentiles

_SHARING_FIGURES = (
    "evicted_blocks",
    "lost_tokens",
    "hit_rate",
    "sharing_saves_bytes",
    "sharing",
)
_MEMORY_FIGURES = (
    "pool_bytes",
    "pool_blocks",
    "swap_blocks",
    "block_size",
    "kv_bytes_per_token",
    "weight_bytes",
    "graphs_bytes",
    "peak_memory_bytes",
    "nvml",
    "device",
    "dtype",
)


def is_finished(output: OutputDir, finished: FinishedRows, order: OutputOrder) -> bool:
    """Whether every row was done here, all are still there, and in the order asked for."""
    try:
        summary = json.loads(output.read(SUMMARY))
        rows, has_order = summary["rows"], summary["output_order"]
        # An output with too many failed rows has no _SUCCESS; older summaries have no such key.
        is_complete = output.is_complete or summary.get("is_complete") is True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    is_ordered = order in (OutputOrder.completion, has_order)
    return is_complete and rows == finished.num_rows and is_ordered


def plan_figures(planned: JobPlan) -> dict[str, Any]:
    """Give the plan's figures; they are about the rows of this run."""
    plan = planned.plan
    return {
        "resumed_rows": int(planned.done.sum()),
        "requests": plan.requests,
        "request_tokens": plan.request_tokens,
        "duplicates": plan.num_duplicates,
        "prefill_tokens_floor": plan.prefill_tokens_floor,
        "prefill_tokens_floor_block": plan.prefill_tokens_floor_block,
        "expected_prefill_tokens": plan.expected_prefill_tokens,
    }


def engine_figures(
    loaded: LoadedEngine | None, ttft_ms: Percentiles, generate_s: float
) -> dict[str, Any]:
    """Give what the engine counted in this run; times in seconds unless named otherwise.

    Args:
        loaded: None where no row was left to compute.
        ttft_ms: times to the first token.
        generate_s: the generate phase.
    """
    stats, counters = EngineStats(), SchedulerCounters()
    block_bytes = graph_steps = eager_steps = 0
    swap_s = 0.0
    if loaded is not None:
        scheduler = loaded.engine.scheduler
        stats, counters = loaded.engine.stats, scheduler.counters
        block_bytes = loaded.ledger.bytes_per_block
        swapped = counters.swapped_out_blocks + counters.swapped_in_blocks
        swap_s = swapped * scheduler.costs.swap_s_per_block
        graph_steps, eager_steps = loaded.executor.graph_steps, loaded.executor.eager_steps
    computed = counters.computed_tokens
    sampled = counters.sampled_tokens
    return {
        "most_refused_blocks": counters.most_refused_blocks,
        "prefill_tokens_computed": counters.prefill_tokens,
        "recomputed_tokens": counters.recomputed_tokens,
        "generated_tokens": sampled,
        "forced_tokens": counters.forced_tokens,
        "steps": stats.steps,
        "decode_steps": stats.decode_steps,
        "graph_steps": graph_steps,
        "eager_steps": eager_steps,
        "out_of_memory_passes": stats.out_of_memory,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "scheduler_s": stats.scheduler_s,
        "model_idle_share": _idle_share(stats, generate_s),
        "preemption_s": stats.recompute_s + swap_s,
        "computed_tokens_per_s": computed / generate_s if generate_s else None,
        "generated_tokens_per_s": sampled / generate_s if generate_s else None,
        "ttft_ms": {f"p{percent}": ttft_ms.at(percent) for percent in (50, 90, 99)},
        "mean_running_rows": _ratio(stats.row_steps, stats.steps),
        "peak_running_rows": stats.peak_running,
        "kv_blocks_read": stats.kv_blocks_read,
        "peak_blocks": {
            "owned": stats.peak.owned,
            "cached": stats.peak.cached,
            "free": stats.peak.free,
        },
        "logical_over_physical_blocks": {
            "mean": _ratio(stats.logical_blocks, stats.physical_blocks),
            "peak": stats.peak_sharing or None,
        },
        "preemptions": counters.preemptions,
        "swap_out_bytes": counters.swapped_out_blocks * block_bytes,
        "swap_in_bytes": counters.swapped_in_blocks * block_bytes,
    }


def _idle_share(stats: EngineStats, generate_s: float) -> float | None:
    """Give the part of the generate phase in which the model had nothing to run."""
    busy = stats.prefill_s + stats.decode_s
    return max(0.0, 1 - busy / generate_s) if generate_s else None


def sharing_figures(
    loaded: LoadedEngine | None, planned: JobPlan, config: Config
) -> dict[str, Any]:
    """Say what sharing saved in this run, what it lost and why.

    Only requests that were started count: of one that fails before, no token was computed and
    none was found in the cache. Where there are such, what could have been shared among the
    others is not known, so nothing is said of what was lost.
    """
    plan = planned.plan
    if loaded is None:
        return dict.fromkeys(_SHARING_FIGURES)
    scheduler, stats = loaded.engine.scheduler, loaded.engine.stats
    counters = scheduler.counters
    order, caching = config.schedule.order.value, config.pool.prefix_caching
    ended = counters.finished_requests
    is_whole = ended >= plan.requests and counters.started_requests >= ended
    met = counters.prefill_tokens + counters.cached_tokens
    request_tokens = plan.request_tokens if is_whole else met
    hits = HitFigures(
        request_tokens=request_tokens,
        shareable_tokens=plan.request_tokens - plan.prefill_tokens_floor,
        shared_tokens=request_tokens - counters.prefill_tokens,
        uncopied_tokens=scheduler.blocks.uncopied_tokens,
        evicted_tokens=scheduler.blocks.pool.evicted_needed * config.pool.block_size,
    )
    pool = PoolFigures(
        num_blocks=loaded.ledger.num_blocks,
        peak_demand=stats.peak_demand,
        peak_running=stats.peak_running,
        preemptions=counters.preemptions,
        requests=plan.requests if is_whole else counters.started_requests,
    )
    # What could have been shared is known for the plan's requests, not for some of them.
    lost = lost_tokens(hits, order=order, prefix_caching=caching) if is_whole else None
    lines = (
        explain(hits, pool, order=order, prefix_caching=caching)
        if is_whole
        else explain_part(hits, pool)
    )
    # Blocks that unshared tables would have taken beyond those that were there, on average.
    saved = _ratio(stats.logical_blocks - stats.physical_blocks, stats.steps) or 0.0
    return {
        "evicted_blocks": {
            "needed_later": scheduler.blocks.pool.evicted_needed,
            "not_needed": scheduler.blocks.pool.evicted_unneeded,
        },
        "lost_tokens": lost,
        "hit_rate": _ratio(hits.shared_tokens, hits.request_tokens),
        "sharing_saves_bytes": max(0, round(saved * loaded.ledger.bytes_per_block)),
        "sharing": lines,
    }


def memory_figures(loaded: LoadedEngine | None) -> dict[str, Any]:
    """Give pool sizes and peaks, in bytes; null what there was not, where nothing was loaded."""
    if loaded is None:
        return {**dict.fromkeys(_MEMORY_FIGURES), "peak_memory_bytes": peak_rss_bytes()}
    ledger, device = loaded.ledger, loaded.device
    on_gpu = device.type == "cuda"
    values = (
        ledger.pool_bytes,
        ledger.num_blocks,
        ledger.num_swap_blocks,
        ledger.block_size,
        ledger.bytes_per_token,
        ledger.weights_bytes,
        ledger.graphs_bytes,
        torch.cuda.max_memory_allocated(device) if on_gpu else peak_rss_bytes(),
        nvml_memory(str(torch.cuda.get_device_properties(device).uuid)) if on_gpu else None,
        torch.cuda.get_device_name(device) if on_gpu else "cpu",
        str(loaded.dtype).removeprefix("torch."),
    )
    return dict(zip(_MEMORY_FIGURES, values, strict=True))


def machine_figures() -> dict[str, Any]:
    """Give the versions that the results were made with."""
    return {"versions": versions(), "threads": torch.get_num_threads()}


def closing_lines(summary: dict[str, Any], path: Place, failures: Sequence[str]) -> str:
    """Give the last lines of a run.

    Args:
        summary: what ``_summary.json`` holds.
        path: the output directory.
        failures: what is to be said of the rows that failed.
    """
    failed = sum(summary["errors"].values())
    lines = [
        f"done: {summary['rows']} rows in {path}, {summary['ok']} ok, {failed} failed",
        *failures,
    ]
    covered = summary["engine_figures_cover"]
    if 0 < covered["rows"] < covered["of_rows"]:
        lines.append(
            f"what follows is about this run's {covered['rows']} of {covered['of_rows']} rows"
        )
    if summary["steps"]:
        prefill = f"prefill: {summary['prefill_tokens_computed']:,} tokens computed"
        if summary["lost_tokens"] is not None:
            # The floor is of all requests, so it is no measure for some of them.
            prefill += (
                f"; floor {summary['prefill_tokens_floor_block']:,} by blocks, "
                f"{summary['prefill_tokens_floor']:,} by the token"
            )
        lines.append(prefill)
        lines.append(
            f"generated {summary['generated_tokens']:,} tokens in "
            f"{summary['phases']['generate_s']:.1f} s, the model idle "
            f"{summary['model_idle_share']:.1%} of them; {summary['preemptions']} preemptions"
        )
        lines += summary["sharing"]
    return "\n".join(lines)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
