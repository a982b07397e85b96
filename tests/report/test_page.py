"""The page holds the summary's figures, loads nothing, and escapes what comes from rows."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from batchgen.report.content import Content, FailedRow, Group, SampleRow
from batchgen.report.page import render
from batchgen.report.series import Point

VOID = {"meta", "link", "br", "img", "hr", "input"}
HOSTILE = "<script>alert('x')</script><img src=\"http://evil.example/x.png\" onerror=alert(1)>"

LENGTHS = {
    "rows": 40,
    "min": 10,
    "mean": 21.5,
    "p50": 20,
    "p90": 33,
    "p99": 39,
    "max": 39,
    "histogram": [{"from": 10, "to": 29, "rows": 31}, {"from": 30, "to": 49, "rows": 9}],
}
SUMMARY: dict[str, Any] = {
    "outcome": "done",
    "message": "",
    "ended": "2031-05-06T07:08:09+00:00",
    "rows": 43,
    "total_rows": 45,
    "ok": 40,
    "errors": {"null_prompt": 2, "prompt_too_long": 1},
    "finish_reasons": {"stop": 31, "length": 9, "error": 3},
    "prompt_lengths": LENGTHS,
    "output_lengths": LENGTHS,
    "truncation": {
        "prompt_tokens_cut_rows": 7,
        "prompt_tokens_cut": 1_234,
        "max_tokens_cut_rows": 0,
        "max_tokens_cut": 0,
    },
    "engine_figures_cover": {"rows": 43, "of_rows": 43},
    "duplicates": 4,
    "request_tokens": 86_420,
    "prefill_tokens_floor": 8_111,
    "prefill_tokens_floor_block": 9_222,
    "prefill_tokens_computed": 8_333,
    "recomputed_tokens": 77,
    "generated_tokens": 12_345,
    "forced_tokens": 0,
    "steps": 678,
    "prefill_s": 10.0,
    "decode_s": 20.0,
    "scheduler_s": 1.0,
    "model_idle_share": 0.061,
    "preemption_s": 0.25,
    "computed_tokens_per_s": 646.0,
    "generated_tokens_per_s": 387.0,
    "ttft_ms": {"p50": 12.0, "p90": 340.0, "p99": 5_600.0},
    "mean_running_rows": 18.2,
    "peak_running_rows": 14,
    "peak_blocks": {"owned": 300, "cached": 90, "free": 10},
    "logical_over_physical_blocks": {"mean": 3.21, "peak": 4.56},
    "preemptions": 5,
    "swap_out_bytes": 3 << 20,
    "swap_in_bytes": 2 << 20,
    "evicted_blocks": {"needed_later": 6, "not_needed": 789},
    "lost_tokens": {
        "prefix_caching_off": 0,
        "block_borders": 0,
        "order": 0,
        "eviction": 222,
        "same_step": 0,
    },
    "hit_rate": 0.9036,
    "sharing": ["shared 78,087 of 78,309 shareable prompt tokens"],
    "pool_bytes": 400 * 16 * 1000,
    "pool_blocks": 400,
    "swap_blocks": 64,
    "block_size": 16,
    "kv_bytes_per_token": 1000,
    "peak_memory_bytes": 900 << 20,
    "wall_s": 40.0,
    "phases": {"load_s": 3.0, "plan_s": 2.0, "generate_s": 32.0, "write_s": 0.4},
    "versions": {"batchgen": "1.2.3", "torch": "9.9", "triton": None},
}
POINTS = [
    Point(1000.0 + n, 30 * n, 5, 395 - 30 * n, n + 1, 9, 640 * n, 380 * n, 0) for n in range(12)
]
CONTENT = Content(
    title="nightly",
    summary=SUMMARY,
    settings=[("model.path", "/models/m")],
    config="model:\n  path: /models/m\n",
    points=POINTS,
    failed_rows={"null_prompt": [FailedRow("r1", 1, "the prompt is null")]},
    samples=[SampleRow("r2", "… Review: fine.", " positive", "12 prompt tokens")],
    groups=[Group(200, 40, 7_800, "Review:")],
)


class Page(HTMLParser):
    """Checks that tags close as they open; collects elements and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"{self.open} are not closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> opens nowhere"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render(CONTENT))


def test_the_page_is_well_formed_and_needs_nothing_but_itself(page: Page) -> None:
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "base", "form"}
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "srcset", "data", "action", "xlink:href"):
            assert name not in attributes, tag
        assert (attributes.get("href") or "#").startswith("#"), tag
    html = render(CONTENT)
    assert not re.search(r"url\(|@import|https?:", html)
    (policy,) = [each for each in page.all("meta") if "http-equiv" in each]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_every_link_inside_the_page_leads_somewhere_and_no_name_stands_twice(page: Page) -> None:
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for _, attributes in page.elements:
        for reference in ("href", "aria-labelledby"):
            if reference in attributes:
                assert (attributes[reference] or "").removeprefix("#") in names


@pytest.mark.parametrize(
    "shown",
    [
        "40", "of 45", "null_prompt 2, prompt_too_long 1", "90.4%", "8,333", "86,420", "9,222",
        "8,111", "646", "387 of them generated", "75.0%", "300 of 400 blocks", "12 ms", "340 ms",
        "5.6 s", "678", "18.2", "6.1%", "12,345", "3 MiB", "2 MiB", "77", "3.21", "4.56", "222",
        "evicted before it was needed again", "6 that a later row needed", "789",
        "Shared 78,087 of 78,309 shareable prompt tokens", "10 to 39 tokens, 21.5 on average",
        "7 rows lost 1,234 prompt tokens",
        "the prompt is null", "Review: fine.", "7,800", "900 MiB", "torch 9.9", "/models/m",
        "400 blocks of 16 tokens, 6.1 MiB of KV (1,000 bytes a token)",
        "2031-05-06T07:08:09+00:00", "40.0 s",
    ],
)  # fmt: skip
def test_the_figures_are_the_summarys(page: Page, shown: str) -> None:
    assert shown in " ".join(page.text.split())


def test_what_comes_from_rows_files_and_keys_is_text_and_never_markup() -> None:
    hostile = replace(
        CONTENT,
        title=HOSTILE,
        summary={**SUMMARY, "message": HOSTILE, "sharing": [HOSTILE]},
        settings=[(HOSTILE, HOSTILE)],
        config=HOSTILE,
        failed_rows={"null_prompt": [FailedRow(HOSTILE, 1, HOSTILE)]},
        samples=[SampleRow(HOSTILE, HOSTILE, HOSTILE + "\ud800", HOSTILE)],
        groups=[Group(3, 3, 3, HOSTILE)],
    )
    page = Page(render(hostile))
    assert not page.all("script")
    assert not page.all("img")
    assert page.text.count(HOSTILE) == 14


def test_every_chart_says_in_words_what_it_shows(page: Page) -> None:
    charts = page.all("svg")
    assert len(charts) == 5
    for chart in charts:
        assert chart["role"] == "img"
        assert len(chart["aria-label"] or "") > 40
    assert "At the fullest moment rows owned 300 of 400 blocks" in (charts[2]["aria-label"] or "")


def test_the_most_at_once_is_the_engines_count_and_not_that_of_the_moments_drawn() -> None:
    running = " ".join(Page(render(CONTENT)).text.split())
    assert "At most 14 requests ran at once; none had to make room." in running
    # Twelve is the most of the points.
    assert "passes the most by" in running
    calm = [replace(point, running=1, preemptions=1) for point in POINTS]
    summary = {**SUMMARY, "peak_running_rows": 1}
    text = " ".join(Page(render(replace(CONTENT, summary=summary, points=calm))).text.split())
    assert "At most 1 request ran at once; 1 time one had to make room." in text
    assert "passes the most by" not in text


@pytest.mark.parametrize(
    ("ok", "errors", "badge"),
    [
        (43, {}, '<span class="badge good">done</span>'),
        (
            40,
            {"null_prompt": 2, "engine_error": 1},
            '<span class="badge open">done, 3 failed</span>',
        ),
        (0, {"exceeds_kv_capacity": 43}, '<span class="badge bad">done, 43 failed</span>'),
    ],
)
def test_a_run_in_which_rows_failed_has_no_plain_good_badge(
    ok: int, errors: dict[str, int], badge: str
) -> None:
    summary = {**SUMMARY, "ok": ok, "errors": errors}
    html = render(replace(CONTENT, summary=summary, failed_rows={}))
    assert badge in html


def test_a_chart_draws_its_points_where_their_numbers_are() -> None:
    (line,) = re.findall(r'<polyline class="line second" points="([^"]+)"', render(CONTENT))
    places = [tuple(map(float, pair.split(","))) for pair in line.split()]
    assert len(places) == len(POINTS) - 1
    # 380 tokens a second throughout: one height, the whole width.
    assert len({y for _, y in places}) == 1
    assert places[-1][0] == 468.0


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        ("interrupted", "interrupted"),
        ("engine_failed", "the engine failed"),
        ("too_many_row_errors", "too many rows failed"),
        ("unexpected", "failed"),
    ],
)
def test_a_run_that_did_not_end_well_says_so_first(outcome: str, text: str) -> None:
    summary = {**SUMMARY, "outcome": outcome, "message": "stopped by SIGTERM; 2 rows are left"}
    page = Page(render(replace(CONTENT, summary=summary)))
    head = page.text[: page.text.index("Sections") if "Sections" in page.text else 900]
    assert text in head
    assert "2 rows are left" in page.text


def test_a_run_in_which_no_step_ran_has_a_page_without_empty_figures() -> None:
    empty = {"rows": 0, "histogram": []}
    nothing = dict.fromkeys(
        ("hit_rate", "sharing", "lost_tokens", "evicted_blocks", "pool_blocks", "model_idle_share")
    )
    summary = {
        **SUMMARY,
        **nothing,
        "ok": 0,
        "steps": 0,
        "finish_reasons": {},
        "prompt_lengths": empty,
        "output_lengths": empty,
    }
    content = Content("empty", summary, [], "")
    page = Page(render(content))
    assert "No step ran" in page.text
    assert "No row has ended" in page.text
    assert not page.all("svg")


def test_a_resumed_run_says_which_figures_are_of_the_last_run() -> None:
    summary = {**SUMMARY, "engine_figures_cover": {"rows": 13, "of_rows": 43}}
    page = Page(render(replace(CONTENT, summary=summary)))
    assert "the last run, which made 13 of the 43 rows" in " ".join(page.text.split())
