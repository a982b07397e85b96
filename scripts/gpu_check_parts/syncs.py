"""Part 5: where the host waits for the device in the steady decode loop, by the profiler."""

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

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
    """Count in a window of decode steps in which no row starts or ends."""
    with context.attempt("waits in the decode loop"):
        rows, prompt, warm_up, window = context.choose((64, 128, 24, 32), (4, 16, 2, 4))
        loaded = random_model(
            llama_config("1B", context.dry_run),
            context.choose(torch.bfloat16, torch.float32),
            context.device,
            context.seed,
        )
        rng = np.random.default_rng(context.seed)
        work = [
            Row(rng.integers(3, loaded.vocab_size, prompt).tolist(), warm_up + 2 * window)
            for _ in range(rows)
        ]
        engine = build_engine(
            loaded, Settings(num_blocks=rows * (prompt + 4 * window + warm_up) // 16)
        )
        for request in make_requests(work, range(rows), loaded.max_model_len):
            engine.scheduler.add(request)
        for _ in range(warm_up):
            engine.step()
        activities = [ProfilerActivity.CPU]
        if context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            for _ in range(window):
                with record_function(STEP):
                    engine.step()
            context.synchronize()
        _report(context, profiler, window)


def _report(context: Context, profiler: Any, steps: int) -> None:
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
    waits = {name: counts[name] for name in sorted(WAITS) if counts[name]}
    total = sum(waits.values())
    detail = ", ".join(f"{count} {name}" for name, count in waits.items()) or "none"
    context.check(
        "waits in the decode loop",
        total <= _ALLOWED_WAITS * steps,
        f"{total / steps:.2f} a step, allowed {_ALLOWED_WAITS:.0f} ({detail}, in {steps} steps)",
    )
    launches = sum(counts[name] for name in LAUNCHES) / steps
    context.figure("launches in a decode step", launches, "calls", note="1B shape")
    busy_us = sum(
        event.time_range.elapsed_us()
        for event in events
        if event.device_type == DeviceType.CUDA and event.name != STEP
    )
    context.figure("device's work in a decode step", busy_us / steps, "us", note="1B shape")
