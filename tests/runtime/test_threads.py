"""The threads of a process follow what it may use."""

import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.runtime.cpu import threads


@pytest.mark.parametrize(
    ("written", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1)],
)
def test_a_containers_quota_bounds_the_threads(
    written: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "cpu.max"
    limit.write_text(written)
    monkeypatch.setattr(threads, "_CGROUP_V2", limit)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert threads.usable_cores() == cores


def test_the_older_control_groups_are_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_CGROUP_V2", tmp_path / "none")
    monkeypatch.setattr(threads, "_CGROUP_V1", tmp_path)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert threads.usable_cores() == 8
    (tmp_path / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert threads.usable_cores() == 3
    (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads.usable_cores() == 8


@pytest.mark.parametrize(
    ("environment", "asked", "expected"), [("", 1, 1), ("1", None, 1), ("1", 2, 2)]
)
def test_what_is_asked_for_wins_then_the_environment(
    environment: str, asked: int | None, expected: int
) -> None:
    code = f"from batchgen.runtime.cpu.threads import use_threads; print(use_threads({asked}))"
    env = {"OMP_NUM_THREADS": environment} if environment else {}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert int(answer.stdout) == expected
