"""What ``mode=plan`` shows beyond the plan that every run makes: memory, time, alternatives."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from batchgen.config import Config, FieldOrder
from batchgen.data.output.directory import OutputDir
from batchgen.engine.block_manager import Window
from batchgen.job.dry_run.speeds import Setting, Speed, SpeedBook, Work, digest, estimate
from batchgen.job.inputs import JobInputs
from batchgen.job.load import LoadedEngine, step_token_budget
from batchgen.job.planning import JobPlan, find_advice, plan_job
from batchgen.prompts.diagnostics import PlanDiagnostics
from batchgen.prompts.findings import (
    MergedEnd,
    failing_rows,
    find_merged_end,
    group_texts,
    repeated_rows,
)
from batchgen.prompts.plan import Plan
from batchgen.prompts.planner import input_order_tokens
from batchgen.runtime.cpu.threads import use_threads
from batchgen.runtime.kv_cache import LayerGeometry, window_of_all
from batchgen.runtime.memory import Ledger
from batchgen.runtime.model import resolve_device


@dataclass(frozen=True, slots=True)
class FieldOrderCost:
    """The prompts of a job with its fields in some order.

    Attributes:
        field_order: the value of ``prompt.field_order``.
        request_tokens: prompt tokens of all requests.
        prefill_tokens: of them, what has to be computed.
        hit_share: of them, what is shared.
    """

    field_order: str
    request_tokens: int
    prefill_tokens: int
    hit_share: float

    @classmethod
    def of(cls, order: FieldOrder, plan: Plan) -> "FieldOrderCost":
        """Take the figures of a plan."""
        total, floor = plan.request_tokens, plan.prefill_tokens_floor
        return cls(order.value, total, floor, 1 - floor / total if total else 0.0)


def other_field_orders(config: Config, output: OutputDir) -> list[FieldOrderCost]:
    """Plan the job with its fields in each order but its own; nothing where it lists none."""
    if not config.prompt.fields:
        return []
    costs = []
    for order in FieldOrder:
        if order is config.prompt.field_order:
            continue
        changed = replace(config, prompt=replace(config.prompt, field_order=order))
        planned = plan_job(changed, JobInputs.open(changed), output, None)
        costs.append(FieldOrderCost.of(order, planned.plan))
        planned.store.close()
    return costs


_REPEATED_SHOWN = 5
_EDGE_ROWS = 64


def diagnose(inputs: JobInputs, planned: JobPlan) -> PlanDiagnostics:
    """Measure what only a person who plans a job wants to know."""
    plan, store, tokenizer = planned.plan, planned.store, inputs.tokenizer
    unsorted = input_order_tokens(
        plan, store, inputs.sampling, inputs.limits.max_model_len, inputs.requests_of
    )
    texts = [] if tokenizer is None else group_texts(plan, store, tokenizer)
    return PlanDiagnostics.of(plan, unsorted, texts, find_advice(inputs, planned))


def outlook(
    config: Config,
    inputs: JobInputs,
    planned: JobPlan,
    diagnostics: PlanDiagnostics,
    layers: list[LayerGeometry] | None,
    ledger: Ledger | None,
    dtype: torch.dtype,
    field_orders: Sequence[FieldOrderCost],
) -> dict[str, Any]:
    """Collect what goes into ``_plan.json`` beside the plan's own figures.

    Args:
        diagnostics: of the plan.
        layers: the model's; None where only a loaded model can say them.
        ledger: the memory's arithmetic; None where only a loaded model can say it.
        dtype: of weights and KV.
        field_orders: the job with its fields in other orders.
    """
    plan, store = planned.plan, planned.store
    memory = None if ledger is None else _memory(config, planned, ledger)
    rows = plan.requests if memory is None else memory["rows_at_once"]
    speeds = SpeedBook().of(job_setting(config, inputs, dtype))
    told = estimate(_work(config, inputs, planned, rows), speeds)
    end = _merged_end(inputs, planned)
    pool_tokens = _refused_from(config, layers, ledger) if layers and ledger else None
    return {
        "memory": memory,
        "time": None if told is None else asdict(told),
        "alternatives": _alternatives(
            config, inputs, planned, diagnostics, speeds, rows, field_orders
        ),
        "field_orders": _field_orders(config, planned, field_orders),
        "failing": [each.to_json(store) for each in failing_rows(store, pool_tokens=pool_tokens)],
        "repeated": repeated_rows(plan.duplicates, store, inputs.tokenizer, _REPEATED_SHOWN),
        "merged_end": end and end.to_json(),
        "notes": [end.describe()] if end is not None else [],
    }


def _refused_from(config: Config, layers: list[LayerGeometry], ledger: Ledger) -> int | None:
    """Return the prompt tokens from which a row does not fit the pool; None where any does.

    Where every layer has a window a row never holds more than that and what a step computes.
    """
    num_tokens = window_of_all(layers)
    if num_tokens is not None:
        device = resolve_device(config.model.device)
        window = Window(num_tokens, step_token_budget(config, device.type))
        if window.most_blocks(ledger.block_size) <= ledger.num_blocks:
            return None
    return ledger.pool_tokens


def job_setting(config: Config, inputs: JobInputs, dtype: torch.dtype) -> Setting:
    """Name what the job's speed depends on."""
    device = resolve_device(config.model.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return Setting.of(
        inputs.model_config,
        device=device.type,
        gpu=gpu,
        threads=use_threads(config.engine.threads),
        dtype=str(dtype).removeprefix("torch."),
        attention=config.engine.attention.value,
    )


def job_digest(config: Config, inputs: JobInputs) -> str:
    """Name what the length of the job's outputs depends on, its rows aside."""
    return digest([asdict(config.prompt), asdict(inputs.sampling)])


def remember_speed(
    config: Config, inputs: JobInputs, loaded: LoadedEngine, generate_s: float, allowed: int
) -> None:
    """Store how fast a run was.

    Args:
        loaded: the engine that has run.
        generate_s: its generate phase.
        allowed: tokens that the run's requests could have generated.
    """
    stats, counters = loaded.engine.stats, loaded.engine.scheduler.counters
    speed = Speed(
        job=job_digest(config, inputs),
        prefill_tokens=counters.prefill_tokens,
        prefill_s=stats.prefill_s,
        decode_tokens=counters.decode_tokens,
        decode_s=stats.decode_s,
        overhead_s=max(0.0, generate_s - stats.prefill_s - stats.decode_s),
        rows=stats.row_steps / max(1, stats.steps),
        output_share=min(1.0, counters.sampled_tokens / allowed) if allowed else 1.0,
    )
    SpeedBook().add(job_setting(config, inputs, loaded.dtype), speed)


def _memory(config: Config, planned: JobPlan, ledger: Ledger) -> dict[str, Any]:
    """Return what the pool holds and what the job would like it to hold."""
    plan = planned.plan
    size = ledger.block_size
    shared = plan.longest_shared_tokens // size if config.pool.prefix_caching else 0
    own_tokens = plan.own_tokens_p95 if config.pool.prefix_caching else plan.request_tokens_p95
    # A row's own part begins inside a block.
    own = -(-(own_tokens + size - 1) // size) if own_tokens else 1
    fitting = max(0, (ledger.num_blocks - shared) // own)
    most = min(config.engine.max_num_seqs, max(1, plan.requests))
    needed = shared + most * own
    return {
        "kv_bytes_per_token": ledger.bytes_per_token,
        "block_size": size,
        "num_blocks": ledger.num_blocks,
        "pool_bytes": ledger.pool_bytes,
        "rows_at_once_unshared": {
            "p50": ledger.concurrency(max(1, plan.request_tokens_p50)),
            "p95": ledger.concurrency(max(1, plan.request_tokens_p95)),
        },
        "rows_at_once": min(most, fitting),
        "rows_wanted": most,
        "blocks_wanted": needed,
        "bytes_wanted": needed * ledger.bytes_per_block,
        "bytes_of_all_prefixes": plan.prefill_tokens_floor * ledger.bytes_per_token,
    }


def _work(
    config: Config, inputs: JobInputs, planned: JobPlan, rows: int, prefill: int | None = None
) -> Work:
    plan, sampling = planned.plan, inputs.sampling
    most = plan.max_output_tokens
    each = sampling.max_tokens if sampling.ignore_eos else max(1, sampling.min_tokens)
    return Work(
        job=job_digest(config, inputs),
        prefill_tokens=plan.expected_prefill_tokens if prefill is None else prefill,
        requests=plan.requests,
        least_output_tokens=min(most, each * plan.requests),
        most_output_tokens=most,
        rows=rows,
    )


def _alternatives(
    config: Config,
    inputs: JobInputs,
    planned: JobPlan,
    diagnostics: PlanDiagnostics,
    speeds: list[Speed],
    rows: int,
    field_orders: Sequence[FieldOrderCost],
) -> list[dict[str, Any]]:
    """Return the prefill of other ways to run the job: at least, at most, and in seconds."""
    plan = planned.plan
    floor, whole = plan.prefill_tokens_floor, plan.request_tokens
    caching, order = config.pool.prefix_caching, config.schedule.order.value
    ways: list[tuple[str, int, int]] = [
        ("as planned", plan.expected_prefill_tokens, plan.expected_prefill_tokens)
    ]
    if caching:
        ways.append(("pool.prefix_caching=false", whole, whole))
    else:
        ways.append(("pool.prefix_caching=true", floor, floor))
    if order == "prefix":
        ways.append(("schedule.order=input", floor, diagnostics.input_order_tokens))
    else:
        ways.append(("schedule.order=prefix", floor, floor))
    if diagnostics.advice is not None:
        saved = max(0, floor - diagnostics.advice.saved_tokens_per_row * plan.requests)
        columns = ", ".join(diagnostics.advice.columns)
        ways.append((f"template with {columns} at its end", saved, saved))
    if caching:
        ways += [
            (f"prompt.field_order={each.field_order}", each.prefill_tokens, each.prefill_tokens)
            for each in field_orders
        ]
    return [
        {"change": name, "prefill_tokens_low": low, "prefill_tokens_high": high}
        | _prefill_seconds(config, inputs, planned, speeds, rows, low, high)
        for name, low, high in ways
    ]


def _prefill_seconds(
    config: Config,
    inputs: JobInputs,
    planned: JobPlan,
    speeds: list[Speed],
    rows: int,
    low: int,
    high: int,
) -> dict[str, float | None]:
    least, most = (
        estimate(_work(config, inputs, planned, rows, tokens), speeds) for tokens in (low, high)
    )
    return {
        "prefill_s_low": None if least is None else least.prefill_low_s,
        "prefill_s_high": None if most is None else most.prefill_high_s,
    }


def _field_orders(
    config: Config, planned: JobPlan, others: Sequence[FieldOrderCost]
) -> list[dict[str, Any]]:
    """Return what every order shares, the job's own among them; nothing where it lists none."""
    if not others:
        return []
    own = FieldOrderCost.of(config.prompt.field_order, planned.plan)
    costs = {each.field_order: each for each in (own, *others)}
    return [asdict(costs[order.value]) for order in FieldOrder]


def _merged_end(inputs: JobInputs, planned: JobPlan) -> MergedEnd | None:
    """Look whether the template's beginning ends inside a token, in the first rows."""
    head = inputs.renderer.shared_head()
    if not head:
        return None
    store = planned.store
    rows = [store.ids(row) for row in store.good_rows[:_EDGE_ROWS].tolist()]
    is_chat = inputs.renderer.format == "chat"
    return find_merged_end(head, rows, inputs.tokenizer, is_chat=is_chat)
