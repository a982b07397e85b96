"""What a killed machine, a bad disk or a careless hand leaves in the output directory."""

import errno
import json
import os
import stat
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.data.output import parts as parts_module
from batchgen.data.output.directory import OutputDir
from batchgen.data.output.files import OutputError
from batchgen.data.output.glance import Glance
from batchgen.data.output.parts import list_parts
from batchgen.data.stores.local import LocalStore
from tests.data.crash import INT, Crash, begin, crash_at, failed, keys, ok, run, spoil, visible


def test_torn_and_empty_files_are_swept_or_set_aside_and_whole_parts_stay(tmp_path: Path) -> None:
    run(tmp_path, ok(0), ok(1), ok(2))
    content = list_parts(tmp_path)[0].read_bytes()
    for number, torn in enumerate((b"", content[:50], content)):
        (tmp_path / f"_tmp-99-0123abc{number}-part-00009.parquet.tmp").write_bytes(torn)
    (tmp_path / "_tmp-99-0123abcd-_errors.tmp").mkdir()
    damaged = {
        "part-00003-0123abcd.parquet": b"",
        "part-00004-0123abcd.parquet": content[: len(content) // 2],
        "part-00005-0123abcd.parquet": b"PAR1",
        "part-00006-0123abcd.parquet": bytes(len(content)),
        "part-00007-0123abcd.parquet": content[:-8] + (1 << 30).to_bytes(4, "little") + b"PAR1",
        "part-00008-0123abcd.parquet": content[:-1] + b"X",
    }
    for name, torn in damaged.items():
        (tmp_path / name).write_bytes(torn)
    with OutputDir(tmp_path) as out:
        assert begin(out)
        assert out.finished_rows(INT).num_rows == 3
        assert len(out.parts) == 2
    assert keys(tmp_path) == [(0, 0), (1, 0), (2, 0)]
    assert visible(tmp_path / "_quarantine") == set(damaged)
    assert not any(name.startswith("_tmp") for name in visible(tmp_path))


@pytest.mark.parametrize("action", ["look", "discard", "sort"])
def test_rows_whose_bytes_changed_under_a_good_footer_are_run_again(
    tmp_path: Path, action: str
) -> None:
    run(tmp_path, ok(3), failed(2), ok(1), failed(0))
    # Who looks which rows are done does not read their text.
    spoil(list_parts(tmp_path)[1], "row_index" if action == "look" else "generated_text")
    with OutputDir(tmp_path) as out:
        assert len(out.parts) == 2
        if action == "look":
            out.finished_rows(INT)
        else:
            with pytest.raises(OutputError, match="the same command runs its rows again"):
                out.discard_errors() if action == "discard" else out.sort_by_input()
        assert out.finished_rows(INT).num_rows == 2
        assert keys(tmp_path) == [(3, 0), (2, 0)]
        # Nothing half-done is left over.
        out.discard_errors()
    assert keys(tmp_path) == [(3, 0)]


@pytest.mark.parametrize("name", ["generated_text", "error_message"])
def test_who_verifies_finds_damage_in_what_a_resume_does_not_read(
    tmp_path: Path, name: str
) -> None:
    run(tmp_path, ok(3), failed(2), ok(1), failed(0))
    part = list_parts(tmp_path)[1]
    spoil(part, name)
    glance = Glance.take(tmp_path, verify=True)
    assert (glance.num_parts, glance.damaged) == (1, (part.name,))
    assert Glance.take(tmp_path).damaged == ()
    with OutputDir(tmp_path) as out:
        assert out.finished_rows(INT).num_rows == 4
        assert out.finished_rows(INT, verify=True).num_rows == 2
    assert keys(tmp_path) == [(3, 0), (2, 0)]
    assert visible(tmp_path / "_quarantine") == {part.name}


@pytest.mark.parametrize("column", ["id", "row_index"])
def test_another_table_under_a_parts_name_is_set_aside(tmp_path: Path, column: str) -> None:
    run(tmp_path, ok(0), ok(1), ok(2), ok(3))
    part = list_parts(tmp_path)[0]
    pq.write_table(pq.read_table(part).drop_columns([column]), part)
    glance = Glance.take(tmp_path)
    assert (glance.num_parts, glance.damaged) == (1, (part.name,))
    with OutputDir(tmp_path) as out:
        assert begin(out)
        assert out.finished_rows(INT).num_rows == 2
    assert keys(tmp_path) == [(2, 0), (3, 0)]
    assert visible(tmp_path / "_quarantine") == {part.name}


def test_a_disk_that_cannot_read_a_part_does_not_make_it_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, ok(0), ok(1), ok(2))
    before = visible(tmp_path)

    def unreadable(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(parts_module.pq, "ParquetFile", unreadable)
        with pytest.raises(OutputError, match="Permission denied"), OutputDir(tmp_path):
            pass
    assert visible(tmp_path) == before


def half_replaced(tmp_path: Path) -> Path:
    """A directory whose replacement is decided and not carried out."""
    run(tmp_path, ok(2), ok(1), ok(0))
    with pytest.MonkeyPatch.context() as patch, OutputDir(tmp_path) as out:
        crash_at(patch, 16)
        with pytest.raises(Crash, match=r"switch\.durable|replace\.begin"):
            out.sort_by_input(rows_per_part=2)
    return tmp_path / "_switch.json"


def test_no_old_part_goes_where_a_new_one_is_missing(tmp_path: Path) -> None:
    record = half_replaced(tmp_path)
    lost = tmp_path / "_staged" / json.loads(record.read_text())["add"][1]
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(OutputError, match=lost.name), OutputDir(tmp_path):
        pass
    assert keys(tmp_path) == [(2, 0), (1, 0), (0, 0)]
    lost.write_bytes(content)
    with OutputDir(tmp_path):
        assert keys(tmp_path) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"remove": []}', '{"remove": ["../x"], "add": []}', '{"remove": 1, "add": 2}'],
)
def test_t07_a_damaged_record_of_a_replacement_is_set_aside_and_no_row_is_lost(
    tmp_path: Path, content: str
) -> None:
    record = half_replaced(tmp_path)
    record.write_text(content)
    with OutputDir(tmp_path):
        assert keys(tmp_path) == [(2, 0), (1, 0), (0, 0)]
    assert not {"_switch.json", "_staged"} & visible(tmp_path)
    assert (tmp_path / "_switch.damaged.json").read_text() == content


def test_the_lock_goes_when_what_was_left_cannot_be_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, ok(0))

    def broken(store: LocalStore, directory: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "sync", broken)
        with pytest.raises(OutputError, match="Input/output error"), OutputDir(tmp_path):
            pass
    assert "_lock" not in visible(tmp_path)
    with OutputDir(tmp_path):
        assert keys(tmp_path) == [(0, 0)]


def synced(patch: pytest.MonkeyPatch) -> list[Path]:
    """The directories whose names are made durable from now on."""
    found: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        found.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    patch.setattr(os, "fsync", fsync)
    return found


def test_a_new_directory_outlives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = synced(monkeypatch)
    with OutputDir(tmp_path / "a" / "b") as out:
        assert {tmp_path, tmp_path / "a"} <= set(found)
        found.clear()
        begin(out)
        assert found[-1] == out.path
        assert found[-2].name.startswith("_tmp-")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_a_file_system_without_syncs_of_directories_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    run(tmp_path, ok(1), ok(0))
    with OutputDir(tmp_path) as out:
        out.sort_by_input()
    assert keys(tmp_path) == [(0, 0), (1, 0)]
