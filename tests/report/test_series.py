"""The curve of a run keeps its totals and its peaks, in a bounded number of points."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.report.series import last_run, rates


def sample(step: int, *, owned: int = 0, **changes: Any) -> str:
    line = {
        "time": 100.0 + step,
        "steps": step,
        "rows": step,
        "running": 1,
        "waiting": 0,
        "blocks": {"free": 10_000 - owned, "cached": 0, "owned": owned},
        "computed_tokens": 7 * step,
        "generated_tokens": 3 * step,
        "preemptions": 0,
    }
    return json.dumps(line | changes) + "\n"


@given(owned=st.lists(st.integers(0, 10_000), min_size=1, max_size=500), half=st.integers(1, 20))
def test_thinning_keeps_first_step_last_total_and_fullest_moment(
    owned: Sequence[int], half: int
) -> None:
    lines = [sample(step, owned=blocks) for step, blocks in enumerate(owned, 1)]
    points = last_run(lines, 2 * half)
    assert len(points) <= 2 * half
    assert max(point.owned for point in points) == max(owned)
    assert points[-1].computed_tokens == 7 * len(owned)
    assert [point.time_s for point in points] == sorted({point.time_s for point in points})
    for point in points:
        assert point.owned + point.cached + point.free == 10_000


def test_a_steady_run_has_a_steady_rate_however_it_is_thinned() -> None:
    points = last_run((sample(step) for step in range(1, 10_001)), 50)
    assert rates(points, "computed_tokens") == pytest.approx([7.0] * (len(points) - 1))


def test_only_the_last_run_in_the_file_is_shown_and_torn_lines_are_passed_over() -> None:
    lines = [sample(step) for step in (1, 50, 90)] + ['{"time": 5, "st\n', "[]\n"]
    points = last_run([*lines, sample(2, time=500.0), sample(9, time=507.0)])
    assert [point.time_s for point in points] == [500.0, 507.0]


def test_a_long_file_is_read_line_by_line() -> None:
    held = 0

    def lines() -> Iterator[str]:
        nonlocal held
        for step in range(1, 5_000):
            held = step
            yield sample(step)

    assert len(last_run(lines(), 10)) <= 10
    assert held == 4_999
