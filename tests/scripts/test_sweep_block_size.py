"""The sweep over block sizes measures what a count by hand gives, on rows of real text."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sweep_block_size as sweep
from prepare_data import prepare_data
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from batchgen.data.output.schema import RowResult, output_schema, to_table
from tests.support.forked import run_batchgen
from tests.support.tiny_models import FAMILIES, build

OUTPUT = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny random model that takes long rows, and a tokenizer of the texts' common words."""
    folder = tmp_path_factory.mktemp("model")
    config = FAMILIES["llama"]()
    config.vocab_size, config.max_position_embeddings = 2000, 8192
    build(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel(unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = pq.read_table(prepare_data() / "reviews.parquet")["text"].to_pylist()
    trainer = trainers.WordLevelTrainer(vocab_size=2000, special_tokens=["?"])
    words.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return str(folder)


def _result(row: int, prompt: int, output: int, peak_blocks: int | None, **given) -> RowResult:
    return RowResult(
        id=row,
        row_index=row,
        sample_index=0,
        status=given.get("status", "ok"),
        prompt_tokens=prompt,
        completion_tokens=output,
        peak_blocks=peak_blocks,
    )


def test_waste_is_what_last_blocks_leave_empty_and_failed_rows_and_duplicates_have_none():
    results = [
        _result(0, 10, 3, 2),  # 12 tokens stored in 16 slots
        _result(1, 8, 1, 1),  # 8 in 8
        _result(2, 10, 3, 0),  # another row's result
        _result(3, 50, 0, None, status="error"),
    ]
    table = to_table(results, output_schema(pa.int64()))
    assert sweep.measured_waste(table, 8) == (4, 24, 2)


def test_rows_keep_within_their_lengths_and_none_comes_twice():
    texts = [[1] * 15, [2] * 16, [2] * 16, [3] * 40, [4] * 39]
    assert list(sweep.short_prompts(texts, 40)) == [[2] * 16, [4] * 39]
    assert list(sweep.long_prompts(texts, 40)) == [[1] * 15 + [2] * 32, [3] * 40 + [4] * 39]


def _figures(block_size: int, tokens_per_s: float, wasted: float) -> sweep.Figures:
    return sweep.Figures(
        "short", block_size, 1, tokens_per_s, 1.0, 1.0, wasted, block_size / 2, 0.1, 1, 0
    )


def test_the_size_wanted_wastes_least_among_the_fastest():
    figures = [
        _figures(8, 90, 4),
        _figures(16, 98, 8),
        _figures(32, 97.5, 15),
        _figures(64, 100, 30),
    ]
    assert sweep.wanted(figures).block_size == 16


def test_a_sweep_measures_the_waste_that_the_rows_lengths_give(
    model, tmp_path, capsys, monkeypatch, fork_server
):
    monkeypatch.setattr(sweep, "subprocess", SimpleNamespace(run=run_batchgen))
    arguments = [
        *("--block-sizes=32,8", "--short-rows=5", "--long-rows=2", "--crowd-rows=12"),
        *("--short-limit=64", "--long-limit=300", f"--max-tokens={OUTPUT}"),
        f"--out={tmp_path}",
        f"model.path={model}",
    ]
    assert sweep.main(arguments) == 0
    saved = json.loads((tmp_path / "figures.json").read_text())
    assert pq.read_table(tmp_path / "figures.parquet").to_pylist() == saved["figures"]
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    assert set(saved["wanted"]) == {"short", "long", "crowd"}
    options, _ = sweep.read_options(arguments)
    workloads = sweep.make_workloads(options, sweep.load_tokenizer(model))
    found = {(each["workload"], each["block_size"]): each for each in saved["figures"]}
    assert len(found) == 6
    for workload in workloads:
        for size in (8, 32):
            stored = [len(prompt) + OUTPUT - 1 for prompt in workload.prompts]
            wasted = sum(-(-tokens // size) * size - tokens for tokens in stored)
            each = found[workload.name, size]
            assert each["wasted_tokens_per_row"] == wasted / len(stored)
            assert each["expected_tokens_per_row"] == size / 2
            assert each["rows"] == len(stored)
    # Every pool holds all of its rows at once, but for the crowd's.
    for workload in workloads:
        needed = sum(-(-(len(ids) + OUTPUT - 1) // 32) * 32 for ids in workload.prompts)
        assert (workload.pool_tokens < needed) == (workload.name == "crowd")
    short, long, _ = workloads
    assert all(len(prompt) + OUTPUT < 64 for prompt in short.prompts)
    assert all(len(prompt) > 300 for prompt in long.prompts)
    assert "short rows want a block size of" in capsys.readouterr().out


def test_a_failed_sweep_ends_with_the_engine_s_exit_code(model, tmp_path, capfd):
    arguments = [*("--short-rows=1", "--long-rows=0", "--crowd-rows=0", "--block-sizes=8")]
    key = "pool.blocksize=8"
    assert sweep.main([*arguments, f"--out={tmp_path}", f"model.path={model}", key]) == 4
    said = capfd.readouterr().err
    assert "blocksize" in said
    assert "exit code 2" in said
