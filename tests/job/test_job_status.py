"""`mode=status`: how far a job is and what a resume would do, read and never written."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.cli import app
from batchgen.runtime.executor import ModelExecutor
from tests.data.crash import spoil
from tests.job.harness import Job

ROWS = [{"id": f"r{n}", "prompt": f"The quick brown fox {n % 9} jumps {n}"} for n in range(16)]

Ask = Callable[..., list[str]]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything in a folder, with its size and the time at which it last changed."""
    stats = {str(path): path.lstat() for path in [folder, *folder.rglob("*")]}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.fixture
def ask(job: Job, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Ask for the status: the lines, after checking that nothing in the directory changed."""

    def lines(*arguments: str) -> list[str]:
        before = snapshot(job.out)
        capsys.readouterr()
        assert job("mode=status", *arguments) == 0
        assert snapshot(job.out) == before
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.fixture
def bare(job: Job, ask: Ask) -> Ask:
    """Ask with nothing but the directory."""

    def lines(*arguments: str) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "given", {"output.dir": str(job.out)})
            return ask(*arguments)

    return lines


@pytest.fixture
def half(job: Job) -> Job:
    """A job of which some rows are finished and some are not."""
    job.write([*ROWS, {"id": "null", "prompt": None}])
    job.given |= {
        "engine.max_num_seqs": "4",
        "output.rows_per_part": "3",
        "pool.prefix_caching": "false",
        "sampling.ignore_eos": "true",
    }
    real = ModelExecutor.execute

    def execute(self: ModelExecutor, plan: Any) -> Any:
        if plan.step == 19:
            raise RuntimeError("the device is gone")
        return real(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelExecutor, "execute", execute)
        assert job() == 4
    return job


def test_a_directory_that_is_not_there_or_was_never_run_in(
    job: Job, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(ROWS)
    assert job("mode=status") == 2
    assert "does not exist, so no job has been run there" in capsys.readouterr().err
    job.out.mkdir()
    assert ask() == [f"{job.out}: no job has been run here"]


@pytest.mark.parametrize("named", [True, False])
def test_a_run_that_stopped_says_how_far_it_is_and_would_go_on(
    half: Job, ask: Ask, bare: Ask, named: bool
) -> None:
    begun = half.json("_manifest.json")["created"]
    assert (ask if named else bare)() == [
        f"{half.out}: begun {begun}",
        "run: none is at work",
        "rows: 9 of 17 done (52.9%), 8 left",
        "failed: 1 of the rows that are done (1 null_prompt)",
        "parts: 3 whole",
        "next: the same command goes on with the 8 rows that are left",
        "output.retry_errors=true runs the 1 failed rows again",
    ]


def test_a_finished_job_says_so(half: Job, ask: Ask, bare: Ask) -> None:
    assert half() == 0
    for lines in (ask(), bare()):
        assert "rows: 17 of 17 done (100.0%), 0 left" in lines
        assert "next: the job is complete; the same command does nothing and exits with 0" in lines


def test_a_command_of_another_job_would_be_refused_with_what_differs(half: Job, ask: Ask) -> None:
    long = "Read this. " * 30
    lines = ask("sampling.temperature=0.5", f"prompt.template='{long}{{{{ prompt }}}}'")
    at = lines.index("next: a run is refused. These differ:")
    assert "  sampling.temperature: 0.0 then, 0.5 now" in lines[at:]
    assert ask("output.resume=never")[-1] == (
        "next: a run is refused. output.resume=never refuses results that are there"
    )


def test_what_changed_on_disk_since_is_found_without_the_command(half: Job, bare: Ask) -> None:
    table = pq.read_table(half.input).to_pylist()
    table[3]["prompt"] = "another text"
    half.write(table)
    lines = bare()
    at = lines.index("next: a run is refused. These differ:")
    assert "  input.files.input.parquet.digest: its content has changed" in lines[at:]
    half.input.unlink()
    (refusal,) = [line for line in bare() if line.startswith("next: ")]
    assert refusal.startswith("next: a run is refused. input.path=")


def test_a_manifest_of_another_version_asks_for_the_command(half: Job, ask: Ask, bare: Ask) -> None:
    manifest = half.json("_manifest.json")
    (half.out / "_manifest.json").write_text(json.dumps(manifest | {"config": "{"}))
    assert "give the job's own keys beside mode=status" in bare()[-1]
    assert ask()[-2].startswith("next: the same command goes on")
    (half.out / "_manifest.json").write_text(json.dumps(manifest | {"config": "mode: run"}))
    assert "next: a run is refused" in "\n".join(bare())


@pytest.mark.parametrize("content", ["", "{", '{"schema_version": 1, "fingerprint": {}}'])
def test_a_damaged_manifest_is_named(
    half: Job, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (half.out / "_manifest.json").write_text(content)
    assert half("mode=status") == 2
    said = capsys.readouterr().err
    assert str(half.out) in said
    assert "Traceback" not in said


def test_damaged_parts_are_named_and_their_rows_are_left(half: Job, ask: Ask) -> None:
    torn = half.parts[1]
    torn.write_bytes(torn.read_bytes()[:100])
    lines = ask()
    assert "rows: 6 of 17 done (35.3%), 11 left" in lines
    assert "parts: 2 whole" in lines
    assert f"damaged: {torn.name}; the next run sets them aside and runs their rows again" in lines
    assert half() == 0


def test_damage_in_texts_is_found_by_who_verifies_and_then_mended(half: Job, ask: Ask) -> None:
    assert half() == 0
    expected, part = half.results(), half.parts[0]
    spoil(part, "generated_text")
    assert half() == 0
    assert not any("damaged" in line for line in ask())
    assert (
        f"damaged: {part.name}; the next run with output.verify=true sets them aside and runs "
        "their rows again"
    ) in ask("output.verify=true")
    assert half("output.verify=true") == 0
    assert half.results() == expected
    assert f"parts: {len(half.parts)} whole, all of them read" in ask("output.verify=true")


def test_rows_with_some_of_their_samples_count_as_begun_by_each_rows_own_number(
    job: Job, ask: Ask
) -> None:
    own = [None, json.dumps({"n": 1}), json.dumps({"n": 3}), None]
    rows = [{"id": n, "prompt": f"fox {n}", "sampling_params": own[n]} for n in range(4)]
    job.write(rows)
    job.given |= {"sampling.n": "2", "output.rows_per_part": "1", "engine.max_num_seqs": "1"}
    assert job() == 0
    for part in job.parts:
        row, sample = pq.read_table(part)["id"][0].as_py(), pq.read_table(part)["sample_index"]
        if (row, sample[0].as_py()) in ((0, 1), (2, 2)):
            part.unlink()
    assert ask()[2:5] == [
        "rows: 2 of 4 done (50.0%), 2 left",
        "begun: 2 rows have only some of their samples; made again whole",
        "parts: 6 whole",
    ]
    # Without the plan it goes by the job's number: two samples for each.
    shutil.rmtree(job.out / "_plan")
    assert ask()[2] == "rows: 2 of 4 done (50.0%), 2 left"
    (job.parts[-1]).unlink()
    assert ask()[3].startswith("begun: 3 rows")


def test_a_decided_replacement_counts_as_carried_out(half: Job, ask: Ask) -> None:
    stop = {"BATCHGEN_FAILPOINT": "replace.removed:kill"}
    child = half.start("output.order=input", environment=stop)
    assert child.wait() == -signal.SIGKILL, child.said
    lines = ask("output.order=input")
    assert "rows: 17 of 17 done (100.0%), 0 left" in lines
    assert "replacement: one is decided; the next run carries it out" in lines
    assert "next: every row is done; the same command finishes the output" in lines
    assert half("output.order=input") == 0
    assert not [line for line in ask("output.order=input") if line.startswith("replacement")]


def test_a_live_run_says_who_is_at_work_and_what_the_engine_does(half: Job, bare: Ask) -> None:
    for part in half.parts:
        part.unlink()
    child = half.start(environment={"BATCHGEN_FAILPOINT": "engine.step:stop:23"})
    child.wait_until(lambda: "failpoint engine.step: stop" in child.said)
    lines = bare()
    assert lines[1].startswith(f"run: process {child.pid} on {os.uname().nodename} since ")
    assert lines[1].endswith("is at work")
    assert lines[2].startswith("engine: 4 rows running, ")
    assert lines[3] == "rows: 9 of 17 done (52.9%), 8 left"
    assert lines[-1] == "next: another run is refused while that process is at work"
    child.send(signal.SIGCONT)
    assert child.wait() == 0, child.said


def test_it_does_not_keep_a_run_from_starting(half: Job, bare: Ask) -> None:
    child = half.start()
    while child.wait(0) is None:
        bare_says = app.main(["mode=status", f"output.dir={half.out}"])
        assert bare_says == 0
    assert child.wait() == 0, child.said


def test_a_directory_that_cannot_be_written_can_be_looked_at(half: Job, ask: Ask) -> None:
    half.out.chmod(0o555)
    try:
        assert "rows: 9 of 17 done (52.9%), 8 left" in ask()
    finally:
        half.out.chmod(0o755)


def test_only_one_of_model_and_input_is_no_command(
    half: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    del half.given["input.path"]
    assert half("mode=status") == 2
    assert "input.path" in capsys.readouterr().err
