"""Bad rows: each has its output row, none ends the job, all can be run again."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchgen.engine.step import NO_TOKEN
from batchgen.runtime.executor import ModelExecutor
from tests.job.harness import Job

LONG = "The quick brown fox jumps over the lazy dog. "
GOOD = [{"role": "user", "content": "hello"}]
HUGE = json.dumps({"temperature": -1})

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("prompt", pa.string()),
        ("messages", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int64())),
        ("text", pa.string()),
        ("sampling_params", pa.string()),
        ("note", pa.string()),
    ]
)
ROWS: list[dict[str, Any]] = [
    {"prompt": "fine", "messages": json.dumps(GOOD), "prompt_token_ids": [5, 6], "text": "a"},
    {},
    {"prompt": "", "messages": "[]", "prompt_token_ids": [], "text": ""},
    {
        "prompt": LONG * 60,
        "messages": json.dumps([{"role": "user", "content": LONG * 60}]),
        "prompt_token_ids": [7] * 600,
        "text": LONG * 60,
    },
    {"prompt": "p", "messages": "not json", "prompt_token_ids": [1, 99_999], "text": "boom"},
    {
        "prompt": "fine",
        "messages": json.dumps(GOOD),
        "prompt_token_ids": [5],
        "text": "b",
        "sampling_params": HUGE,
    },
    {"prompt": "last", "messages": json.dumps(GOOD), "prompt_token_ids": [9], "text": "c"},
]
TEMPLATE = "prompt.template=\"{{ text }}{% if text == 'boom' %}{{ text.part }}{% endif %}\""
EXPECTED = {
    ("prompt.column=prompt",): [
        None, "null_prompt", "empty_prompt", "prompt_too_long", None, "invalid_sampling_params",
        None,
    ],
    ("prompt.messages_column=messages",): [
        None, "null_prompt", "invalid_messages", "prompt_too_long", "invalid_messages",
        "invalid_sampling_params", None,
    ],
    ("prompt.token_ids_column=prompt_token_ids",): [
        None, "null_prompt", "empty_prompt", "prompt_too_long", "invalid_token_ids",
        "invalid_sampling_params", None,
    ],
    (TEMPLATE, "prompt.format=plain"): [
        None, "template_error", "empty_prompt", "prompt_too_long", "template_error",
        "invalid_sampling_params", None,
    ],
}  # fmt: skip


@pytest.fixture
def bad(job: Job) -> Job:
    rows = [{"id": n, "note": f"note {n}", **row} for n, row in enumerate(ROWS)]
    job.write(pa.Table.from_pylist(rows, schema=SCHEMA))
    return job


@pytest.mark.parametrize("source", EXPECTED, ids=lambda source: source[0][:22])
def test_every_input_row_has_its_output_row_and_errors_have_their_type(
    bad: Job, source: tuple[str, ...]
) -> None:
    assert bad(*source) == 0
    rows, expected = bad.rows(), EXPECTED[source]
    assert [row["id"] for row in rows] == list(range(7))
    assert [row["error_type"] for row in rows] == expected
    for row in rows:
        failed = row["error_type"] is not None
        assert row["status"] == ("error" if failed else "ok")
        assert bool(row["error_message"]) == failed
        assert (row["finish_reason"] == "error") == failed
        assert (row["output_token_ids"] is None) == failed
        assert (row["completion_tokens"] is None) == failed
    counts = {kind: expected.count(kind) for kind in expected if kind is not None}
    assert bad.summary["errors"] == counts
    assert bad.json("_plan.json")["row_errors"] == counts


def test_failed_rows_with_all_their_columns_are_an_input_for_another_run(bad: Job) -> None:
    assert bad("prompt.column=prompt", "sampling.n=2") == 0
    failed = pq.read_table(bad.out / "_errors")
    assert failed.schema.equals(SCHEMA)
    assert failed.to_pylist() == [pq.read_table(bad.input).to_pylist()[n] for n in (1, 2, 3, 5)]
    again = bad.folder / "again"
    source = f"input.path={bad.out / '_errors'}"
    bad.out = again
    assert bad(source, f"output.dir={again}", "prompt.template='[{{ id }}]'") == 0
    assert [(row["id"], row["error_type"]) for row in bad.rows()] == [
        (1, None), (2, None), (3, None), (5, "invalid_sampling_params"),
    ]  # fmt: skip


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_prompt_larger_than_the_pool_is_one_error_row_however_many_samples(
    job: Job, temperature: str
) -> None:
    # 2 blocks of 16 tokens hold a prompt of 31 and one token more.
    sizes = [31, 32, 4]
    job.write([{"id": n, "prompt_token_ids": [5 + n] * size} for n, size in enumerate(sizes)])
    job.given |= {"sampling.n": "3", "sampling.temperature": temperature}
    assert job("pool.num_blocks=2") == 0
    rows = job.rows()
    assert [(row["id"], row["sample_index"], row["error_type"]) for row in rows] == [
        *((0, sample, None) for sample in range(3)),
        (1, 0, "exceeds_kv_capacity"),
        *((2, sample, None) for sample in range(3)),
    ]
    error = rows[3]
    assert "pool.num_blocks" in error["error_message"]
    assert error["prompt_tokens"] == 32
    assert job.summary["errors"] == {"exceeds_kv_capacity": 1}
    # It fills the pool alone and ends there.
    assert rows[0]["finish_reason"] == "length"
    assert job("pool.num_blocks=2") == 0
    assert job("pool.num_blocks=64", "output.retry_errors=true") == 0
    assert [row["status"] for row in job.rows()] == ["ok"] * 9


def test_a_row_of_which_one_sample_fails_has_one_error_row(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ModelExecutor.execute

    def execute(self: ModelExecutor, plan: Any) -> Any:
        output = real(self, plan)
        if plan.step == 3:
            output.result().token_ids[1] = NO_TOKEN
        return output

    job.write([{"id": n, "prompt": prompt} for n, prompt in enumerate(["one", "two"])])
    with monkeypatch.context() as patch:
        patch.setattr(ModelExecutor, "execute", execute)
        assert job("sampling.n=3", "sampling.temperature=1") == 0
    by_id = [(row["id"], row["sample_index"], row["error_type"]) for row in job.rows()]
    assert sorted(by_id) in (
        [(0, 0, "engine_error"), (1, 0, None), (1, 1, None), (1, 2, None)],
        [(0, 0, None), (0, 1, None), (0, 2, None), (1, 0, "engine_error")],
    )
    assert job("sampling.n=3", "sampling.temperature=1") == 0


def test_t10_the_verdict_is_the_outputs_and_the_same_however_often_it_is_asked_for(
    bad: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    # 4 of 7 input rows; with 3 samples each they are 4 of 13 output rows.
    for limit, code in (("0.5", 3), ("0.6", 0), ("0", 3)):
        arguments = ("prompt.column=prompt", f"errors.max_rate={limit}", "sampling.n=3")
        assert bad(*arguments, "output.overwrite=true") == code
        assert ("4 of 7 rows failed" in capsys.readouterr().err) == (code == 3)
        parts = sorted(bad.out.glob("part-*"))
        for again in (False, True, True):
            if again:
                assert bad(*arguments) == code
                assert "already, 4 of them failed" in (said := capsys.readouterr().err)
                assert ("4 of 7 rows failed" in said) == (code == 3)
            assert (bad.out / "_SUCCESS").exists() == (code == 0)
            assert bad.summary["outcome"] == ("done" if code == 0 else "too_many_row_errors")
        assert sorted(bad.out.glob("part-*")) == parts
    # Another limit is another verdict over the same rows, without any of them being run.
    other = ("prompt.column=prompt", "sampling.n=3")
    assert bad(*other, "errors.max_rate=0.6") == 0
    assert (bad.out / "_SUCCESS").exists()
    assert bad.summary["outcome"] == "done"
    assert bad(*other, "errors.max_rate=0.5") == 3
    assert not (bad.out / "_SUCCESS").exists()
    assert bad(*other) == 0
    assert sorted(bad.out.glob("part-*")) == parts


def test_t10_the_alert_of_a_bad_output_stays_until_it_is_good(bad: Job, tmp_path: Path) -> None:
    metrics = tmp_path / "batchgen.prom"
    given = ("prompt.column=prompt", f"log.prometheus_file={metrics}")

    def figures() -> dict[str, float]:
        families = text_string_to_metric_families(metrics.read_text())
        return {each.name: each.samples[0].value for each in families if len(each.samples) == 1}

    for _ in range(2):
        assert bad(*given, "errors.max_rate=0.5") == 3
        found = figures()
        assert found["batchgen_exit_code"] == 3
        assert (found["batchgen_rows"], found["batchgen_rows_failed"]) == (7, 4)
        assert "batchgen_last_success_timestamp_seconds" not in found
    assert bad(*given, "errors.max_rate=0.6") == 0
    assert figures()["batchgen_exit_code"] == 0
    assert figures()["batchgen_rows_failed"] == 4
    assert "batchgen_last_success_timestamp_seconds" in figures()


def test_t10_the_status_names_the_verdict_of_the_same_command(
    bad: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("prompt.column=prompt", "errors.max_rate=0.5")
    assert bad(*given) == 3
    assert bad("mode=status", *given) == 0
    said = capsys.readouterr().out
    assert "the same command does nothing and exits with 3 (4 of 7 rows failed" in said
    assert bad("mode=status", "prompt.column=prompt", "errors.max_rate=0.6") == 0
    assert "does nothing and exits with 0" in capsys.readouterr().out


def test_a_job_of_bad_rows_only_loads_no_model(job: Job, copied_model: Path) -> None:
    (copied_model / "model.safetensors").unlink()
    job.write(pa.table({"id": ["a", "b"], "prompt": pa.array([None, ""], pa.string())}))
    assert job() == 0
    assert [row["error_type"] for row in job.rows()] == ["null_prompt", "empty_prompt"]
    assert job.summary["prefill_tokens_computed"] == 0
