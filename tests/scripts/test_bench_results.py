"""What the benchmark says of its runs is what they were, and any reader can read it."""

import datetime

import duckdb
import pytest
from bench_parts.engines import Measurement
from bench_parts.floor import Floor
from bench_parts.results import Facts, Machine, Results, Spread, results_table, save_results
from bench_plot import plot_results, seconds_by_workload

MACHINE = Machine(
    name="a machine, 2 cores",
    threads=2,
    load_average=0.1,
    started=datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC),
    versions={"batchgen": "1", "torch": "2", "transformers": "5", "triton": None},
)


def _run(seconds: float, tokens: int = 7, **more) -> Measurement:
    outputs = {0: [1, 2], 1: [3, tokens]}
    return Measurement(outputs, seconds, "v1", **more)


@pytest.fixture
def results() -> Results:
    ours = [
        _run(seconds, prefill_tokens=12, generate_s=seconds, model_s=0.9 * seconds,
             weights_bytes=4 << 20, pool_bytes=2 << 20, peak_memory_bytes=9 << 20)
        for seconds in (4.0, 2.0, 1.0)
    ]  # fmt: skip
    static = [_run(seconds, tokens=8) for seconds in (12.0, 4.0, 4.0)]
    floors = [Floor({"linear": 1.0, "attention": 1.0})] * 3
    facts = Facts("few", "cpu", 2, 20, 4, 10, 11, ["a=1"])
    return Results(facts, {"ours": ours, "static": static}, floors)


def test_a_spread_is_the_median_and_the_extremes():
    assert Spread([3.0, 1.0, 2.5]).show() == "2.50 (1.00..3.00)"
    assert Spread([3.0]).show(".1f") == "3.0"


def test_ratios_are_made_repeat_by_repeat(results):
    assert list(results.slowdowns("static").values) == [3.0, 2.0, 4.0]
    assert "ours is 3.00 (2.00..4.00) x as fast as static" in results.describe()


def test_everything_that_was_measured_is_said(results):
    said = results.describe()
    assert "E_1 = 10 (11 by blocks), 4 tokens out" in said
    assert "2.00 (1.00..4.00)" in said
    assert "12 = 1.200 x E_1" in said
    assert "10.0% (10.0%..10.0%)" in said
    assert "ours generates in 1.00 (0.50..2.00) x the floor of 2.00 (2.00..2.00) s" in said
    assert "linear 1.00, attention 1.00" in said
    assert "peak 9 MiB = weights 4 + pool 2 + 3" in said


def test_agreement_counts_rows_that_both_ran(results):
    assert results.agreement("ours", 0) == (1, 2)
    assert "1 of 2" in results.describe()
    del results.runs["static"]
    assert results.agreement("ours", 0) is None


def test_every_run_is_a_row_of_the_table(results, tmp_path):
    path = tmp_path / "new" / "bench.parquet"
    save_results([results], MACHINE, path)
    query = f"""
        SELECT engine, count(*), median(seconds), max(equal_rows)
        FROM '{path}' GROUP BY engine ORDER BY engine
    """
    rows = duckdb.sql(query).fetchall()
    assert [row[:2] for row in rows] == [("floor", 3), ("ours", 3), ("static", 3)]
    assert [row[2] for row in rows] == [2.0, 2.0, 4.0]
    assert [row[3] for row in rows] == [None, 1, 2]
    where = "engine = 'floor' AND repeat = 0"
    parts = duckdb.sql(f"SELECT map_entries(floor_s) FROM '{path}' WHERE {where}").fetchall()
    assert parts == [
        ([{"key": "linear", "value": 1.0}, {"key": "attention", "value": 1.0}],),
    ]


def test_the_machine_warns_where_something_else_runs():
    assert "OTHER WORK" not in MACHINE.describe()
    busy = Machine("m", 2, 1.7, MACHINE.started, MACHINE.versions)
    assert "load 1.7 before the start: OTHER WORK IS RUNNING" in busy.describe()
    assert Machine.here().threads >= 1


def test_the_picture_shows_seconds_for_a_thousand_rows(results, tmp_path):
    table = results_table([results], MACHINE)
    assert seconds_by_workload(table) == {
        "few (cpu)": {
            "ours": [2000.0, 1000.0, 500.0],
            "static": [6000.0, 2000.0, 2000.0],
            "floor": [1000.0, 1000.0, 1000.0],
        }
    }
    plot_results(table, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
