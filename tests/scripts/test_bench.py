"""The benchmark times the same work on both sides and counts it rightly."""

import argparse
import sys

import bench
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tiny_models import save

LENGTHS = [30, 21, 22, 25, 30, 9] * 4


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[str]:
    """A tiny random model and 24 rows of token ids, 20 of which share 20 tokens."""
    folder = tmp_path_factory.mktemp("job")
    model = save("llama", folder / "model")
    rng = np.random.default_rng(1)
    shared = rng.integers(3, 199, 20).tolist()
    prompts = [
        (shared if length > 20 else []) + rng.integers(3, 199, length % 20 + 1).tolist()
        for length in LENGTHS
    ]
    pq.write_table(pa.table({"prompt_token_ids": prompts}), folder / "in.parquet")
    return [
        f"model.path={model}",
        f"input.path={folder / 'in.parquet'}",
        "pool.num_blocks=200",
        "sampling.max_tokens=8",
        "sampling.ignore_eos=true",
    ]


@pytest.fixture(scope="module")
def results(job) -> bench.Results:
    engines = ("ours", "static")
    return bench.bench(job, rows=24, engines=engines, repeats=2, static_rows=20)


def test_both_engines_give_the_same_tokens_and_as_many_for_each_row(results):
    (ours, _), (static, _) = results.runs["ours"], results.runs["static"]
    assert len(ours.outputs) == 24
    assert len(static.outputs) == 20
    assert {len(tokens) for tokens in ours.outputs.values()} == {8}
    assert {len(tokens) for tokens in static.outputs.values()} == {8}
    assert "tokens equal to static: 20 of 20 rows" in results.describe()


def test_prefill_is_the_floor_for_ours_and_the_padded_batches_for_static(results):
    ours, static = results.runs["ours"][0], results.runs["static"][0]
    assert ours.plan is not None
    assert ours.prefill_tokens == ours.plan.prefill_tokens_floor < ours.plan.request_tokens
    lengths = [(20 if length > 20 else 0) + length % 20 + 1 for length in LENGTHS]
    chosen = sorted((lengths[row * 24 // 20] for row in range(20)), reverse=True)
    assert static.prefill_tokens == 16 * chosen[0] + 4 * chosen[16]


def test_speed_is_the_median_over_the_repeats():
    runs = [bench.Measurement({0: [1], 1: [2]}, seconds, 5) for seconds in (4.0, 1.0, 2.0)]
    assert bench.Results({"static": runs}).rows_per_s("static") == 1.0


def test_rows_are_chosen_at_even_distances():
    assert bench.spread([3, 4, 6, 7, 8, 9], 3) == [3, 6, 8]
    assert bench.spread([3, 4], None) == bench.spread([3, 4], 5) == [3, 4]


def test_an_unknown_engine_is_refused(monkeypatch):
    with pytest.raises(argparse.ArgumentTypeError, match="ours,static"):
        bench._engines("ours,other")


def test_the_few_shot_workload_prints_a_comparison(smollm2_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--rows", "2", "sampling.max_tokens=2"])
    assert bench.main() == 0
    said = capsys.readouterr().out
    assert "tokens equal to static: 2 of 2 rows" in said
    assert "x E_1" in said
