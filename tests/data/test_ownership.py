"""Who owns an output directory: whoever has its lock, and only as long as it is there."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.output.directory import OutputDir
from batchgen.data.output.files import OutputError
from batchgen.data.output.parts import list_parts
from batchgen.data.output.schema import RowResult
from batchgen.data.stores.lock import DirectoryLock, Owner
from batchgen.errors import UsageError
from tests.data.crash import INT, begin, keys, ok, run, write

ROOT = Path(__file__).resolve().parents[2]
BOOKS = ("_lock", "_SUCCESS", "_manifest.json", "_metrics.jsonl", "_summary.json", "_switch.json")


def _content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


# Another process that begins a run, writes row 1, waits for a line, and ends.
_SECOND = """
import sys
from pathlib import Path
from batchgen.data.output.directory import OutputDir
from tests.data.crash import begin, ok, write
with OutputDir(Path(sys.argv[1])) as out:
    begin(out)
    write(out.path, ok(1))
    print(flush=True)
    sys.stdin.readline()
"""


def test_t07_a_run_whose_lock_was_removed_stops_though_the_other_run_has_ended(
    tmp_path: Path,
) -> None:
    with OutputDir(tmp_path) as out:
        begin(out)
        write(tmp_path, ok(0))
        (tmp_path / "_lock").unlink()
        command = [sys.executable, "-c", _SECOND, str(tmp_path)]
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True)
        before = _content(tmp_path)
        with pytest.raises(OutputError, match=r"another run may have taken .* _lock was removed"):
            write(tmp_path, ok(1))
    assert _content(tmp_path) == before
    run(tmp_path, ok(2))
    assert keys(tmp_path) == [(0, 0), (1, 0), (2, 0)]


def test_t07_a_run_whose_directory_was_taken_over_changes_nothing_any_more(tmp_path: Path) -> None:
    with OutputDir(tmp_path) as first:
        begin(first)
        write(tmp_path, ok(0))
        (tmp_path / "_lock").unlink()
        command = [sys.executable, "-c", _SECOND, str(tmp_path)]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as second:
            assert second.stdin is not None
            assert second.stdout is not None
            assert second.stdout.readline()
            before = _content(tmp_path)
            for attempt in (
                lambda: write(tmp_path, ok(2)),
                first.begin_work,
                first.mark_success,
                lambda: first.write_json("_summary.json", {}),
                first.discard_errors,
            ):
                with pytest.raises(OutputError, match=r"process \d+ .* has taken .* over"):
                    attempt()
            # Nor does its end take a lock away that is another's.
            first.__exit__(None, None, None)
            assert _content(tmp_path) == before
            second.stdin.write("\n")
        assert second.returncode == 0
    run(tmp_path, ok(2))
    assert keys(tmp_path) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("is_emptied", [False, True])
def test_t07_a_directory_that_was_made_anew_gets_nothing_of_the_old_run(
    is_emptied: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "out"
    with OutputDir(directory) as out:
        begin(out)
        write(directory, ok(0))
        if is_emptied:
            for path in directory.iterdir():
                path.unlink()
        else:
            shutil.rmtree(directory)
            directory.mkdir()
        with pytest.raises(OutputError, match="no longer holds the output that this run began"):
            write(directory, ok(1))
    assert list_parts(directory) == []
    run(directory, ok(0), ok(1))
    assert keys(directory) == [(0, 0), (1, 0)]


def test_another_outputs_manifest_under_a_run_ends_it(tmp_path: Path) -> None:
    """A neighbour that no list names: the lock is ours still, the output is not."""
    with OutputDir(tmp_path) as out:
        begin(out)
        manifest = json.loads((tmp_path / "_manifest.json").read_text())
        (tmp_path / "_manifest.json").write_text(json.dumps(manifest | {"output_id": "other"}))
        with pytest.raises(OutputError, match="no longer holds the output"):
            write(tmp_path, ok(0))
    assert list_parts(tmp_path) == []


# -- without locks ----------------------------------------------------------------------------


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks")
def test_t07_without_locks_the_file_keeps_a_second_run_out(tmp_path: Path) -> None:
    with OutputDir(tmp_path) as out:
        begin(out)
        before = _content(tmp_path)
        other = Owner(socket.gethostname(), os.getppid(), "now", "another")
        (tmp_path / "_lock").write_text(json.dumps(vars_of(other)))
        signed = _content(tmp_path)
        with pytest.raises(UsageError, match=r"file system without locks.*remove .*_lock"):
            DirectoryLock(tmp_path / "_lock").acquire()
        assert _content(tmp_path) == signed
        (tmp_path / "_lock").write_bytes(before["_lock"])
        write(tmp_path, ok(0))
    assert sorted(path.name for path in tmp_path.iterdir() if "lock" in path.name) == []
    assert keys(tmp_path) == [(0, 0)]


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_file_of_a_dead_process_here_is_taken_over_and_of_elsewhere_not(
    tmp_path: Path,
) -> None:
    process = multiprocessing.get_context("fork").Process(target=lambda: None)
    process.start()
    process.join()
    assert process.pid is not None
    dead = Owner(socket.gethostname(), process.pid, "then", "gone")
    (tmp_path / "_lock").write_text(json.dumps(vars_of(dead)))
    run(tmp_path, ok(0))
    elsewhere = Owner("another-machine", process.pid, "then", "there")
    (tmp_path / "_lock").write_text(json.dumps(vars_of(elsewhere)))
    with pytest.raises(UsageError, match="another-machine"):
        run(tmp_path, ok(1))
    (tmp_path / "_lock").unlink()
    run(tmp_path, ok(1))
    assert keys(tmp_path) == [(0, 0), (1, 0)]


def vars_of(owner: Owner) -> dict[str, object]:
    return {name: getattr(owner, name) for name in ("host", "pid", "started", "command")}


# -- copies, links, records ----------------------------------------------------------------------


def test_t07_equal_copies_of_rows_heal_and_different_ones_are_named(tmp_path: Path) -> None:
    run(tmp_path, ok(0), ok(1))
    run(tmp_path, ok(2), ok(1), ok(0, 1))
    with OutputDir(tmp_path) as out:
        assert out.finished_rows(INT).num_rows == 4
    assert sorted(keys(tmp_path)) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert pq.read_table(list_parts(tmp_path)).num_rows == 4
    run(tmp_path, RowResult(2, 2, 0, "ok", generated_text="another"))
    different = pytest.raises(UsageError, match="row_index 2, sample_index 0 has one result in")
    with OutputDir(tmp_path) as out, different:
        out.finished_rows(INT)
    assert pq.read_table(list_parts(tmp_path)).num_rows == 5


@pytest.mark.parametrize("name", BOOKS)
def test_t07_a_link_in_the_place_of_a_file_of_ours_is_not_followed(
    name: str, tmp_path: Path
) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / name).symlink_to(target)
    with pytest.raises(UsageError, match=f"{name} is a symbolic link"), OutputDir(directory):
        pass
    assert target.read_text() == "mine"
    (directory / name).unlink()
    run(directory, ok(0))


def test_ids_are_no_measure_of_equality(tmp_path: Path) -> None:
    """Rows of one id and two samples are no copies."""
    run(tmp_path, ok(0, 0), ok(0, 1))
    with OutputDir(tmp_path) as out:
        assert out.finished_rows(pa.int64()).samples(0, INT) == (0, 1)
