"""The output directory after a crash at every step that it takes."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.input.source import discover
from batchgen.data.output.directory import OutputDir
from batchgen.data.output.parts import next_part_number, read_part, write_part
from batchgen.data.stores.names import part_name
from tests.data.crash import Crash, begin, crash_at, failed, keys, ok, run, visible, write

ROWS = (ok(5), failed(1), ok(3), failed(0), ok(2), ok(4))
EVERYTHING = {(n, 0) for n in range(6)}
WITHOUT_ERRORS = EVERYTHING - {(0, 0), (1, 0)}


def crashes(
    folder: Path, act: Callable[[OutputDir], object], *, steps: int, overwrite: bool = False
) -> Iterator[Path]:
    """Give a directory for each step of an action, in which it died there; one more for none.

    Args:
        folder: holds the directories.
        act: what dies, in a directory of ``ROWS``.
        steps: how many there are at least.
        overwrite: open the directory to begin anew.
    """
    for number in itertools.count():
        directory = folder / str(number)
        run(directory, *ROWS)
        died = False
        with (
            OutputDir(directory, overwrite=overwrite) as out,
            pytest.MonkeyPatch.context() as patch,
        ):
            crash_at(patch, number)
            try:
                act(out)
            except Crash:
                died = True
        yield directory
        if not died:
            assert number >= steps
            return


def test_a_crash_at_any_step_of_sorting_loses_and_doubles_nothing(tmp_path: Path) -> None:
    for directory in crashes(tmp_path, lambda out: out.sort_by_input(rows_per_part=2), steps=30):
        with OutputDir(directory) as out:
            found = keys(directory)
            assert len(found) == 6
            assert set(found) == EVERYTHING
            out.sort_by_input(rows_per_part=2)
            assert keys(directory) == sorted(EVERYTHING)
        assert not {"_staged", "_switch.json"} & visible(directory)


def test_a_crash_at_any_step_of_discarding_takes_all_of_the_rows_or_none(tmp_path: Path) -> None:
    for directory in crashes(tmp_path, lambda out: out.discard_errors(), steps=20):
        with OutputDir(directory) as out:
            found = keys(directory)
            assert len(found) == len(set(found))
            assert set(found) in (EVERYTHING, WITHOUT_ERRORS)
            out.discard_errors()
            assert set(keys(directory)) == WITHOUT_ERRORS
        assert not {"_staged", "_switch.json"} & visible(directory)


def test_a_crash_while_a_crash_is_mended_is_mended_by_the_next_run(tmp_path: Path) -> None:
    first = tmp_path / "first"
    run(first, *ROWS)
    with OutputDir(first) as out, pytest.MonkeyPatch.context() as patch:
        crash_at(patch, 25)
        with pytest.raises(Crash, match="replace"):
            out.sort_by_input(rows_per_part=2)
    assert (first / "_switch.json").exists()
    for number in range(12):
        directory = tmp_path / str(number)
        shutil.copytree(first, directory)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
            crash_at(patch, number)
            OutputDir(directory).__enter__()
        with OutputDir(directory):
            assert keys(directory) == sorted(EVERYTHING)


def test_a_crash_at_any_step_of_overwriting_leaves_what_a_run_can_begin_on(
    tmp_path: Path,
) -> None:
    def act(out: OutputDir) -> None:
        begin(out, model="b")

    for directory in crashes(tmp_path, act, steps=10, overwrite=True):
        # Never rows of the old model under the manifest of the new one.
        if list(directory.glob("part-*")):
            manifest = json.loads((directory / "_manifest.json").read_text())
            assert manifest["fingerprint"] == {"model": "a"}
        with OutputDir(directory, overwrite=True) as out:
            begin(out, model="b")
            write(directory, ok(7))
        assert keys(directory) == [(7, 0)]


def test_a_crash_at_any_step_of_writing_failed_rows_leaves_them_whole_or_absent(
    tmp_path: Path,
) -> None:
    pq.write_table(pa.table({"id": range(6), "prompt": list("abcdef")}), tmp_path / "in.parquet")
    source = discover(str(tmp_path / "in.parquet"))

    def act(out: OutputDir) -> None:
        out.write_errors(source, np.array([0]))
        out.write_errors(source, np.array([0, 1]))

    for directory in crashes(tmp_path, act, steps=8):
        errors = directory / "_errors"
        if errors.exists():
            assert pq.read_table(errors)["id"].to_pylist() in ([0], [0, 1])
        with OutputDir(directory) as out:
            out.write_errors(source, np.array([0, 1]))
            assert not any(name.startswith("_tmp") for name in visible(directory))
        assert pq.read_table(errors)["id"].to_pylist() == [0, 1]


def test_a_crash_at_any_step_of_a_file_leaves_it_whole_or_absent(tmp_path: Path) -> None:
    def act(out: OutputDir) -> None:
        out.write_json("_summary.json", {"rows": 6})
        table = read_part(out.parts[0]).slice(0, 1).set_column(0, "id", pa.array([9]))
        write_part(out.path / part_name(next_part_number(out.path)), table)
        out.mark_success()

    for directory in crashes(tmp_path, act, steps=15):
        found = pq.read_table(directory)["id"].to_pylist()
        assert found in ([5, 1, 3, 0, 2, 4], [5, 1, 3, 0, 2, 4, 9])
        summary = directory / "_summary.json"
        assert not summary.exists() or json.loads(summary.read_text()) == {"rows": 6}
        assert not (directory / "_SUCCESS").exists() or len(found) == 7
