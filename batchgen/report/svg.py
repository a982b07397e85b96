"""Small charts as inline SVG: colours come from the page's style, text is text.

Every chart is an image with a title and a description for those who do not see it, and its
lines and areas are named beside it and not told apart by colour alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from batchgen.report.numbers import compact, ticks, time_ticks

WIDTH, HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 10, 28
_INNER_WIDTH = WIDTH - _LEFT - _RIGHT
_INNER_HEIGHT = HEIGHT - _TOP - _BOTTOM
_BASE = HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True)
class Curve:
    """One line, or one layer of an area chart.

    Attributes:
        label: what it is called.
        values: a value for each moment, from 0.
        style: class of the page's style that colours it.
    """

    label: str
    values: Sequence[float]
    style: str


@dataclass(frozen=True, slots=True)
class Bin:
    """A bar of a histogram.

    Attributes:
        label: what stands below it, where there is room.
        value: its height.
        hint: what it says when pointed at.
    """

    label: str
    value: float
    hint: str


def lines(title: str, description: str, times_s: Sequence[float], curves: Sequence[Curve]) -> str:
    """Draw curves over time.

    Args:
        title: what it shows, as a heading would say it.
        description: what can be seen in it, in words.
        times_s: moments in seconds from the left edge, ascending.
        curves: drawn over each other.
    """
    axis = ticks(max((value for curve in curves for value in curve.values), default=0))
    parts = [_y_axis(axis), _x_axis(times_s[-1] if times_s else 0)]
    for curve in curves:
        points = _points(times_s, curve.values, axis[-1])
        parts.append(f'<polyline class="line {curve.style}" points="{points}"/>')
    return _image(title, description, parts)


def layers(title: str, description: str, times_s: Sequence[float], curves: Sequence[Curve]) -> str:
    """Draw layers that stand on each other, the first at the bottom; as :func:`lines`."""
    heights = [0.0] * len(times_s)
    totals = [sum(values) for values in zip(*(curve.values for curve in curves), strict=True)]
    axis = ticks(max(totals, default=0))
    parts = []
    for curve in curves:
        below, heights = heights, [a + b for a, b in zip(heights, curve.values, strict=True)]
        outline = [
            _points(times_s, heights, axis[-1]),
            _points(times_s[::-1], below[::-1], axis[-1], times_s[-1] if times_s else 0),
        ]
        parts.append(f'<polygon class="layer {curve.style}" points="{" ".join(outline)}"/>')
    parts += [_y_axis(axis), _x_axis(times_s[-1] if times_s else 0)]
    return _image(title, description, parts)


def histogram(title: str, description: str, bins: Sequence[Bin], style: str) -> str:
    """Draw bars beside each other, with as many labels as fit."""
    axis = ticks(max((each.value for each in bins), default=0))
    # A few bars stay bars and do not become walls.
    width = _INNER_WIDTH / max(8, len(bins))
    every = max(1, -(-len(bins) // 6))
    parts = [_y_axis(axis)]
    for place, each in enumerate(bins):
        x, height = _LEFT + place * width, each.value / axis[-1] * _INNER_HEIGHT
        if each.value:
            # A single row among many must not vanish.
            height = max(height, 1.0)
        parts.append(
            f'<rect class="{style}" x="{x + 0.5:.1f}" y="{_BASE - height:.1f}" '
            f'width="{max(1, width - 1):.1f}" height="{height:.1f}">'
            f"<title>{escape(each.hint)}</title></rect>"
        )
        if place % every == 0:
            parts.append(_text(x + width / 2, _BASE + 17, "middle", each.label))
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{_BASE}" y2="{_BASE}"/>'
    )
    return _image(title, description, parts)


def _image(title: str, description: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}. '
        f'{escape(description)}">{"".join(parts)}</svg>'
    )


def _points(
    times_s: Sequence[float], values: Sequence[float], top: float, last_s: float | None = None
) -> str:
    last_s = (times_s[-1] if times_s else 0) if last_s is None else last_s
    return " ".join(
        f"{_LEFT + time / (last_s or 1) * _INNER_WIDTH:.1f},"
        f"{_BASE - value / top * _INNER_HEIGHT:.1f}"
        for time, value in zip(times_s, values, strict=True)
    )


def _y_axis(marks: Sequence[float]) -> str:
    parts = []
    for mark in marks:
        y = _BASE - mark / marks[-1] * _INNER_HEIGHT
        kind = "grid" if mark else "axis"
        parts.append(
            f'<line class="{kind}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, "end", compact(mark)))
    return "".join(parts)


def _x_axis(last_s: float) -> str:
    parts = []
    for mark, label in time_ticks(last_s):
        x = _LEFT + mark / (last_s or 1) * _INNER_WIDTH
        anchor = "start" if not mark else "end" if x > WIDTH - _RIGHT - 20 else "middle"
        parts.append(_text(x, _BASE + 17, anchor, label))
    return "".join(parts)


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
