"""`log.format=json` and `log.prometheus_file` over the whole command."""

import json
import os
import signal
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import batchgen.run
from batchgen.runtime.executor import ModelExecutor
from tests.job.harness import Job

ROWS = [{"id": n, "prompt": f"The quick brown fox {n}"} for n in range(12)]


@pytest.fixture
def logged(job: Job) -> Job:
    job.write(ROWS)
    job.given |= {"log.format": "json", "log.every_s": "0.001", "engine.max_num_seqs": "4"}
    job.given |= {"log.prometheus_file": str(job.folder / "job.prom")}
    return job


def metrics(job: Job) -> dict[str, float]:
    text = (job.folder / "job.prom").read_text()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_of_a_run_is_an_event_and_the_figures_are_the_summarys(logged: Job) -> None:
    child = logged.start()
    assert child.wait() == 0
    events = parsed(child.said)
    names = [event["event"] for event in events]
    assert (names[0], names[-1]) == ("job_started", "job_ended")
    phases = [event["phase"] for event in events if event["event"] == "phase_ended"]
    assert phases == ["plan", "load", "generate", "write"]
    shown = [event for event in events if event["event"] == "progress"]
    assert [event["rows"] for event in shown] == sorted(event["rows"] for event in shown)
    assert (shown[-1]["rows"], shown[-1]["eta_s"]) == (12, 0.0)
    (figures,) = (event["figures"] for event in events if event["event"] == "summary")
    assert figures == logged.summary
    assert (events[-1]["exit_code"], events[-1]["outcome"]) == (0, "done")
    found = metrics(logged)
    assert (found["batchgen_exit_code"], found["batchgen_up"]) == (0, 0)
    assert found["batchgen_rows_done"] == found["batchgen_rows"] == 12
    assert found["batchgen_generated_tokens"] == logged.summary["generated_tokens"]


def test_what_ends_a_run_early_is_an_event_with_its_exit_code(logged: Job, capsys: Any) -> None:
    assert logged("prompt.column=nothing") == 2
    *_, said, ended = parsed(capsys.readouterr().err)
    assert (said["event"], said["level"], said["exit_code"]) == ("error", "error", 2)
    assert "prompt.column" in said["message"]
    assert (ended["event"], ended["exit_code"]) == ("job_ended", 2)
    assert metrics(logged)["batchgen_exit_code"] == 2


def test_an_unexpected_failure_is_one_event_with_its_traceback(
    logged: Job, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(batchgen.run, "plan_job", fail)
    assert logged() == 1
    (said,) = (event for event in parsed(capsys.readouterr().err) if event["event"] == "error")
    assert "Traceback" in said["message"]
    assert "no idea" in said["message"]
    assert metrics(logged)["batchgen_exit_code"] == 1


def test_an_interrupted_run_says_75_and_the_next_one_the_last_success(
    logged: Job, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ModelExecutor.execute

    def interrupted(self: ModelExecutor, plan: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return real(self, plan)

    with monkeypatch.context() as patch:
        patch.setattr(ModelExecutor, "execute", interrupted)
        assert logged() == 75
    assert parsed(capsys.readouterr().err)[-1]["exit_code"] == 75
    found = metrics(logged)
    assert found["batchgen_exit_code"] == 75
    assert "batchgen_last_success_timestamp_seconds" not in found
    assert logged() == 0
    success = metrics(logged)["batchgen_last_success_timestamp_seconds"]
    # Another look at a finished job is a success as well; a plan is no news of it.
    assert logged("mode=plan") == 0
    assert metrics(logged)["batchgen_last_success_timestamp_seconds"] == success


def _speak_to_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_that_nobody_reads_any_more_costs_no_row(logged: Job, form: str) -> None:
    assert logged.start(f"log.format={form}", before=_speak_to_nobody).wait() == 0
    assert len(logged.rows()) == len(ROWS)
    assert (logged.out / "_SUCCESS").exists()


def test_text_stays_what_it_was(logged: Job, capsys: Any) -> None:
    assert logged("log.format=text") == 0
    said = capsys.readouterr().err
    assert "[generate]" in said
    assert not any(line.startswith("{") for line in said.splitlines())


@pytest.mark.parametrize(
    ("value", "words"),
    [("job.txt", "must end in .prom"), ("no/where/job.prom", "there is no directory")],
)
def test_a_file_that_no_collector_would_read_is_refused(
    logged: Job, capsys: Any, value: str, words: str
) -> None:
    assert logged(f"log.prometheus_file={value}") == 2
    assert words in capsys.readouterr().err
