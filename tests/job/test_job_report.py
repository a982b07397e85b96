"""Every run leaves a report, whatever ends it; its figures are the summary's."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import duckdb
import pytest

from batchgen.runtime.executor import ModelExecutor
from tests.job.harness import Job

SHARED = "Review: a thing that works. Sentiment:"


def page(job: Job) -> str:
    return (job.out / "_report.html").read_text("utf-8")


def text_of(html: str) -> str:
    body = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "prompt": f"{SHARED} {n}"} for n in range(count)]


def test_a_run_with_failed_rows_shows_them_by_kind_escaped(job: Job) -> None:
    bad = [
        {"id": "<b>none</b>", "prompt": None},
        {"id": "long", "prompt": "<i>word</i> " * 600},
        *({"id": f"empty{n}", "prompt": ""} for n in range(5)),
    ]
    job.write([*rows(12), *bad])
    assert job("errors.max_rate=0.2") == 3
    summary, html = job.summary, page(job)
    assert summary["outcome"] == "too_many_row_errors"
    assert summary["errors"] == {"null_prompt": 1, "prompt_too_long": 1, "empty_prompt": 5}
    text = text_of(html)
    assert "7 of 19 rows failed" in text
    assert "&lt;b&gt;none&lt;/b&gt;" in html
    assert "<b>none</b>" not in html
    assert text.count("id empty") == 3
    assert f"{SHARED} " in text


def test_the_lengths_in_the_summary_are_those_of_the_parts(job: Job) -> None:
    job.write([*rows(15), {"id": "bad", "prompt": None}])
    assert job("output.rows_per_part=4") == 0
    table = f"read_parquet('{job.out}/*.parquet')"
    query = (
        "SELECT count(*), min({0}), max({0}), avg({0}), quantile_disc({0}, 0.5)::INT "
        f"FROM {table} WHERE status = 'ok'"
    )
    for column, name in (
        ("prompt_tokens", "prompt_lengths"),
        ("completion_tokens", "output_lengths"),
    ):
        (found,) = duckdb.sql(query.format(column)).fetchall()
        figures = job.summary[name]
        shown = ("rows", "min", "max", "mean", "p50")
        assert tuple(figures[each] for each in shown) == pytest.approx(found)


def test_an_interrupted_run_leaves_a_report_of_what_it_did_and_the_next_one_replaces_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(rows(12))
    job.given |= {"engine.max_num_seqs": "4", "output.rows_per_part": "2"}
    real, calls = ModelExecutor.execute, iter(range(1000))

    def execute(self: ModelExecutor, plan: Any) -> Any:
        if next(calls) == 14:
            signal.raise_signal(signal.SIGTERM)
        return real(self, plan)

    with monkeypatch.context() as patch:
        patch.setattr(ModelExecutor, "execute", execute)
        assert job() == 75
    summary = job.summary
    assert summary["outcome"] == "interrupted"
    assert 0 < summary["rows"] < 12
    assert summary["total_rows"] == 12
    assert summary["lost_tokens"] is None
    assert not (job.out / "_SUCCESS").exists()
    text = text_of(page(job))
    assert "interrupted" in text
    assert "Stopped by SIGTERM" in text
    assert "of the requests that this run began" in text
    assert job() == 0
    assert job.summary["outcome"] == "done"
    assert "stopped by SIGTERM" not in page(job)
    assert "the last run, which made" in text_of(page(job))


def test_an_engine_that_fails_leaves_a_report_with_the_reason(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(rows(4))

    def execute(self: ModelExecutor, plan: Any) -> Any:
        raise RuntimeError("the card <fell> off")

    monkeypatch.setattr(ModelExecutor, "execute", execute)
    assert job() == 4
    assert job.summary["outcome"] == "engine_failed"
    assert "the card &lt;fell&gt; off" in page(job)


def test_a_report_that_cannot_be_made_keeps_no_run_from_its_own_end(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(rows(4))

    def fails(*_: Any) -> Any:
        raise RuntimeError("no more")

    monkeypatch.setattr("batchgen.job.accounts.account.write_report", fails)
    assert job() == 0
    assert (job.out / "_SUCCESS").exists()
    assert "no report could be made of this run: RuntimeError('no more')" in capsys.readouterr().err
    monkeypatch.setattr(ModelExecutor, "execute", fails)
    monkeypatch.setattr("batchgen.job.accounts.account.OutputTotals.read", fails)
    assert job("output.overwrite=true") == 4
    said = capsys.readouterr().err
    assert "no account could be given of this run" in said
    assert "failed: no more" in said


def test_a_run_with_nothing_left_to_compute_and_one_without_rows_have_reports(job: Job) -> None:
    job.write([{"id": "a", "prompt": None}])
    assert job() == 0
    assert "No step ran" in page(job)
    assert json.loads((job.out / "_summary.json").read_text())["steps"] == 0


def test_scored_rows_are_shown_by_their_label_and_ids_where_there_is_no_tokenizer(
    job: Job, copied_model: Path
) -> None:
    job.write(rows(3))
    assert job('sampling.score_choices=["yes","no"]') == 0
    assert re.search(r">(yes|no) \([\d.]+%\)<", page(job))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copied_model / name).unlink(missing_ok=True)
    job.write([{"id": "a", "prompt_token_ids": [5, 6, 7]}])
    assert job("output.overwrite=true") == 0
    assert "5 6 7" in text_of(page(job))
