"""Timing: warmed up, synchronised, the median of several."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch

Call = Callable[[], object]

# A timed stretch should last this long at least, so that the clock's own steps do not show.
_LEAST_STRETCH_S = 0.002
_MOST_CALLS = 512


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: the median, the least and the most of the timed stretches."""

    median_s: float
    least_s: float
    most_s: float


def time_kernels(
    device: torch.device, calls: Sequence[Call], *, warm_up: int = 3, repeats: int = 9
) -> Timing:
    """Time kernels by the device's own clock, without the host's part in launching them.

    The calls are recorded in a CUDA graph, several times over where they are short, and it is
    the graph's replay that is timed. On a CPU it is the calls themselves.

    Args:
        device: where they run.
        calls: the same work on different tensors: together they should touch more than the
            caches hold.
        warm_up: rounds before anything is timed.
        repeats: timed stretches.
    """
    for _ in range(warm_up):
        for call in calls:
            call()
    if device.type != "cuda":
        return time_host(device, calls, warm_up=0, repeats=repeats)
    once = _stretch(device, calls, rounds=1)
    rounds = max(1, min(int(_LEAST_STRETCH_S / max(once, 1e-7)) + 1, _MOST_CALLS // len(calls)))
    run = _recorded(device, calls, rounds)
    run()
    times = [_event_s(device, run) / (rounds * len(calls)) for _ in range(repeats)]
    return Timing(median(times), min(times), max(times))


def time_host(
    device: torch.device, calls: Sequence[Call], *, warm_up: int = 2, repeats: int = 5
) -> Timing:
    """Time calls from the host's side, until the device has done them."""
    for _ in range(warm_up):
        for call in calls:
            call()
    times = [_stretch(device, calls, rounds=1) / len(calls) for _ in range(repeats)]
    return Timing(median(times), min(times), max(times))


def launch_s(device: torch.device, call: Call, *, calls: int = 50, repeats: int = 5) -> float:
    """Time how long the host is busy with starting a call, whatever the device does."""
    call()
    times = []
    for _ in range(repeats):
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls)
    _synchronize(device)
    return median(times)


def _recorded(device: torch.device, calls: Sequence[Call], rounds: int) -> Call:
    graph = torch.cuda.CUDAGraph()

    def plain() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    # What cannot be captured is timed with its launches.
    with suppress(RuntimeError):
        with torch.cuda.graph(graph):
            plain()
        return graph.replay
    _synchronize(device)
    return plain


def _event_s(device: torch.device, run: Call) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _synchronize(device)
    begin.record()
    run()
    end.record()
    _synchronize(device)
    return begin.elapsed_time(end) / 1e3


def _stretch(device: torch.device, calls: Sequence[Call], rounds: int) -> float:
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(rounds):
        for call in calls:
            call()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
