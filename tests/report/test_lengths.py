"""Lengths are counted exactly, however many rows there are."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.report.lengths import Lengths

BATCHES = st.lists(st.lists(st.integers(0, 3000), max_size=40), min_size=1, max_size=5)


def lengths_of(batches: list[list[int]]) -> Lengths:
    lengths = Lengths()
    for batch in batches:
        lengths.add(np.array(batch, np.int32))
    return lengths


@given(BATCHES)
def test_the_figures_are_numpys_over_all_batches(batches: list[list[int]]) -> None:
    values = np.array([value for batch in batches for value in batch])
    figures = lengths_of(batches).figures()
    assert figures["rows"] == len(values)
    if not len(values):
        return
    assert (figures["min"], figures["max"]) == (values.min(), values.max())
    assert figures["mean"] == pytest.approx(values.mean())
    for percent in (50, 90, 99):
        expected = np.percentile(values, percent, method="inverted_cdf")
        assert figures[f"p{percent}"] == expected


@given(BATCHES)
def test_the_bins_of_the_histogram_touch_and_hold_every_row_once(batches: list[list[int]]) -> None:
    values = np.array([value for batch in batches for value in batch], np.int64)
    bins = lengths_of(batches).figures()["histogram"]
    assert len(bins) <= 26
    for before, after in pairwise(bins):
        assert after["from"] == before["to"] + 1
    for each in bins:
        inside = (values >= each["from"]) & (values <= each["to"])
        assert each["rows"] == inside.sum()
    assert sum(each["rows"] for each in bins) == len(values)


def test_memory_is_bounded_by_the_longest_row_and_not_by_the_rows() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.add(np.full(50_000, 700))
    assert lengths.figures()["rows"] == 10_000_000
    assert lengths._counts.nbytes < 10_000
