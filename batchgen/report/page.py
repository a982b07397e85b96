"""`_report.html`: one page that needs nothing but itself.

The page has no script, loads nothing, and says so in its own content policy. Whatever comes
from rows, files or keys is escaped.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template, select_autoescape

from batchgen.report import figures, numbers
from batchgen.report.content import Content

_OUTCOMES = {
    "done": ("done", "good"),
    "too_many_row_errors": ("too many rows failed", "bad"),
    "engine_failed": ("the engine failed", "bad"),
    "interrupted": ("interrupted", "open"),
    "unexpected": ("failed", "bad"),
}
_CAUSES = {
    "prefix_caching_off": "prefix caching is off",
    "block_borders": "no room for the copy behind a block's border",
    "order": "the order of the rows",
    "eviction": "evicted before it was needed again",
    "same_step": "begun in one step with the rows that have them",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a table with a bar in it.

    Attributes:
        label: what it is.
        value: how it is written.
        part: length of the bar, 0 to 1.
        is_inner: it is part of the row above it.
    """

    label: str
    value: str
    part: float
    is_inner: bool = False


@dataclass(frozen=True, slots=True)
class Card:
    """A figure that is seen first.

    Attributes:
        label: what it is.
        value: how it is written.
        note: what to see it beside.
    """

    label: str
    value: str
    note: str


def render(content: Content) -> str:
    """Return the page as HTML."""
    summary = content.summary
    points = content.points
    drawn = {
        "throughput": figures.throughput(points),
        "pool": figures.pool_use(points, summary["peak_blocks"]),
        "queues": figures.queues(points, summary["peak_running_rows"]),
        "prompts": figures.token_lengths("Prompt tokens", summary["prompt_lengths"], "first"),
        "outputs": figures.token_lengths("Generated tokens", summary["output_lengths"], "second"),
    }
    text, style = _outcome(summary)
    page = page_template().render(
        content=content,
        summary=summary,
        style=_file("page.css"),
        outcome=text,
        outcome_style=style,
        cards=_cards(summary),
        figures={name: figure for name, figure in drawn.items() if figure is not None},
        span=figures.span(points),
        times=_times(summary),
        prefill=_prefill(summary),
        lost=_lost(summary),
        peak=_peak(summary),
        failed_rows=sorted(
            content.failed_rows.items(), key=lambda kind: -summary["errors"].get(kind[0], 0)
        ),
    )
    # Half a surrogate pair in a row's text has no UTF-8.
    return page.encode(errors="replace").decode()


@functools.cache
def page_template() -> Template:
    """Return the compiled page, which is a fifth of a second's work the first time."""
    environment = Environment(
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "sentence": lambda text: text[:1].upper() + text[1:],
        "count": numbers.count,
        "share": numbers.share,
        "size": numbers.size,
        "duration": numbers.duration,
        "milliseconds": lambda value: numbers.duration(None if value is None else value / 1000),
    }
    return environment.from_string(_file("page.html.j2"))


def _file(name: str) -> str:
    return (resources.files("batchgen.report") / name).read_text("utf-8")


def _outcome(summary: Mapping[str, Any]) -> tuple[str, str]:
    """Return the run's end in a few words, and how good it is."""
    text, style = _OUTCOMES[summary["outcome"]]
    failed = sum(summary["errors"].values())
    if style != "good" or not failed:
        return text, style
    return f"{text}, {failed:,} failed", "open" if summary["ok"] else "bad"


def _cards(summary: Mapping[str, Any]) -> list[Card]:
    failed = sum(summary["errors"].values())
    cards = [
        Card("rows answered", numbers.count(summary["ok"]), f"of {summary['total_rows']:,}"),
        Card("rows failed", numbers.count(failed), _kinds(summary["errors"])),
    ]
    if not summary["steps"]:
        return cards
    peak, total = summary["peak_blocks"]["owned"], summary["pool_blocks"]
    return [
        *cards,
        Card(
            "prompt tokens shared",
            numbers.share(summary["hit_rate"]),
            f"{summary['prefill_tokens_computed']:,} tokens were computed",
        ),
        Card(
            "tokens per second",
            numbers.count(summary["computed_tokens_per_s"]),
            f"{numbers.count(summary['generated_tokens_per_s'])} of them generated",
        ),
        Card(
            "pool at its fullest",
            numbers.share(peak / total),
            f"{peak:,} of {total:,} blocks owned by rows",
        ),
        Card(
            "preemptions",
            numbers.count(summary["preemptions"]),
            f"{numbers.duration(summary['preemption_s'])} spent on them"
            if summary["preemptions"]
            else "no row had to make room",
        ),
    ]


def _kinds(errors: Mapping[str, int]) -> str:
    found = sorted(errors.items(), key=lambda kind: -kind[1])
    return ", ".join(f"{kind} {number:,}" for kind, number in found) or "none"


def _times(summary: Mapping[str, Any]) -> list[Bar]:
    """Where the time went: phases, and the generate phase by what it did."""
    phases, wall_s = summary["phases"], summary["wall_s"] or 1

    def bar(label: str, seconds: float, *, is_inner: bool = False) -> Bar:
        return Bar(label, numbers.duration(seconds), min(1.0, seconds / wall_s), is_inner)

    generate_s = phases["generate_s"]
    known = {
        "model, prompts": summary["prefill_s"],
        "model, generated tokens": summary["decode_s"],
        "scheduling, while the model waits": summary["scheduler_s"],
    }
    inner = [bar(label, seconds, is_inner=True) for label, seconds in known.items()]
    rest = max(0.0, generate_s - sum(known.values()))
    return [
        bar("plan: read, render, tokenise, order", phases["plan_s"]),
        bar("load: the model and the pool", phases["load_s"]),
        bar("generate", generate_s),
        *(inner if generate_s else []),
        *([bar("the rest: text, rows, progress", rest, is_inner=True)] if generate_s else []),
        bar("write: parts, beside the rest", phases["write_s"]),
    ]


def _prefill(summary: Mapping[str, Any]) -> list[Bar]:
    """Prompt tokens: all, computed, and the least that could have been.

    Of a run that did not begin all requests nothing: what it computed is of some, the others
    of all.
    """
    if summary["lost_tokens"] is None:
        return []
    total = summary["request_tokens"]
    rows = {
        "without any sharing": total,
        "computed": summary["prefill_tokens_computed"],
        "floor, sharing whole blocks": summary["prefill_tokens_floor_block"],
        "floor, sharing by the token": summary["prefill_tokens_floor"],
    }
    return [
        Bar(label, numbers.count(tokens), min(1.0, tokens / total) if total else 0.0)
        for label, tokens in rows.items()
    ]


def _lost(summary: Mapping[str, Any]) -> list[tuple[str, int]]:
    causes = summary["lost_tokens"] or {}
    return [(_CAUSES[cause], tokens) for cause, tokens in causes.items() if tokens]


def _peak(summary: Mapping[str, Any]) -> list[Bar]:
    peak, total = summary["peak_blocks"], summary["pool_blocks"] or 1
    return [Bar(kind, numbers.count(peak[kind]), peak[kind] / total) for kind in peak]
