"""The report's charts, each with what is to be seen in it in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.report.numbers import compact, duration, share
from batchgen.report.series import Point, rates
from batchgen.report.svg import Bin, Curve, histogram, layers, lines

# With fewer points a curve says less than the numbers beside it.
_FEWEST_POINTS = 4


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its words.

    Attributes:
        title: what it shows.
        svg: the chart.
        caption: what to read off it.
        legend: name and style of each curve, where there are several.
    """

    title: str
    svg: str
    caption: str
    legend: Sequence[tuple[str, str]] = ()


def throughput(points: Sequence[Point]) -> Figure | None:
    """Tokens per second over time; None where the run was too short for a curve."""
    if len(points) < _FEWEST_POINTS:
        return None
    times = _times(points)[1:]
    computed, generated = (
        rates(list(points), name) for name in ("computed_tokens", "generated_tokens")
    )
    curves = [
        Curve("computed, prompt and generated", computed, "first"),
        Curve("generated", generated, "second"),
    ]
    half = len(computed) // 2
    early, late = (sum(part) / len(part) for part in (computed[:half], computed[half:]))
    caption = (
        f"Mean of the first half {compact(early)} tokens/s computed, of the second half "
        f"{compact(late)}; of them {compact(max(generated))} generated at most."
    )
    title = "Tokens per second"
    return _figure(title, lines(title, caption, times, curves), caption, curves)


def pool_use(points: Sequence[Point], peak: Mapping[str, int]) -> Figure | None:
    """The pool's blocks by kind over time.

    Args:
        points: the curve, of moments between steps.
        peak: blocks by kind when rows owned most, in whatever step that was.
    """
    if len(points) < _FEWEST_POINTS:
        return None
    curves = [
        Curve("owned by rows", [point.owned for point in points], "owned"),
        Curve("cached, can be hit", [point.cached for point in points], "cached"),
        Curve("free", [point.free for point in points], "free"),
    ]
    total = sum(peak.values())
    caption = (
        f"At the fullest moment rows owned {peak['owned']:,} of {total:,} blocks "
        f"({share(peak['owned'] / total)}), {peak['cached']:,} were cached and "
        f"{peak['free']:,} free. Cached blocks make room whenever a row needs it."
        f"{_missed(peak['owned'] > max(point.owned for point in points))}"
    )
    title = "Blocks of the pool"
    return _figure(title, layers(title, caption, _times(points), curves), caption, curves)


def queues(points: Sequence[Point], peak_running: int) -> Figure | None:
    """Running requests over time.

    Args:
        points: the curve, of moments between steps.
        peak_running: most requests running at once, in whatever step that was.
    """
    if len(points) < _FEWEST_POINTS:
        return None
    running = [float(point.running) for point in points]
    curves = [Curve("running", running, "first")]
    made_room = points[-1].preemptions
    requests = "request" if peak_running == 1 else "requests"
    times = "time" if made_room == 1 else "times"
    caption = (
        f"At most {peak_running:,} {requests} ran at once; "
        + (
            f"{made_room:,} {times} one had to make room."
            if made_room
            else "none had to make room."
        )
        + _missed(peak_running > max(running))
    )
    title = "Requests running"
    return _figure(title, lines(title, caption, _times(points), curves), caption, curves)


def token_lengths(title: str, figures: Mapping[str, Any], style: str) -> Figure | None:
    """How many rows had how many tokens; None without rows."""
    if not figures["rows"]:
        return None
    bins = [
        Bin(f"{each['from']:,}", each["rows"], f"{_range(each)} tokens: {each['rows']:,} rows")
        for each in figures["histogram"]
    ]
    caption = (
        f"{figures['min']:,} to {figures['max']:,} tokens, {figures['mean']:,.1f} on average; "
        f"half of the rows have at most {figures['p50']:,}, 99% at most {figures['p99']:,}."
    )
    return Figure(title, histogram(title, caption, bins, style), caption)


def span(points: Sequence[Point]) -> str:
    """Return how much time the curves cover, and how finely."""
    if len(points) < 2:
        return ""
    covered = points[-1].time_s - points[0].time_s
    return f"{len(points)} points over {duration(covered)}"


def _figure(title: str, svg: str, caption: str, curves: Sequence[Curve]) -> Figure:
    legend = [(curve.label, curve.style) for curve in curves] if len(curves) > 1 else []
    return Figure(title, svg, caption, legend)


def _missed(is_missed: bool) -> str:
    """Return where a curve of moments does not reach the most that the engine counted."""
    return " The curve is of moments between steps and passes the most by." if is_missed else ""


def _times(points: Sequence[Point]) -> list[float]:
    return [point.time_s - points[0].time_s for point in points]


def _range(each: Mapping[str, int]) -> str:
    first, last = each["from"], each["to"]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
