"""Part 6: what a step of the steady decode loop costs the host, by the profiler and a clock.

As a job runs on a GPU, without ``engine.overlap`` and without ``engine.cuda_graphs``: how long
a step takes, where the host waits for the device, and what it launches.
"""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from batchgen.engine.core import EngineCore
from gpu_check_parts.context import Context
from gpu_check_parts.engines import Row, Settings, build_engine, make_requests
from gpu_check_parts.models import llama_config, random_model

# Calls in which the host waits. A copy to pageable memory waits inside itself, and shows as
# a stream's synchronisation too.
WAITS = frozenset({
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy",
})  # fmt: skip
LAUNCHES = frozenset({"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel",
                      "cuLaunchKernelEx", "cudaGraphLaunch"})  # fmt: skip
STEP = "batchgen step"
# The one read of the sampled tokens.
_ALLOWED_WAITS = 1.0


def run(context: Context) -> None:
    """Measure windows of decode steps in which no row starts or ends."""
    rows, prompt, warm_up, window = context.choose((64, 128, 24, 32), (4, 16, 2, 4))
    loaded = random_model(
        llama_config("1B", context.dry_run),
        context.choose(torch.bfloat16, torch.float32),
        context.device,
        context.seed,
    )
    rng = np.random.default_rng(context.seed)
    work = [
        Row(rng.integers(3, loaded.vocab_size, prompt).tolist(), warm_up + 3 * window)
        for _ in range(rows)
    ]
    base = Settings(num_blocks=rows * (prompt + 5 * window + warm_up) // 16)
    for name, settings in (
        ("overlap on", replace(base, overlap=True)),
        ("overlap off", replace(base, overlap=False)),
        ("graphs off", replace(base, overlap=True, cuda_graphs=False)),
    ):
        with context.attempt(name):
            built = build_engine(loaded, settings)
            for request in make_requests(work, range(rows), loaded.max_model_len):
                built.engine.scheduler.add(request)
            for _ in range(warm_up):
                built.engine.step()
            before = built.executor.graph_steps
            _measure(context, name, built.engine, window)
            _check_graphs(context, name, settings, built.executor.graph_steps - before, 2 * window)


def _check_graphs(
    context: Context, name: str, settings: Settings, graph_steps: int, steps: int
) -> None:
    """Every steady decode step runs as a graph, unless none may."""
    expected = steps if settings.cuda_graphs and context.device.type == "cuda" else 0
    detail = f"{graph_steps} of {steps}, expected {expected}"
    context.check(f"steps as graphs, {name}", graph_steps == expected, detail)


def _measure(context: Context, name: str, engine: EngineCore, window: int) -> None:
    context.synchronize()
    started = time.perf_counter()
    for _ in range(window):
        engine.step()
    context.synchronize()
    step_s = (time.perf_counter() - started) / window
    context.figure(f"decode step, {name}", 1e3 * step_s, "ms", note="1B shape")
    activities = [ProfilerActivity.CPU]
    if context.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(window):
            with record_function(STEP):
                engine.step()
        context.synchronize()
    _report(context, name, profiler, window)


def _report(context: Context, name: str, profiler: Any, steps: int) -> None:
    events = list(profiler.events())
    # A step shows twice, as the host's span and as the device's.
    spans = [
        event.time_range
        for event in events
        if event.name == STEP and event.device_type == DeviceType.CPU
    ]
    counts: Counter[str] = Counter(
        event.name
        for event in events
        if any(span.start <= event.time_range.start < span.end for span in spans)
    )
    waits = {call: counts[call] for call in sorted(WAITS) if counts[call]}
    total = sum(waits.values())
    detail = ", ".join(f"{count} {call}" for call, count in waits.items()) or "none"
    context.check(
        f"waits in the decode loop, {name}",
        total <= _ALLOWED_WAITS * steps,
        f"{total / steps:.2f} a step, allowed {_ALLOWED_WAITS:.0f} ({detail}, in {steps} steps)",
    )
    launches = sum(counts[call] for call in LAUNCHES) / steps
    context.figure(f"launches in a decode step, {name}", launches, "calls", note="1B shape")
    busy_us = sum(
        event.time_range.elapsed_us()
        for event in events
        if event.device_type == DeviceType.CUDA and event.name != STEP
    )
    context.figure(
        f"device's work in a decode step, {name}", busy_us / steps, "us", note="1B shape"
    )
