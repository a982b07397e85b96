"""Numbers are written as people read them, and axes have round marks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.report import numbers


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0123, "12.3 ms"),
        (1.0, "1.0 s"),
        (59.96, "60.0 s"),
        (61, "1 min 01 s"),
        (3_700, "1 h 01 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert numbers.duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1536, "1.5 KiB"), (900 << 20, "900 MiB"), (3 << 40, "3 TiB"), (None, "-")],
)
def test_sizes(size: float | None, text: str) -> None:
    assert numbers.size(size) == text


@given(st.floats(1e-9, 1e12))
def test_an_axis_begins_at_zero_has_even_steps_and_reaches_the_largest_value(most: float) -> None:
    marks = numbers.ticks(most)
    assert marks[0] == 0
    assert marks[-2] < most * (1 + 1e-9)
    assert marks[-1] >= most * (1 - 1e-9)
    assert 3 <= len(marks) <= 6


@given(st.floats(1e-3, 1e8))
def test_moments_of_an_axis_ascend_and_stay_inside_it(most_s: float) -> None:
    marks = [at for at, _ in numbers.time_ticks(most_s)]
    assert marks == sorted(set(marks))
    assert 2 <= len(marks) <= 7
    assert marks[0] == 0
    assert marks[-1] <= most_s * (1 + 1e-9)
