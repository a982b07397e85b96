"""A job that was stopped in some way goes on with the same command, and only then."""

import errno
import gc
import itertools
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.data.output import parts as parts_module
from batchgen.runtime.executor import ModelExecutor
from tests.job.harness import Job

ROWS = [{"id": f"r{n}", "prompt": f"The quick brown fox {n % 9} jumps {n}"} for n in range(16)]


def snapshot(folder: Path) -> dict[str, int]:
    """Every file with the time it was written."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): path.stat().st_mtime_ns for path in files}


@pytest.fixture
def break_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the engine fail at some step, once."""
    real = ModelExecutor.execute

    def arm(at: int) -> None:
        steps = itertools.count()

        def execute(self: ModelExecutor, plan: Any) -> Any:
            if next(steps) == at:
                raise RuntimeError("the device is gone")
            return real(self, plan)

        monkeypatch.setattr(ModelExecutor, "execute", execute)

    return arm


@pytest.fixture
def half(job: Job, break_engine: Callable[[int], None]) -> Job:
    """A job of which some rows are finished and some are not."""
    job.write(ROWS)
    job.given |= {"engine.max_num_seqs": "4", "output.rows_per_part": "3"}
    break_engine(19)
    assert job() == 4
    assert 0 < len(job.rows()) < len(ROWS)
    return job


def test_an_engine_that_fails_for_good_exits_4_and_keeps_what_is_finished(half: Job) -> None:
    assert not (half.out / "_SUCCESS").exists()
    kept = half.rows("id")
    assert half() == 0
    summary = half.summary
    assert summary["resumed_rows"] == len(kept)
    assert summary["requests"] == len(ROWS) - len(kept)
    assert summary["rows"] == len(ROWS)
    assert {row["id"] for row in half.rows()} == {row["id"] for row in ROWS}


def test_a_resumed_run_gives_what_an_undisturbed_one_gives(half: Job) -> None:
    assert half() == 0
    resumed = half.results()
    assert half("output.overwrite=true") == 0
    assert half.summary["resumed_rows"] == 0
    assert half.results() == resumed


def test_the_same_command_on_a_finished_directory_does_nothing(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(ROWS)
    assert job() == 0
    assert (job.out / "_SUCCESS").exists()
    before = snapshot(job.out)
    capsys.readouterr()
    assert job() == 0
    assert snapshot(job.out) == before
    assert f"all 16 rows are in {job.out} already" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"PAR1")])
def test_rows_that_went_missing_from_a_finished_directory_are_made_again(
    job: Job, damage: Callable[[Path], Any]
) -> None:
    job.write(ROWS)
    assert job("output.rows_per_part=4") == 0
    expected = job.results()
    damage(job.parts[1])
    assert job("output.rows_per_part=4") == 0
    assert job.results() == expected
    assert job.summary["requests"] == 4
    assert (job.out / "_SUCCESS").exists()


def test_h03_repeated_prompts_are_told_apart_when_a_run_goes_on(
    job: Job, break_engine: Callable[[int], None]
) -> None:
    prompts = ["same", "other", "same", "another", "same"]
    job.write([{"id": n, "prompt": prompt} for n, prompt in enumerate(prompts)])
    # Random rows, so that each of the three is a request of its own.
    job.given |= {
        "sampling.temperature": "1",
        "engine.max_num_seqs": "1",
        "output.rows_per_part": "1",
        "schedule.order": "input",
    }
    break_engine(10)
    assert job() == 4
    assert job.rows("id") == [{"id": 0}]
    assert job() == 0
    assert [row["id"] for row in job.rows()] == [0, 1, 2, 3, 4]
    assert job.summary["requests"] == 4


def test_a_part_with_some_copies_of_a_greedy_row_is_no_trouble(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write([{"id": n, "prompt": "same"} for n in range(7)])
    job.given |= {"sampling.n": "2", "output.rows_per_part": "3"}
    assert job() == 0
    expected = job.results()
    for part in job.parts[1:]:
        part.unlink()
    assert job() == 0
    assert job.results() == expected


def test_h05_failed_rows_are_run_again_only_when_asked(job: Job) -> None:
    job.write([{"id": n, "prompt": prompt} for n, prompt in enumerate(["one", None, "three"])])
    assert job() == 0
    before, expected = snapshot(job.out), job.results()
    for _ in range(2):
        assert job() == 0
        assert snapshot(job.out) == before
    assert job("output.retry_errors=true") == 0
    assert job.results() == expected
    assert job.summary["requests"] == 0
    assert job.summary["resumed_rows"] == 2


def test_h05_a_retry_computes_the_failed_rows_and_no_others(job: Job) -> None:
    long = "The quick brown fox jumps over the lazy dog. " * 3
    job.write([{"id": 0, "prompt": "short"}, {"id": 1, "prompt": long}])
    assert job("pool.num_blocks=2") == 0
    assert [row["status"] for row in job.rows()] == ["ok", "error"]
    assert job("output.retry_errors=true") == 0
    assert [row["status"] for row in job.rows()] == ["ok", "ok"]
    assert job.summary["requests"] == 1
    assert not (job.out / "_errors").exists()


def edit_weights(job: Job) -> tuple[str, ...]:
    weights = Path(job.given["model.path"]) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    return ()


def edit_input(job: Job) -> tuple[str, ...]:
    content = job.input.read_bytes()
    table = pq.read_table(job.input).to_pylist()
    table[3]["prompt"] = table[3]["prompt"].replace("quick", "brown")
    job.write(table)
    assert job.input.read_bytes() != content
    return ()


def edit_template(job: Job) -> tuple[str, ...]:
    Path(job.given["prompt.template_file"]).write_text("Words: {{ prompt }}")
    return ()


REFUSED = {
    "sampling.temperature": lambda job: ("sampling.temperature=0.5",),
    "sampling.max_tokens": lambda job: ("sampling.max_tokens=9",),
    "model.dtype": lambda job: ("model.dtype=bfloat16",),
    "model.files.model.safetensors": edit_weights,
    "prompt.template": edit_template,
    "input.files.input.parquet": edit_input,
    "input.limit": lambda job: ("input.limit=15",),
}
ALLOWED = [
    ("engine.max_num_seqs=7",),
    ("pool.num_blocks=100", "pool.block_size=32", "pool.swap_blocks=0"),
    ("log.every_s=3",),
    ("schedule.order=length", "output.rows_per_part=2"),
    ("engine.preemption=recompute", "engine.admission=worst_case"),
]


def test_h06_what_changes_a_result_is_refused_by_name_and_what_does_not_is_allowed(
    job: Job,
    copied_model: Path,
    break_engine: Callable[[int], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    template = tmp_path / "prompt.j2"
    template.write_text("Text: {{ prompt }}")
    job.write(ROWS)
    job.given |= {
        "prompt.template_file": str(template),
        "engine.max_num_seqs": "4",
        "output.rows_per_part": "3",
    }
    break_engine(19)
    assert job() == 4
    half = tmp_path / "half"
    shutil.copytree(job.out, half)
    before = {part: part.read_bytes() for part in job.parts}
    edited = (template, job.input, copied_model / "model.safetensors")
    originals = {path: path.read_bytes() for path in edited}
    for key, change in REFUSED.items():
        arguments = change(job)
        capsys.readouterr()
        assert job(*arguments) == 2, key
        assert f"  {key}" in capsys.readouterr().err
        assert {part: part.read_bytes() for part in job.parts} == before
        for path, content in originals.items():
            path.write_bytes(content)
    for arguments in ALLOWED:
        shutil.rmtree(job.out)
        shutil.copytree(half, job.out)
        assert job(*arguments) == 0, arguments
        assert len(job.rows()) == len(ROWS)


def full_disk_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the disk be full when a part is written, half-way through it."""
    real, calls = pq.write_table, itertools.count(1)

    def write_table(table: Any, file: Any, **options: Any) -> None:
        if next(calls) == number:
            file.write(b"PAR1 and no more")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(table, file, **options)

    monkeypatch.setattr(parts_module.pq, "write_table", write_table)


def test_h02_a_full_disk_ends_the_run_and_leaves_whole_parts_only(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(ROWS)
    job.given["output.rows_per_part"] = "4"
    full_disk_at(monkeypatch, 2)
    assert job() == 1
    said = capsys.readouterr().err
    assert f"cannot write {job.out}/part-00001-" in said
    assert "No space left on device" in said
    assert "Traceback" not in said
    assert [pq.read_metadata(part).num_rows for part in job.parts] == [4]
    assert not (job.out / "_SUCCESS").exists()
    assert job() == 0
    assert len(job.rows()) == len(ROWS)
    assert job.summary["resumed_rows"] == 4


def test_h02_a_disk_that_is_full_while_planning_is_told_with_the_path(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job.write(ROWS)
    with monkeypatch.context() as patch:
        patch.setattr("batchgen.prompts.store.pa.ipc.new_file", no_space)
        assert job() == 1
    said = capsys.readouterr().err
    assert f"cannot write {job.out}/_plan/prompts.arrow" in said
    assert "Traceback" not in said
    assert job() == 0


def test_a_directory_in_completion_order_can_be_brought_into_input_order(job: Job) -> None:
    prompts = [f"{'zyxwvutsrq'[n]} words" for n in range(10)]
    job.write([{"id": n, "prompt": prompt} for n, prompt in enumerate(prompts)])
    assert job() == 0
    expected = job.results()
    assert pq.read_table(job.out)["row_index"].to_pylist() != list(range(10))
    assert job("output.order=input", "output.rows_per_part=3") == 0
    assert job.summary["requests"] == 0
    assert pq.read_table(job.out)["row_index"].to_pylist() == list(range(10))
    assert job.results() == expected
    before = snapshot(job.out)
    assert job("output.order=input", "output.rows_per_part=3") == 0
    assert snapshot(job.out) == before


def test_two_runs_in_one_process_leave_no_files_or_threads_behind(job: Job) -> None:
    def open_files() -> list[str]:
        gc.collect()
        links = Path("/proc/self/fd").iterdir()
        return sorted(str(link.readlink()) for link in links if link.is_symlink())

    job.write(ROWS)
    assert job() == 0
    files, threads = open_files(), threading.active_count()
    assert job("output.overwrite=true") == 0
    assert open_files() == files
    assert threading.active_count() == threads
    assert str(job.out) not in Path("/proc/self/maps").read_text()


def test_an_input_that_is_replaced_while_it_is_planned_is_refused_before_anything_is_made(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(ROWS)
    changed = [row | {"prompt": f"other {row['id']}"} for row in ROWS]

    def reached(name: str) -> None:
        if name == "prompts.begin":
            job.write(changed)

    with monkeypatch.context() as patch:
        patch.setattr("batchgen.job.planning.failpoints.reached", reached)
        assert job() == 2
    assert f"{job.input} has been changed since this run began" in capsys.readouterr().err
    assert not job.parts
    assert job() == 0
    assert len(job.rows()) == len(ROWS)


def test_failed_rows_are_not_copied_from_an_input_that_was_replaced_meanwhile(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS, {"id": "bad", "prompt": None}]
    job.write(rows)
    given = job.input.read_bytes()

    def reached(name: str) -> None:
        if name == "errors.begin":
            job.write([row | {"prompt": "another"} for row in rows])

    with monkeypatch.context() as patch:
        patch.setattr("batchgen.data.output.failed_rows.failpoints.reached", reached)
        assert job() == 1
    said = capsys.readouterr().err
    assert f"{job.input} has been changed since this run began" in said
    assert "put the input back as it was and run the same command again" in said
    assert not (job.out / "_errors").exists()
    assert len(job.rows()) == len(rows)
    job.input.write_bytes(given)
    assert job() == 0
    assert job.summary["requests"] == 0
    assert pq.read_table(job.out / "_errors").to_pylist() == rows[-1:]


@pytest.mark.parametrize("order", ["completion", "input"])
@pytest.mark.parametrize("kind", ["other rows", "other results", "the same job"])
def test_a_part_of_another_output_is_set_aside_and_its_rows_are_run_again(
    job: Job,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    order: str,
) -> None:
    job.given |= {"output.rows_per_part": "4", "output.order": order}
    other = job.folder / "other"
    changed = "x" if kind == "other rows" else ""
    job.write([row | {"id": f"{changed}{row['id']}"} for row in ROWS])
    fewer = "sampling.max_tokens=2" if kind == "other results" else "sampling.max_tokens=8"
    assert job(f"output.dir={other}", fewer) == 0
    job.write(ROWS)
    assert job() == 0
    expected = job.results()
    foreign = sorted(other.glob("part-*.parquet"))
    shutil.copy(foreign[1], job.parts[1])
    added = shutil.copy(foreign[2], job.out / "part-00077-0123abcd.parquet")
    assert job("mode=status") == 0
    assert f"damaged: {job.parts[1].name}, {added.name}; " in capsys.readouterr().out
    assert job() == 0
    assert caplog.text.count("another job or another run of it wrote it") == 2
    assert job.results() == expected
    assert len(list((job.out / "_quarantine").iterdir())) == 2
    # What replaces parts keeps them known as their output's own.
    assert job("output.retry_errors=true", "output.order=input") == 0
    assert job.results() == expected
    numbers = {pq.read_schema(part).metadata[b"batchgen.output_id"] for part in job.parts}
    assert numbers == {job.json("_manifest.json")["output_id"].encode()}


def test_an_output_of_before_parts_had_its_number_goes_on(job: Job) -> None:
    job.write(ROWS)
    assert job("output.rows_per_part=4") == 0
    expected = job.results()
    manifest = job.out / "_manifest.json"
    content = json.loads(manifest.read_text())
    del content["output_id"]
    manifest.write_text(json.dumps(content))
    for part in job.parts:
        pq.write_table(pq.read_table(part).replace_schema_metadata(), part)
    job.parts[1].unlink()
    assert job("output.rows_per_part=4") == 0
    assert job.results() == expected
    assert not (job.out / "_quarantine").exists()
