"""What the command shows and leaves besides results: plan, preview, summary, progress."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.output.schema import output_schema
from tests.job.harness import Job

PREFIX = "The quick brown fox jumps over the lazy dog. A review of the movie: good acting. "
WORDS = ["yes", "no", "end", "story"]
SHARED = [{"id": n, "prompt": f"{PREFIX * (1 + n % 3)} {WORDS[n % 4]} {n}"} for n in range(24)]

# What the two files hold at least.
SUMMARY = {
    "rows", "ok", "errors", "duplicates", "prompt_tokens", "prefill_tokens_computed",
    "recomputed_tokens", "prefill_tokens_floor", "prefill_tokens_floor_block",
    "completion_tokens", "decode_steps", "graph_steps", "eager_steps",
    "out_of_memory_passes", "prefill_s", "decode_s", "kv_blocks_read", "wall_s",
    "phases", "computed_tokens_per_s", "generated_tokens_per_s", "ttft_ms", "peak_memory_bytes",
    "pool_bytes", "pool_blocks", "block_size", "kv_bytes_per_token", "peak_blocks",
    "logical_over_physical_blocks", "preemptions", "swap_out_bytes", "swap_in_bytes",
    "preemption_s", "scheduler_s", "mean_running_rows", "device", "versions",
}  # fmt: skip
PLAN = {
    "rows", "prompt_tokens", "prefill_tokens_floor", "prefill_tokens_floor_block",
    "expected_prefill_tokens", "longest_request_tokens", "groups", "row_errors",
}  # fmt: skip


# -- plan and preview -----------------------------------------------------------------


def test_a_plan_needs_no_weights_and_a_run_keeps_to_it(
    job: Job, copied_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(SHARED)
    weights = copied_model / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    assert job("mode=plan") == 0
    plan, said = job.json("_plan.json"), capsys.readouterr().out
    assert set(plan) >= PLAN
    assert job.parts == []
    assert f"{plan['prefill_tokens_floor']:,} by the token" in said
    assert f"{plan['prefill_tokens_floor_block']:,} by blocks of 16" in said
    assert plan["prefill_tokens_floor_block"] < plan["prompt_tokens"] / 2
    weights.write_bytes(content)
    assert job() == 0
    summary = job.summary
    # A row computes up to three tokens that it shares rather than wait a step for them.
    extra = summary["prefill_tokens_computed"] - plan["expected_prefill_tokens"]
    assert 0 <= extra <= 3 * plan["requests"]
    assert summary["prefill_tokens_floor_block"] == plan["prefill_tokens_floor_block"]


def test_the_floors_are_told_before_the_model_is_loaded_and_the_figure_after(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(SHARED)
    assert job() == 0
    said, summary = capsys.readouterr().err, job.summary
    before, after = said.split("[load]")
    for name in ("prefill_tokens_floor", "prefill_tokens_floor_block"):
        assert f"{summary[name]:,} by" in before
    assert f"{summary['prefill_tokens_computed']:,} tokens computed" in after


def test_a_preview_shows_text_and_ids_and_leaves_nothing(
    job: Job, copied_model: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied_model / "model.safetensors").unlink()
    job.write([{"id": f"row-{n}", "messages": json.dumps([{"role": "user", "content": f"say {n}"}])}
               for n in range(9)])  # fmt: skip
    before = sorted(job.folder.rglob("*"))
    assert job("mode=preview", "input.limit=2") == 0
    said = capsys.readouterr().out
    chat = [{"role": "user", "content": "say 1"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text in said
    assert str(tokenizer(text)["input_ids"]) in said
    assert "row-1" in said
    assert "row-2" not in said
    assert sorted(job.folder.rglob("*")) == before


# -- inputs of special shape -----------------------------------------------------------


def test_f05_no_rows_give_a_valid_empty_output_with_the_full_schema(job: Job) -> None:
    job.write(pa.table({"id": pa.array([], pa.int64()), "prompt": pa.array([], pa.string())}))
    assert job() == 0
    for schema in (pq.read_table(job.out).schema, pq.read_schema(job.parts[0])):
        assert schema.equals(output_schema(pa.int64()))
    assert job.rows() == []
    assert (job.out / "_SUCCESS").exists()
    assert set(job.summary) >= SUMMARY
    assert (job.summary["rows"], job.summary["prefill_tokens_computed"]) == (0, 0)
    assert job() == 0


@pytest.mark.parametrize("mode", ["run", "plan", "preview"])
def test_an_input_without_rows_is_no_silent_success(
    job: Job, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    no_rows = pa.table({"id": pa.array([], pa.int64()), "prompt": pa.array([], pa.string())})
    job.write(no_rows)
    assert job(f"mode={mode}") == 0
    said = capsys.readouterr().err
    assert f"input.path={job.input}: its file holds no row, so there is nothing to do" in said
    folder = job.folder / "shards"
    folder.mkdir()
    for name in ("a", "b"):
        pq.write_table(no_rows, folder / f"{name}.parquet")
    assert job(f"mode={mode}", f"input.path={folder}", f"output.dir={job.out}2") == 0
    assert "none of its 2 files holds a row" in capsys.readouterr().err


def test_f05_files_without_rows_beside_one_with_a_row(job: Job) -> None:
    folder = job.folder / "shards"
    folder.mkdir()
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
    for name, rows in (("a", []), ("b", [{"id": "x", "prompt": "yes"}]), ("c", [])):
        pq.write_table(pa.Table.from_pylist(rows, schema), folder / f"{name}.parquet")
    with pq.ParquetWriter(folder / "d.parquet", schema):
        pass
    assert job(f"input.path={folder}") == 0
    assert job.rows("id, row_index") == [{"id": "x", "row_index": 0}]


def test_ids_are_made_of_file_and_row_and_a_limit_takes_the_first(job: Job) -> None:
    folder = job.folder / "shards"
    (folder / "deep").mkdir(parents=True)
    for name, count in (("s10.parquet", 3), ("s9.parquet", 2), ("deep/x.parquet", 2)):
        rows = [{"prompt": f"{name} {n}"} for n in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    assert job(f"input.path={folder}", "input.limit=5") == 0
    assert job.rows("id, row_index") == [
        {"id": name, "row_index": n}
        for n, name in enumerate(
            ["deep/x.parquet:0", "deep/x.parquet:1", "s9.parquet:0", "s9.parquet:1",
             "s10.parquet:0"]
        )
    ]  # fmt: skip
    assert job(f"input.path={folder}", "input.limit=5") == 0


def test_output_in_input_order_stands_so_in_the_files(job: Job) -> None:
    rows = [{"id": n, "prompt": f"{'zyxwvu'[n % 6]} words {n}"} for n in range(18)]
    job.write(rows)
    ordered = ("output.order=input", "output.rows_per_part=5", "sampling.n=2")
    assert job(*ordered) == 0
    read = pq.read_table(job.out).select(["row_index", "sample_index"]).to_pylist()
    assert [(row["row_index"], row["sample_index"]) for row in read] == [
        (n, sample) for n in range(18) for sample in range(2)
    ]
    assert (job.out / "_SUCCESS").exists()


# -- the summary -----------------------------------------------------------------------


def test_the_summary_has_every_figure_and_they_agree_with_the_parts(job: Job) -> None:
    rows = [*SHARED, {"id": 100, "prompt": None}, {"id": 101, "prompt": SHARED[0]["prompt"]}]
    job.write(rows)
    job.given |= {"pool.block_size": "8", "pool.num_blocks": "20", "sampling.max_tokens": "24"}
    assert job() == 0
    summary = job.summary
    assert set(summary) >= SUMMARY
    table = f"read_parquet('{job.out}/*.parquet')"
    sums = duckdb.sql(
        "SELECT count(*) AS rows, count(*) FILTER (status = 'ok') AS ok, "
        "sum(prompt_tokens)::INT AS prompt_tokens, "
        "sum(completion_tokens)::INT AS completion_tokens, "
        "sum(recomputed_tokens)::INT AS recomputed_tokens, "
        "sum(num_preemptions)::INT AS preemptions, "
        f"sum(swapped_out_blocks)::INT AS outs, sum(swapped_in_blocks)::INT AS ins FROM {table}"
    )
    (counted,) = sums.to_arrow_table().to_pylist()
    block_bytes = summary["kv_bytes_per_token"] * summary["block_size"]
    assert summary["swap_out_bytes"] == counted.pop("outs") * block_bytes
    assert summary["swap_in_bytes"] == counted.pop("ins") * block_bytes
    assert {name: summary[name] for name in counted} == counted
    assert summary["preemptions"] > 0
    assert summary["errors"] == {"null_prompt": 1}
    assert summary["duplicates"] == 1
    # Three layers, two KV heads of eight, K and V in four bytes.
    assert summary["kv_bytes_per_token"] == 3 * 2 * 8 * 2 * 4
    assert summary["pool_bytes"] == 20 * block_bytes
    assert (summary["pool_blocks"], summary["block_size"]) == (20, 8)
    assert sum(summary["peak_blocks"].values()) == 20
    assert summary["prefill_tokens_computed"] >= summary["prefill_tokens_floor"]
    assert summary["prefill_tokens_floor_block"] >= summary["prefill_tokens_floor"] > 0
    assert summary["logical_over_physical_blocks"]["peak"] >= 1
    assert list(summary["ttft_ms"]) == ["p50", "p90", "p99"]
    assert set(summary["phases"]) == {"load_s", "plan_s", "generate_s", "write_s"}
    engine_s = summary["prefill_s"] + summary["decode_s"] + summary["scheduler_s"]
    assert engine_s <= summary["phases"]["generate_s"] <= summary["wall_s"]


def test_times_of_a_row_fit_into_each_other(job: Job) -> None:
    job.write(SHARED)
    assert job("engine.max_num_seqs=3") == 0
    generate_ms = 1000 * job.summary["phases"]["generate_s"]
    for row in job.rows():
        assert 0 <= row["queue_time_ms"] <= generate_ms
        assert 0 < row["time_to_first_token_ms"] <= row["generation_time_ms"] <= generate_ms
    by_start = sorted(job.rows(), key=lambda row: row["queue_time_ms"])
    assert by_start[0]["queue_time_ms"] < by_start[-1]["queue_time_ms"]


# -- progress --------------------------------------------------------------------------


def test_without_a_terminal_plain_lines_name_phases_rows_and_what_is_left(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write([*SHARED, {"id": 100, "prompt": None}])
    assert job("log.every_s=0.001", "engine.max_num_seqs=4") == 0
    said = capsys.readouterr().err
    phases = [line for line in said.splitlines() if re.fullmatch(r"\[\w+\]", line)]
    assert phases == ["[plan]", "[load]", "[generate]", "[write]"]
    lines = [line for line in said.splitlines() if line.startswith("[generate] ")]
    assert len(lines) > 5
    assert "\r" not in said
    pattern = re.compile(
        r"\[generate\] [\d.]+% rows (\d+)/25 \(1 failed\) \| [\d,]+ tok/s \| running (\d+) "
        r"waiting (\d+) swapped (\d+) \| pool \d+% \| hits \d+% \| ETA (\?|\d\d:\d\d)"
    )
    found = [pattern.fullmatch(line) for line in lines]
    assert all(found), lines
    rows = [int(match[1]) for match in found if match]
    assert rows == sorted(rows)
    assert rows[-1] == 25
    assert {int(match[2]) for match in found if match} >= {0, 4}
    assert any(match[5] != "?" for match in found if match)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(SHARED)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert job() == 0
    said = terminal.getvalue()
    for phase in ("[plan]", "[load]", "[generate]", "[write]"):
        assert phase in said
    assert re.search(r"\r100%\|[█#]+\| 24/24, [\d,]+ tok/s \| running 0 waiting 0", said)
    assert "[generate] 100" not in said


def test_progress_of_a_resumed_run_counts_output_rows(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(SHARED)
    job.given |= {"sampling.n": "2", "sampling.temperature": "1", "output.rows_per_part": "12"}
    assert job() == 0
    for part in job.parts[1:]:
        part.unlink()
    capsys.readouterr()
    assert job("log.every_s=0.001") == 0
    shown = re.findall(r"rows (\d+)/(\d+)", capsys.readouterr().err)
    assert shown[0] == ("12", "48")
    assert shown[-1] == ("48", "48")
