"""The last run's curve out of `_metrics.jsonl`, in as few points as a picture can show."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

MAX_POINTS = 240


@dataclass(frozen=True, slots=True)
class Point:
    """How the engine stood at a moment, or at the fullest moment of a short while.

    Attributes:
        time_s: seconds since the epoch, at the end of the while.
        owned, cached, free: blocks of the pool.
        running, waiting: requests.
        computed_tokens, generated_tokens, preemptions: totals since the run's start.
    """

    time_s: float
    owned: int
    cached: int
    free: int
    running: int
    waiting: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int


def last_run(lines: Iterable[str], max_points: int = MAX_POINTS) -> list[Point]:
    """Read the samples of the last run in the file.

    However many there are, at most ``max_points`` are kept at any time: when there are
    more, neighbours are joined. A joined point has the totals of the later one and the
    pool of the fuller one, so that rates stay exact and no peak is lost.

    Args:
        lines: of ``_metrics.jsonl``; a torn one is passed over.
        max_points: an even number.
    """
    points: list[Point] = []
    stride, pending = 1, 0
    steps = -1
    for sample in _samples(lines):
        point = _point(sample)
        if sample["steps"] < steps:
            # Totals began anew: another run wrote what stands before.
            points, stride, pending = [], 1, 0
        steps = sample["steps"]
        if points and pending:
            points[-1] = _joined(points[-1], point)
        else:
            points.append(point)
        pending = (pending + 1) % stride
        if len(points) == max_points and not pending:
            points = [_joined(*pair) for pair in zip(points[::2], points[1::2], strict=False)]
            stride *= 2
    return points


def _samples(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            sample = json.loads(line)
        except ValueError:
            continue
        if isinstance(sample, dict) and "steps" in sample:
            yield sample


def _point(sample: Mapping[str, Any]) -> Point:
    blocks = sample["blocks"]
    return Point(
        time_s=sample["time"],
        owned=blocks["owned"],
        cached=blocks["cached"],
        free=blocks["free"],
        running=sample["running"],
        waiting=sample["waiting"],
        computed_tokens=sample["computed_tokens"],
        generated_tokens=sample["generated_tokens"],
        preemptions=sample["preemptions"],
    )


def _joined(first: Point, second: Point) -> Point:
    fuller = max(first, second, key=lambda point: point.owned)
    return replace(
        second,
        owned=fuller.owned,
        cached=fuller.cached,
        free=fuller.free,
        running=fuller.running,
        waiting=fuller.waiting,
    )


def rates(points: list[Point], name: str) -> list[float]:
    """Return what a total grew by in a second, from each point to the next; one less of them."""
    values = [(point.time_s, getattr(point, name)) for point in points]
    return [
        max(0.0, (after - before) / (end - start)) if end > start else 0.0
        for (start, before), (end, after) in pairwise(values)
    ]
