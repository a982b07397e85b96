"""What is kept between runs: where, for whom, and what happens when it is damaged."""

import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen.job.dry_run.speeds import SpeedBook
from batchgen.kernels.native import compiler
from batchgen.user_cache import cache_folder

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget where the cache is, before and after; temporary files are the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache_folder.cache_clear()
    yield
    cache_folder.cache_clear()


def no_such_user(uid: int) -> None:
    raise KeyError(f"getpwuid(): uid not found: {uid}")


def test_t22_without_home_and_user_name_the_cache_is_a_private_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_such_user)
    folder = cache_folder()
    assert folder == tmp_path / f"batchgen-cache-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert SpeedBook().path.parent == folder


@pytest.mark.parametrize("is_file", [True, False])
def test_t22_a_home_that_cannot_hold_a_cache_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_file: bool
) -> None:
    home = tmp_path / "home"
    if is_file:
        home.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home) if is_file else "/proc/nowhere")
    assert cache_folder().parent == tmp_path


def test_t22_a_temporary_directory_of_another_user_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    theirs = tmp_path / f"batchgen-cache-{os.getuid() + 1}"
    theirs.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    assert cache_folder() != theirs
    assert cache_folder().name.startswith("batchgen-")


@pytest.mark.parametrize("kept_bytes", [0, 1, 4096, -1])
def test_t22_a_compiled_library_that_was_cut_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "answer.c"
    source.write_text(SOURCE)
    assert compiler.load_library(source, {}).answer() == 42
    [library] = cache_folder().iterdir()
    whole = library.read_bytes()
    # Another file: the one that this process has mapped must not shrink under it.
    library.unlink()
    library.write_bytes(whole[:kept_bytes])
    assert compiler.load_library(source, {}).answer() == 42
    assert list(cache_folder().iterdir()) == [library]
    assert library.read_bytes() == whole


def test_t22_a_compiler_without_threads_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, cc = tmp_path / "answer.c", tmp_path / "cc"
    source.write_text(SOURCE)
    refuse = 'case "$*" in *-fopenmp*) echo no OpenMP here >&2; exit 1;; esac'
    cc.write_text(f'#!/bin/sh\n{refuse}\nexec gcc "$@"\n')
    cc.chmod(0o755)
    monkeypatch.setenv("CC", str(cc))
    assert compiler.load_library(source, {}).answer() == 42
    assert "answer.c runs on one thread: no OpenMP here" in caplog.text
