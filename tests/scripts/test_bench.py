"""The benchmark times the same work on all sides and counts it rightly."""

import argparse
import mmap
import os
import sys
from functools import partial

import bench
import pyarrow.parquet as pq
import pytest
from bench_parts import engines as bench_engines
from bench_parts import worker as bench_worker
from bench_parts.engines import Prompt, load_engine, spread
from bench_workloads import WORKLOADS
from job_rows import compose_job, open_rows

from batchgen.errors import EngineError, UsageError
from tests.scripts.bench_job import LENGTHS, OUTPUTS, make_job

RUNNING = [
    "ours",
    "ours_no_prefix_cache",
    "ours_no_cascade",
    "ours_input_order",
    "ours_torch",
    "ours_torch_no_cascade",
    "static",
    "continuous",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[str]:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def runs(job) -> dict[str, bench.Measurement]:
    """One run of every engine, all in this process."""
    with open_rows(compose_job(job)) as rows:
        return {name: load_engine(name, job, None).run(rows) for name in RUNNING}


@pytest.fixture
def forked_workers(fork_server, monkeypatch) -> None:
    """Engines in processes that need not import everything first."""
    monkeypatch.setattr(bench_worker, "START_METHOD", "forkserver")


@pytest.mark.parametrize("name", RUNNING)
def test_every_engine_gives_the_same_tokens_and_each_row_as_many_as_it_asked_for(runs, name):
    outputs = runs[name].outputs
    assert {row: len(tokens) for row, tokens in outputs.items()} == dict(enumerate(OUTPUTS))
    assert outputs == runs["static"].outputs
    assert runs[name].output_tokens == sum(OUTPUTS)
    assert runs[name].seconds > 0


def test_prefill_is_the_floor_for_ours_and_everything_without_a_cache(job, runs):
    with open_rows(compose_job(job)) as rows:
        plan, _ = rows.stream(compose_job(job))
    assert runs["ours"].prefill_tokens == plan.prefill_tokens_floor < sum(LENGTHS)
    assert runs["ours_no_prefix_cache"].prefill_tokens == sum(LENGTHS)


def test_prefill_of_static_counts_the_padded_batches(runs):
    lengths = sorted(LENGTHS, reverse=True)
    assert runs["static"].prefill_tokens == 16 * lengths[0] + 8 * lengths[16]


def test_ours_says_its_memory_and_when_the_model_ran(runs):
    ours = runs["ours"]
    assert 0 < ours.model_s <= ours.generate_s <= ours.seconds
    assert ours.pool_bytes == 200 * 16 * 3 * 2 * 2 * 8 * 4
    assert ours.weights_bytes > 0


def test_transformers_can_run_fewer_rows(job, runs):
    with open_rows(compose_job(job)) as rows:
        static = load_engine("static", job, 5).run(rows)
    assert static.outputs == {row: runs["static"].outputs[row] for row in (0, 4, 9, 14, 19)}


def test_rows_are_chosen_at_even_distances():
    prompts = [Prompt(row, [1], 1) for row in (3, 4, 6, 7, 8, 9)]
    assert [prompt.row_index for prompt in spread(prompts, 3)] == [3, 6, 8]
    assert spread(prompts[:2], None) == spread(prompts[:2], 5) == prompts[:2]


def test_engines_run_interleaved_in_processes_of_their_own(job, forked_workers):
    contest = bench.Contest(engines=["ours", "static"], repeats=2)
    results = bench.bench("tiny", "cpu", job, contest)
    assert [len(runs) for runs in results.runs.values()] == [2, 2]
    assert len(results.floors) == 2
    assert results.agreement("ours", 1) == (24, 24)
    assert all(run.peak_memory_bytes > 0 for run in results.runs["static"])
    assert results.facts.prompt_tokens == sum(LENGTHS)
    assert results.facts.output_tokens == sum(OUTPUTS)
    said = results.describe()
    assert "x as fast as static" in said
    assert "x the floor of" in said


def test_an_error_of_an_engine_reaches_the_one_who_asked_from_a_process_begun_anew(job):
    no_model = [*job, "model.path=/nowhere"]
    with pytest.raises(UsageError, match="/nowhere"):
        bench_worker.Worker("ours", partial(load_engine, "ours", no_model, None), job)


def test_the_death_of_an_engine_is_an_error(job, forked_workers):
    with pytest.raises(EngineError, match="the engine dead died"):
        bench_worker.Worker("dead", partial(os._exit, 3), job)


def _hold(mebibytes: int) -> mmap.mmap:
    """Take fresh pages; those of a bytearray may be ones that were freed but are still there."""
    pages = mmap.mmap(-1, mebibytes << 20)
    pages[::4096] = b"x" * (len(pages) // 4096)
    return pages


def test_the_peak_is_that_of_the_run_alone():
    _hold(64).close()
    bench_worker._reset_peak_memory()
    before = bench_worker._peak_memory_bytes()
    _hold(32).close()
    assert 24 << 20 < bench_worker._peak_memory_bytes() - before < 48 << 20


def test_names_are_read_from_the_command_line():
    assert bench.names("all", ("a", "b")) == ["a", "b"]
    assert bench.names("b", ("a", "b")) == ["b"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"a,b, or all"):
        bench.names("a,c", ("a", "b"))


@pytest.mark.parametrize("key", ["model.path=/m", "+input.path=x", "job=bulk"])
def test_keys_that_would_change_the_rows_are_refused(monkeypatch, capsys, key):
    monkeypatch.setattr(sys, "argv", ["bench.py", key])
    with pytest.raises(SystemExit) as left:
        bench.main()
    assert left.value.code == 2
    assert "--model" in capsys.readouterr().err


def test_an_ablation_changes_one_key_of_what_it_is_compared_with():
    ours = bench_engines.OURS
    assert set(ours) < set(bench_engines.ENGINES)
    both = ours["ours_torch"] + ours["ours_no_cascade"]
    assert [name for name, keys in ours.items() if len(keys) > 1] == ["ours_torch_no_cascade"]
    assert ours["ours_torch_no_cascade"] == both


def test_the_command_prints_keeps_and_draws_a_comparison(
    smollm2_dir, monkeypatch, capsys, tmp_path, forked_workers
):
    table, picture = tmp_path / "bench.parquet", tmp_path / "new" / "bench.png"
    arguments = ["--rows", "2", "--max-tokens", "2", "--no-floor"]
    files = ["--save", str(table), "--plot", str(picture)]
    keys = ["pool.num_blocks=200"]
    monkeypatch.setattr(
        sys, "argv", ["bench.py", "--workloads", "table", *arguments, *files, *keys]
    )
    assert bench.main() == 0
    said = capsys.readouterr().out
    assert "2 of 2" in said
    assert "= 1.000 x E_1" in said
    runs = pq.read_table(table).to_pylist()
    assert [run["engine"] for run in runs] == ["ours", "static"]
    assert all(run["workload"] == "table" and run["equal_rows"] == 2 for run in runs)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "table" in WORKLOADS
