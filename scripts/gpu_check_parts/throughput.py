"""Part 7: rows and tokens a second on random weights of 1B and 8B, feature by feature.

Each engine runs a few rows to warm up, then as many as its time holds: rates are compared, not
times. transformers' continuous batching runs the same kind of rows on the same weights.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from kernel_roofline import Layer
from transformers import ContinuousBatchingConfig, GenerationConfig

from batchgen.runtime.memory import GIB
from batchgen.runtime.model import LoadedModel
from batchgen.runtime.shared_prefixes import SharedPrefix
from gpu_check_parts.context import Context
from gpu_check_parts.engines import (
    Row,
    Settings,
    blocks_within,
    lcps,
    ordered,
    run_rows,
)
from gpu_check_parts.machine import measured_card
from gpu_check_parts.models import llama_config, random_model
from gpu_check_parts.prediction import Model, Work, bound
from gpu_check_parts.workloads import WORKLOADS

_MODELS = ("1B", "8B")
# What the card is left with beside weights and pool.
_SPARE_GIB = 12


@dataclass(frozen=True, slots=True)
class Ablation:
    """One feature taken away, and the workloads on which that can show."""

    name: str
    change: Callable[[Settings], Settings]
    in_order: bool = False
    workloads: tuple[str, ...] = ("few_shot",)


ABLATIONS = (
    Ablation("batchgen", lambda settings: settings, workloads=tuple(WORKLOADS)),
    Ablation(
        "no prefix cache",
        lambda settings: replace(settings, prefix_caching=False),
        workloads=("few_shot", "unshared"),
    ),
    Ablation("no cascade", lambda settings: replace(settings, sharing=SharedPrefix.OFF)),
    Ablation("input order", lambda settings: settings, in_order=True),
    Ablation(
        "no CUDA graphs",
        lambda settings: replace(settings, cuda_graphs=False),
        workloads=("sharegpt",),
    ),
)
CONTINUOUS = "transformers continuous"
_CONTINUOUS_WORKLOADS = ("few_shot", "sharegpt")


@dataclass(frozen=True, slots=True)
class Trial:
    """One engine on one workload; without an ablation it is transformers' own."""

    workload: str
    ablation: Ablation | None

    def label(self, model: str) -> str:
        """Name it."""
        return f"{model}, {self.workload}, {self.ablation.name if self.ablation else CONTINUOUS}"


def trials() -> list[Trial]:
    """All of them. transformers' stand last: they change the model's attention."""
    ours = [
        Trial(workload, each)
        for workload in WORKLOADS
        for each in ABLATIONS
        if workload in each.workloads
    ]
    return ours + [Trial(workload, None) for workload in _CONTINUOUS_WORKLOADS]


def run(context: Context) -> None:
    """Measure both models, all workloads."""
    # Before a pool takes the memory that measuring needs.
    measured_card(context.device, context.dry_run)
    for at, name in enumerate(_MODELS):
        with context.attempt(f"{name} shape"):
            loaded = random_model(
                llama_config(name, context.dry_run),
                context.choose(torch.bfloat16, torch.float32),
                context.device,
                context.seed,
            )
            _measure_model(context, name, loaded, context.seconds_left / (len(_MODELS) - at))


def _measure_model(context: Context, name: str, loaded: LoadedModel, seconds: float) -> None:
    settings, every = _settings(context, loaded), trials()
    # A third goes into warming up.
    slice_s = context.choose(seconds / len(every) / 1.5, 0.05)
    for trial in context.in_time(every, lambda trial: trial.label(name)):
        with context.attempt(trial.label(name)):
            sample = Sampler(context, trial.workload, loaded.vocab_size)
            label, ablation = trial.label(name), trial.ablation
            if ablation is None:
                _measure_continuous(context, label, loaded, sample, slice_s)
            else:
                _measure_ours(context, label, loaded, ablation, settings, sample, slice_s)


class Sampler:
    """Draws rows of a workload, the same for every engine."""

    def __init__(self, context: Context, workload: str, vocab_size: int) -> None:
        self._workload = WORKLOADS[workload]
        self._vocab_size = vocab_size
        self._scale = context.choose(1.0, 0.03)
        self._most = context.choose(self._workload.most_rows, 6)
        self._few = context.choose(64, 3)
        self._seed = context.seed

    def warm_up(self) -> list[Row]:
        """Draw a few rows of short outputs, other ones than those that are timed."""
        rows = self._draw(self._few, self._seed + 1)
        return [replace(row, output_tokens=min(row.output_tokens, 16)) for row in rows]

    def fitting(self, seconds: float, rate: float) -> list[Row]:
        """Draw as many rows as a time holds, given the rate of a few, which grows with more."""
        wanted = math.ceil(1.5 * seconds * rate)
        return self._draw(min(self._most, max(self._few, wanted)), self._seed)

    def _draw(self, count: int, seed: int) -> list[Row]:
        rng = np.random.default_rng(seed)
        return self._workload.make(rng, count, self._vocab_size, self._scale)


def _settings(context: Context, loaded: LoadedModel) -> Settings:
    if context.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(context.device)
        return Settings(blocks_within(loaded, free - _SPARE_GIB * GIB, 16), max_num_seqs=1024)
    return Settings(256, max_num_seqs=16, step_tokens=128)


def _measure_ours(
    context: Context,
    label: str,
    loaded: LoadedModel,
    ablation: Ablation,
    settings: Settings,
    sample: Sampler,
    slice_s: float,
) -> None:
    changed = ablation.change(settings)
    few = sample.warm_up()
    # Twice: the first run compiles.
    for _ in range(2):
        warm = run_rows(loaded, changed, few, in_order=ablation.in_order)
    rows = sample.fitting(slice_s, len(few) / warm.seconds)
    done = run_rows(loaded, changed, rows, in_order=ablation.in_order)
    stats, counters = done.stats, done.counters
    work = job_work(rows, stats.steps, changed.max_num_seqs)
    least = bound(_sizes(loaded), work, measured_card(context.device, context.dry_run))
    output_tokens = sum(map(len, done.outputs.values()))
    note = (
        f"{output_tokens / done.seconds:,.0f} tokens/s out, {len(rows):,} rows in "
        f"{done.seconds:.1f} s, {stats.steps} steps of {stats.row_steps / stats.steps:.0f} rows, "
        f"{counters.prefill_tokens / work.prefill_tokens:.2f} x the floor's prefill, host "
        f"{stats.scheduler_s / done.seconds:.0%}"
    )
    context.figure(label, len(rows) / done.seconds, "rows/s", len(rows) / least.seconds, note)


def job_work(rows: Sequence[Row], steps: int, rows_at_once: int) -> Work:
    """Count what rows must cost where every shared prompt token is computed once.

    Keys that a row shares are counted as read once for every ``rows_at_once`` rows: what the
    cascade makes of them.
    """
    order = ordered(rows)
    prefill = pairs = kv_read = 0.0
    for index, shared in zip(order, lcps(rows, order).tolist(), strict=True):
        length, made = len(rows[index].prompt), rows[index].output_tokens - 1
        end = length + made
        prefill += length - shared
        # A token sees itself and all before it.
        pairs += (end * (end + 1) - shared * (shared + 1)) / 2
        kv_read += made * (length - shared + (made + 1) / 2 + shared / rows_at_once)
    outputs = sum(row.output_tokens for row in rows)
    return Work(prefill, outputs, outputs - len(rows), pairs, kv_read, steps)


def _sizes(loaded: LoadedModel) -> Model:
    config = loaded.model.config
    layer = Layer(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim
    )
    return Model(
        config.num_hidden_layers, config.hidden_size, config.intermediate_size,
        config.vocab_size, layer,
    )  # fmt: skip


def _measure_continuous(
    context: Context, label: str, loaded: LoadedModel, sample: Sampler, slice_s: float
) -> None:
    model: Any = loaded.model
    model.set_attn_implementation("sdpa")
    few = sample.warm_up()
    no_end = GenerationConfig(do_sample=False, eos_token_id=-1)
    with model.continuous_batching_context_manager(
        generation_config=no_end, continuous_batching_config=_continuous_settings(context)
    ) as manager:
        for start in (0, 1):
            warm_s = _run_continuous(manager, few, f"warm{start}", context.seconds_left)
        rows = sample.fitting(slice_s, len(few) / warm_s)
        seconds = _run_continuous(manager, rows, "timed", context.seconds_left)
    outputs = sum(row.output_tokens for row in rows)
    note = f"{outputs / seconds:,.0f} tokens/s out, {len(rows):,} rows in {seconds:.1f} s"
    context.figure(label, len(rows) / seconds, "rows/s", note=note)


def _continuous_settings(context: Context) -> ContinuousBatchingConfig:
    if context.device.type == "cuda":
        return ContinuousBatchingConfig()
    # Called block_size up to transformers 5.17.
    names = signature(ContinuousBatchingConfig).parameters
    block_tokens: dict[str, Any] = {"page_size" if "page_size" in names else "block_size": 16}
    return ContinuousBatchingConfig(
        **block_tokens, num_blocks=256, max_batch_tokens=128, max_requests_per_batch=16,
        use_cuda_graph=False, use_async_batching=False,
    )  # fmt: skip


def _run_continuous(manager: Any, rows: Sequence[Row], label: str, patience_s: float) -> float:
    """Run rows; return the seconds.

    Raises:
        RuntimeError: its thread ended, or it took too long.
    """
    started = time.perf_counter()
    for number, row in enumerate(rows):
        manager.add_request(
            list(row.prompt), request_id=f"{label}-{number}", max_new_tokens=row.output_tokens
        )
    missing = len(rows)
    while missing:
        result = manager.get_result(timeout=1)
        if result is not None:
            missing -= result.is_finished()
        elif not manager.is_running():
            raise RuntimeError("transformers' continuous batching ended too early")
        if time.perf_counter() - started > max(20.0, patience_s):
            raise RuntimeError(f"{missing} of {len(rows)} rows were not done in time")
    return time.perf_counter() - started
