"""Full, read-only, failing and slow disks; clocks that jump; two runs in one directory."""

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.data.output import files as files_module
from batchgen.data.stores.lock import DirectoryLock
from tests.job.harness import Job

ROWS = [{"id": n, "prompt": f"The quick brown fox {n % 5} jumps {n}"} for n in range(16)]
FULL = "No space left on device"


@pytest.fixture
def small(job: Job) -> Job:
    job.write(ROWS)
    job.given |= {"engine.max_num_seqs": "4", "output.rows_per_part": "3"}
    return job


@pytest.fixture
def expected(small: Job) -> list[Any]:
    assert small(f"output.dir={small.folder / 'whole'}") == 0
    out, small.out = small.out, small.folder / "whole"
    results = small.results()
    small.out = out
    return results


class Disk:
    """A small disk that can be filled; where none can be mounted, a folder that acts as one."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = patch
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
        self.is_real = subprocess.run(command, check=False, capture_output=True).returncode == 0

    def fill(self, point: str) -> None:
        """Leave no room from now on; on a folder that acts as a disk from a failpoint on."""
        if not self.is_real:
            self._patch.setenv("BATCHGEN_FAILPOINT", f"{point}:enospc")
            return
        with contextlib.suppress(OSError), (self.folder / "ballast").open("wb", 0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Make room again."""
        self._patch.delenv("BATCHGEN_FAILPOINT", raising=False)
        (self.folder / "ballast").unlink(missing_ok=True)

    def freeze(self) -> None:
        """Let nothing be written any more."""
        if self.is_real:
            subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True)
        else:
            self.folder.joinpath("out").chmod(0o555)

    def thaw(self) -> None:
        if self.is_real:
            subprocess.run(["mount", "-o", "remount,rw", str(self.folder)], check=True)
        else:
            self.folder.joinpath("out").chmod(0o755)

    def remove(self) -> None:
        if self.is_real:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk", monkeypatch)
    yield disk
    disk.remove()


def on(disk: Disk, job: Job) -> Job:
    job.out = disk.folder / "out"
    job.given["output.dir"] = str(job.out)
    return job


WHEN = {
    "before the first file": ("lock.begin", 2),
    "before the manifest": ("manifest.begin", 1),
    "while planning": ("prompts.begin", 1),
    "at a part": ("part.begin", 1),
    "at the failed rows": ("errors.begin", 1),
    "while sorting": ("sort.dealt", 1),
    "at the record of a replacement": ("switch.begin", 1),
    "at the summary": ("summary.begin", 1),
}


@pytest.mark.parametrize("when", WHEN)
def test_h02_a_disk_that_fills_up_ends_the_run_and_freed_the_same_command_goes_on(
    small: Job,
    disk: Disk,
    expected: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    when: str,
) -> None:
    point, code = WHEN[when]
    small.write([*ROWS, {"id": 99, "prompt": None}])
    job = on(disk, small)
    real = files_module.failpoints.reached

    def reached(name: str) -> None:
        if name == point:
            disk.fill(name)
        real(name)

    monkeypatch.setattr(files_module.failpoints, "reached", reached)
    assert job("output.order=input") == code
    said = capsys.readouterr().err
    assert FULL in said
    assert str(job.out) in said
    assert "Traceback" not in said
    for part in job.parts:
        assert pq.read_table(part).num_rows > 0
    monkeypatch.setattr(files_module.failpoints, "reached", real)
    disk.free()
    assert job("output.order=input") == 0
    assert [row for row in job.results() if row[0] != "99"] == expected
    assert len(job.rows()) == 17


def test_a_read_only_disk_is_refused_before_anything_is_loaded(
    small: Job, disk: Disk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = on(disk, small)
    assert job() == 0
    before = job.results()
    disk.freeze()
    monkeypatch.setattr("batchgen.run.load_job_model", lambda config: pytest.fail("loaded"))
    if disk.is_real or os.geteuid():
        assert job("output.overwrite=true") == 2
        assert f"output.dir={job.out} cannot be used" in capsys.readouterr().err
    assert job("mode=status") == 0
    assert "next: the job is complete" in capsys.readouterr().out
    assert job.results() == before
    disk.thaw()
    assert job() == 0


def test_a_slow_disk_only_takes_longer(
    small: Job, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.02)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    assert small("output.rows_per_part=1", "output.order=input") == 0
    assert small.results() == expected


def test_a_clock_that_jumps_changes_nothing(
    small: Job, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(4)
    monkeypatch.setattr(time, "time", lambda: draw.uniform(-1e9, 4e9))
    assert small("budget.wall_time_s=3600", "engine.stall_s=60", "log.every_s=0.01") == 0
    assert small.results() == expected
    assert 0 < small.summary["wall_s"] < 60


def test_h09_a_second_run_is_refused_and_harms_nothing_of_the_first(
    small: Job, expected: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    child = small.start(environment={"BATCHGEN_FAILPOINT": "part.written:stop:2"})
    child.wait_until(lambda: "failpoint part.written: stop" in child.said)
    files = set(small.out.rglob("*"))
    assert any(path.name.startswith("_tmp") for path in files)
    for arguments in ((), ("output.overwrite=true",), ("mode=plan",)):
        assert small(*arguments) == 2
        assert f"is in use by process {child.pid} on " in capsys.readouterr().err
    assert set(small.out.rglob("*")) == files
    child.send(signal.SIGCONT)
    assert child.wait() == 0, child.said
    assert small.results() == expected


def test_h09_a_lock_whose_owner_was_killed_is_taken_over(
    small: Job, expected: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    child = small.start(environment={"BATCHGEN_FAILPOINT": "part.written:kill:2"})
    assert child.wait() == -signal.SIGKILL
    assert str(child.pid) in (small.out / "_lock").read_text()
    (small.out / "_lock").chmod(0o644)
    assert small() == 0
    assert small.results() == expected
    assert not (small.out / "_lock").exists()


def test_h09_of_runs_that_start_at_once_one_works_and_the_others_are_refused(
    small: Job, expected: list[Any]
) -> None:
    logs = [small.folder / f"log-{n}.txt" for n in range(4)]
    children = [small.start(log=log) for log in logs]
    codes = [child.wait() for child in children]
    # One that starts when the first has ended finds all done.
    assert 0 in codes
    assert set(codes) <= {0, 2}, [child.said for child in children]
    assert small.results() == expected
    assert not [path for path in small.out.iterdir() if path.name.startswith("_tmp")]


def test_a_lock_is_waited_for_where_somebody_only_looks(tmp_path: Path) -> None:
    path = tmp_path / "_lock"
    path.write_text("{}")
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    timer = threading.Timer(0.2, lambda: os.close(descriptor))
    timer.start()
    lock = DirectoryLock(path)
    lock.acquire()
    lock.release()
    timer.join()
    assert not path.exists()


@pytest.mark.parametrize("points", [("part.synced", "success.begin"), ("plan.begin",)])
def test_a_disk_that_fails_now_and_then_loses_nothing_however_often(
    small: Job, expected: list[Any], monkeypatch: pytest.MonkeyPatch, points: tuple[str, ...]
) -> None:
    for point in points:
        monkeypatch.setenv("BATCHGEN_FAILPOINT", f"{point}:eio")
        assert small() == 1
        assert not (small.out / "_SUCCESS").exists()
    assert small() == 0
    assert small.results() == expected
