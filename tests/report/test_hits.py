"""The explanation of the hit rate adds up and says what to change."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from batchgen.report.hits import HitFigures, PoolFigures, explain, explain_part, lost_tokens

_CALM = PoolFigures(num_blocks=100, peak_demand=80, peak_running=16, preemptions=0, requests=50)


@given(
    shareable=st.integers(0, 1000),
    shared=st.integers(0, 1000),
    uncopied=st.integers(0, 1000),
    evicted=st.integers(0, 1000),
    order=st.sampled_from(["prefix", "input", "length"]),
    caching=st.booleans(),
)
def test_the_causes_add_up_to_what_was_lost(
    shareable, shared, uncopied, evicted, order, caching
) -> None:
    figures = HitFigures(2000, shareable, min(shared, shareable), uncopied, evicted)
    causes = lost_tokens(figures, order=order, prefix_caching=caching)
    assert sum(causes.values()) == shareable - min(shared, shareable)
    assert min(causes.values()) >= 0
    assert causes["eviction"] <= evicted


def test_a_run_that_lost_nothing_says_only_what_it_shared() -> None:
    figures = HitFigures(1000, 900, 900, 0, 0)
    (line,) = explain(figures, _CALM, order="prefix", prefix_caching=True)
    assert "shared 900 of 900" in line
    assert "90.0% of 1,000" in line


def test_each_cause_names_its_remedy() -> None:
    figures = HitFigures(1000, 900, 500, 0, 400)
    assert "order=prefix" in explain(figures, _CALM, order="input", prefix_caching=True)[1]
    assert "num_blocks" in explain(figures, _CALM, order="prefix", prefix_caching=True)[1]
    assert "caching=true" in explain(figures, _CALM, order="prefix", prefix_caching=False)[1]
    borders = explain(
        HitFigures(1000, 900, 500, 400, 0), _CALM, order="prefix", prefix_caching=True
    )
    assert "block borders" in borders[1]


def test_nothing_is_lost_to_eviction_where_nothing_was_given_up_that_a_row_needed() -> None:
    figures = HitFigures(1000, 900, 860, 0, 16)
    causes = lost_tokens(figures, order="prefix", prefix_caching=True)
    assert (causes["eviction"], causes["same_step"]) == (16, 24)
    lines = explain(replace(figures, evicted_tokens=0), _CALM, order="prefix", prefix_caching=True)
    assert "lost 40 tokens to same step" in lines[1]
    assert "block_size" in lines[1]


def test_frequent_preemptions_name_the_pool_and_the_rows_that_would_avoid_them() -> None:
    pool = PoolFigures(num_blocks=100, peak_demand=160, peak_running=16, preemptions=9, requests=50)
    lines = explain(HitFigures(10, 0, 0, 0, 0), pool, order="prefix", prefix_caching=True)
    assert "pool.num_blocks=160" in lines[1]
    assert "engine.max_num_seqs=10" in lines[1]


def test_a_run_that_began_nothing_has_nothing_to_share() -> None:
    (line,) = explain_part(HitFigures(0, 90, 0, 0, 0), _CALM)
    assert line == "this run began no request, so there was nothing to share"
    (line,) = explain_part(HitFigures(60, 90, 15, 0, 0), _CALM)
    assert "shared 15 of the 60 prompt tokens (25.0%)" in line
