"""The stored speeds of earlier runs, and what a plan makes of them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from batchgen.job.dry_run.speeds import Setting, Speed, SpeedBook, Work, estimate
from batchgen.report.plan_text import time_text
from tests.job.harness import Job

HERE = Setting("a cpu, 2 threads", "shapes", "float32", "auto")
ELSEWHERE = Setting("another cpu, 8 threads", "shapes", "float32", "auto")


def speed(**changed: Any) -> Speed:
    values = {
        "job": "a", "prefill_tokens": 10_000, "prefill_s": 10.0, "decode_tokens": 5_000,
        "decode_s": 10.0, "overhead_s": 0.0, "rows": 100.0, "output_share": 0.5,
    }  # fmt: skip
    return Speed(**{**values, **changed})


def work(**changed: Any) -> Work:
    values = {
        "job": "b", "prefill_tokens": 20_000, "requests": 100, "least_output_tokens": 100,
        "most_output_tokens": 2_100, "rows": 100,
    }  # fmt: skip
    return Work(**{**values, **changed})


def test_the_range_runs_from_the_fastest_run_and_no_output_to_the_slowest_and_all_of_it() -> None:
    runs = [speed(), speed(prefill_s=20.0, decode_s=20.0)]
    told = estimate(work(), runs)
    assert told is not None
    # 20,000 tokens at 1,000 or 500 a second; up to 2,000 decoded at 500 or 250 a second.
    assert told.low_s == pytest.approx(20 * 0.85)
    assert told.high_s == pytest.approx((40 + 8) * 1.15)
    assert (told.prefill_low_s, told.prefill_high_s) == (20 * 0.85, pytest.approx(40 * 1.15))


def test_a_run_of_the_same_job_narrows_the_output_and_time_beside_the_model_counts() -> None:
    told = estimate(work(job="a"), [speed(overhead_s=2.0)])
    assert told is not None
    decoded = [2_100 * 0.5 * factor - 100 for factor in (0.85, 1.15)]
    assert told.low_s == pytest.approx(1.1 * 0.85 * (20 + int(decoded[0]) / 500))
    assert told.high_s == pytest.approx(1.1 * 1.15 * (20 + int(decoded[1]) / 500), rel=1e-3)


def test_decode_speed_comes_from_runs_with_about_as_many_rows() -> None:
    runs = [speed(rows=2.0, decode_tokens=500), speed(rows=90.0)]
    few, many = estimate(work(rows=3), runs), estimate(work(rows=120), runs)
    assert few is not None
    assert many is not None
    assert few.decode_high_s == pytest.approx(2_000 / 50 * 1.15)
    assert many.decode_high_s == pytest.approx(2_000 / 500 * 1.15)


@pytest.mark.parametrize("runs", [[], [speed(prefill_tokens=10, decode_tokens=10)]])
def test_without_a_run_that_tells_there_is_no_estimate(runs: list[Speed]) -> None:
    assert estimate(work(), runs) is None
    assert estimate(work(most_output_tokens=100), runs) is None


def test_where_no_run_decoded_enough_the_prompts_have_a_range_and_the_whole_no_upper_end() -> None:
    told = estimate(work(), [speed(decode_tokens=199), speed(prefill_s=20.0, decode_tokens=0)])
    assert told is not None
    assert (told.prefill_low_s, told.prefill_high_s) == (20 * 0.85, pytest.approx(40 * 1.15))
    assert (told.low_s, told.high_s) == (20 * 0.85, None)
    assert (told.decode_low_s, told.decode_high_s) == (None, None)
    assert time_text(asdict(told)) == (
        "17 to 46 s for the prompts (2 stored runs of this model on this machine); "
        "not known for outputs: no stored run decoded 200 tokens"
    )


def test_where_no_run_computed_enough_prompts_the_outputs_have_a_range() -> None:
    told = estimate(work(least_output_tokens=1_100), [speed(prefill_tokens=999)])
    assert told is not None
    # 1,000 to 2,000 tokens behind the first ones, at 500 a second.
    assert (told.decode_low_s, told.decode_high_s) == (2 * 0.85, pytest.approx(4 * 1.15))
    assert (told.low_s, told.high_s, told.prefill_low_s) == (2 * 0.85, None, None)
    assert "not known for prompts: no stored run computed 1,000 tokens" in time_text(asdict(told))


def test_a_job_that_decodes_nothing_needs_no_decode_speed() -> None:
    told = estimate(work(most_output_tokens=100), [speed(decode_tokens=0)])
    assert told is not None
    assert told.high_s == pytest.approx(20 * 1.15)


def test_a_book_keeps_the_last_runs_of_each_setting_and_survives_torn_lines(tmp_path: Path) -> None:
    book = SpeedBook(tmp_path)
    for count in range(12):
        book.add(HERE, speed(rows=float(count)))
        book.add(ELSEWHERE, speed(rows=100.0))
    with book.path.open("a") as file:
        file.write('{"machine": "a cpu, 2 threads", "mod\n[]\n{"rows": null}\n')
    assert [each.rows for each in book.of(HERE)] == [float(count) for count in range(4, 12)]
    assert all(each.rows == 100.0 for each in book.of(ELSEWHERE))


def test_a_book_does_not_grow_for_ever(tmp_path: Path) -> None:
    book = SpeedBook(tmp_path)
    book.add(HERE, speed())
    book.path.write_text(book.path.read_text() * 1_000)
    book.add(HERE, speed(rows=7.0))
    assert len(book.path.read_text().splitlines()) == 500
    assert book.of(HERE)[-1].rows == 7.0


def test_runs_too_short_to_tell_and_places_that_cannot_be_written_leave_nothing(
    tmp_path: Path,
) -> None:
    SpeedBook(tmp_path).add(HERE, speed(prefill_tokens=5, decode_tokens=5))
    assert list(tmp_path.iterdir()) == []
    blocked = tmp_path / "file"
    blocked.touch()
    book = SpeedBook(blocked / "below")
    book.add(HERE, speed())
    assert book.of(HERE) == []


def test_a_plan_says_that_nothing_is_known_and_after_a_run_gives_a_range(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("batchgen.job.dry_run.speeds._FILE", f"{tmp_path.name}.jsonl")
    words = ["fox", "dog", "movie", "story"]
    job.write([{"id": n, "prompt": f"{words[n % 4]} {n} " * 20} for n in range(40)])
    assert job("mode=plan") == 0
    assert "no calibration yet" in capsys.readouterr().out
    assert job.json("_plan.json")["time"] is None
    assert job() == 0
    line = json.loads(SpeedBook().path.read_text())
    assert line["prefill_tokens"] == job.summary["prefill_tokens_computed"]
    assert not {"fox", str(job.input)} & set(map(str, line.values()))
    assert job("mode=plan") == 0
    told = job.json("_plan.json")["time"]
    assert 0 < told["low_s"] < told["high_s"]
    assert told["runs"] == 1
    assert "1 stored run" in capsys.readouterr().out
    SpeedBook().path.unlink()
