"""The output directory through crashes, resumes, retries and rivals."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.input.source import discover
from batchgen.data.output import ordering as ordering_module
from batchgen.data.output.directory import OutputDir
from batchgen.data.output.files import OutputError
from batchgen.data.output.finished import FinishedRows
from batchgen.data.output.ordering import sort_parts
from batchgen.data.output.parts import list_parts
from batchgen.data.output.schema import RowResult, output_schema
from batchgen.data.output.writer import PartLimits
from batchgen.data.stores.lock import DirectoryLock
from batchgen.errors import UsageError
from tests.data.crash import INT, begin, failed, keys, ok, run, visible, write

# Opening


def test_a_new_directory_is_made_with_its_parents_and_left_without_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with OutputDir(path) as out:
        assert not begin(out)
        assert visible(path) == {"_lock", "_manifest.json"}
    assert visible(path) == {"_manifest.json"}


@pytest.mark.parametrize("is_there", [False, True])
def test_a_refusal_leaves_no_empty_directory_that_was_made_for_it(
    tmp_path: Path, is_there: bool
) -> None:
    path = tmp_path / "out"
    if is_there:
        path.mkdir()
    with pytest.raises(UsageError), OutputDir(path):
        raise UsageError("ids are there twice")
    assert path.exists() == is_there
    with pytest.raises(UsageError), OutputDir(path) as out:
        begin(out)
        raise UsageError("after the first file")
    assert visible(path) == {"_manifest.json"}


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"output\.dir="), OutputDir(tmp_path / "file"):
        pass


@pytest.mark.parametrize("name", ["notes.txt", "part-00000-0123abcd.parquet"])
def test_a_directory_of_others_is_refused_unless_overwrite_is_said(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match="not an output of batchgen"), OutputDir(tmp_path):
        pass
    assert visible(tmp_path) == {name}
    with OutputDir(tmp_path, overwrite=True) as out:
        assert not begin(out)
    assert (tmp_path / "notes.txt").exists() == (name == "notes.txt")


@pytest.mark.parametrize("overwrite", [False, True])
def test_parquet_of_others_is_always_refused(tmp_path: Path, overwrite: bool) -> None:
    run(tmp_path, ok(0))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "mine.parquet")
    with (
        pytest.raises(UsageError, match=r"mine\.parquet"),
        OutputDir(tmp_path, overwrite=overwrite),
    ):
        pass
    assert (tmp_path / "mine.parquet").exists()


def test_a_directory_with_only_a_plan_is_no_others(tmp_path: Path) -> None:
    with OutputDir(tmp_path) as out:
        out.write_json("_plan.json", {"rows": 1})
        (tmp_path / "_plan").mkdir()
    with OutputDir(tmp_path) as out:
        assert not begin(out)


def test_overwrite_clears_what_is_ours_when_the_run_begins(tmp_path: Path) -> None:
    run(tmp_path, ok(0), failed(1))
    with OutputDir(tmp_path) as out:
        out.mark_success()
        out.write_json("_summary.json", {})
    (tmp_path / "_errors").mkdir()
    (tmp_path / "_theirs").write_text("")
    (tmp_path / "_plan").mkdir()
    with OutputDir(tmp_path, overwrite=True) as out:
        # Looking at a plan must not cost the results.
        assert len(out.parts) == 1
        assert not begin(out, model="b")
        assert visible(tmp_path) == {"_lock", "_theirs", "_manifest.json"}


# Resume


@pytest.mark.parametrize(
    "name",
    [
        *("_plan.json", "_summary.json", "_manifest.json", "_metrics.jsonl", "_report.html"),
        *("_SUCCESS", "_switch.json", "_lock", "part-00000-0123abcd.parquet"),
    ],
)
def test_overwrite_clears_a_folder_under_a_name_of_ours(tmp_path: Path, name: str) -> None:
    run(tmp_path, ok(0))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    (tmp_path / name / "inside").write_text("")
    with OutputDir(tmp_path, overwrite=True) as out:
        assert not begin(out)
        out.write_json("_plan.json", {})
        out.mark_success()
    assert visible(tmp_path) == {"_manifest.json", "_plan.json", "_SUCCESS"}
    assert all((tmp_path / each).is_file() for each in visible(tmp_path))


def test_overwrite_clears_a_replacement_that_cannot_be_carried_out(tmp_path: Path) -> None:
    record = '{"remove": [], "add": ["part-00007-0123abcd.parquet"]}'
    run(tmp_path, ok(0))
    (tmp_path / "_switch.json").write_text(record)
    with pytest.raises(OutputError, match=r"_switch\.json"), OutputDir(tmp_path):
        pass
    assert "_switch.json" in visible(tmp_path)
    with OutputDir(tmp_path, overwrite=True) as out:
        assert not begin(out)
    assert visible(tmp_path) == {"_manifest.json"}


def test_h06_another_fingerprint_is_refused_with_the_key(tmp_path: Path) -> None:
    run(tmp_path, ok(0))
    with (
        OutputDir(tmp_path) as out,
        pytest.raises(UsageError, match='model: "a" then, "b" now'),
    ):
        begin(out, model="b")
    with OutputDir(tmp_path) as out:
        assert begin(out)


def test_h06_without_results_another_fingerprint_just_begins(tmp_path: Path) -> None:
    with OutputDir(tmp_path) as out:
        begin(out)
    with OutputDir(tmp_path) as out:
        assert not begin(out, model="b")
    assert json.loads((tmp_path / "_manifest.json").read_text())["fingerprint"] == {"model": "b"}


def test_resume_never_and_always_refuse_what_they_must(tmp_path: Path) -> None:
    with OutputDir(tmp_path) as out:
        with pytest.raises(UsageError, match=r"output\.resume=always"):
            begin(out, resume="always")
        assert not begin(out, resume="never")
        write(tmp_path, ok(0))
    with OutputDir(tmp_path) as out:
        with pytest.raises(UsageError, match=r"output\.resume=never"):
            begin(out, resume="never")
        assert begin(out, resume="always")


def test_h08_progress_is_what_the_parts_say(tmp_path: Path) -> None:
    run(tmp_path, ok(0), ok(1), ok(2))
    with OutputDir(tmp_path) as out:
        # An older view of the progress changes nothing: there is no file to overwrite it in.
        before = out.finished_rows(INT)
        write(tmp_path, ok(3), ok(4))
        assert (before.num_rows, out.finished_rows(INT).num_rows) == (3, 5)


def test_h03_rows_of_equal_text_are_told_apart_by_id(tmp_path: Path) -> None:
    same = [RowResult(i, i, 0, "ok", generated_text="same") for i in range(5)]
    run(tmp_path, *same[:2])
    with OutputDir(tmp_path) as out:
        done = out.finished_rows(INT).done(pa.array(range(5)), 1)
        assert done.tolist() == [True, True, False, False, False]


def test_done_counts_samples_and_errors_are_done(tmp_path: Path) -> None:
    run(tmp_path, ok(0, 0), ok(0, 1), ok(1, 1), failed(2))
    with OutputDir(tmp_path) as out:
        finished = out.finished_rows(INT)
    ids = pa.array([2, 0, 1, 9])
    assert finished.done(ids, 2).tolist() == [True, True, False, False]
    assert finished.done(ids, np.array([5, 3, 1, 1])).tolist() == [True, False, True, False]
    assert finished.samples(0, INT) == (0, 1)
    assert finished.samples(9, INT) == ()
    assert (finished.num_rows, finished.num_errors) == (4, 1)
    assert finished.errors_by_type == {"empty_prompt": 1}
    assert finished.error_row_indices.tolist() == [2]


@settings(deadline=None, max_examples=30)
@given(
    st.sets(st.tuples(st.text("ab\x00", max_size=3), st.integers(0, 2)), max_size=12),
    st.lists(st.text("ab\x00", max_size=3), max_size=6),
    st.integers(1, 3),
)
def test_done_agrees_with_counting_in_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory,
    there: set[tuple[str, int]],
    asked: list[str],
    num_samples: int,
) -> None:
    directory = tmp_path_factory.mktemp("parts")
    rows = [ok(0, sample, row_id) for row_id, sample in there]
    write(directory, *rows, rows_per_part=5, kind=pa.string())
    finished = FinishedRows.read(list_parts(directory), pa.string())
    counts = [sum(row_id == wanted for row_id, _ in there) for wanted in asked]
    done = finished.done(pa.array(asked, pa.string()), num_samples).tolist()
    assert done == [count >= num_samples for count in counts]


def test_a_result_that_stands_twice_is_refused_with_both_parts(tmp_path: Path) -> None:
    other = RowResult(1, 1, 0, "ok", generated_text="another text")
    run(tmp_path, ok(0), ok(1), ok(2), other)
    with OutputDir(tmp_path) as out:
        with pytest.raises(UsageError) as caught:
            out.finished_rows(INT)
        assert "row_index 1, sample_index 0" in str(caught.value)
        assert all(path.name in str(caught.value) for path in out.parts)


def test_ids_of_another_type_are_refused(tmp_path: Path) -> None:
    run(tmp_path, ok(0))
    with OutputDir(tmp_path) as out, pytest.raises(UsageError, match=r"ids in .* are int64"):
        out.finished_rows(pa.string())


# What a killed run leaves


def test_f13_a_writer_killed_at_any_moment_leaves_whole_parts(tmp_path: Path) -> None:
    script = """
        import itertools, sys
        from pathlib import Path
        import pyarrow as pa
        from batchgen.data.output.schema import RowResult, output_schema
        from batchgen.data.output.writer import PartWriter
        writer = PartWriter(Path(sys.argv[1]), output_schema(pa.int64()), rows_per_part=3)
        for i in itertools.count():
            writer.put(RowResult(i, i, 0, "ok", "text"))
            if writer.stats.parts > 2:
                print(flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    rows = len(list_parts(tmp_path)) * 3
    assert rows >= 9
    assert keys(tmp_path) == [(i, 0) for i in range(rows)]


# Retrying errors


def test_h05_errors_are_done_until_they_are_discarded(tmp_path: Path) -> None:
    run(tmp_path, ok(0), failed(1), ok(2), ok(3), failed(4), failed(5))
    with OutputDir(tmp_path) as out:
        begin(out)
        ids = pa.array(range(6))
        assert out.finished_rows(INT).done(ids, 1).all()
        assert out.discard_errors() == 3
        done = out.finished_rows(INT).done(ids, 1)
        assert done.tolist() == [True, False, True, True, False, False]
        assert out.discard_errors() == 0
        write(tmp_path, ok(1), ok(4), ok(5))
    assert sorted(keys(tmp_path)) == [(i, 0) for i in range(6)]
    assert not {"_staged", "_switch.json"} & visible(tmp_path)


def test_rows_with_some_of_their_samples_can_be_discarded(tmp_path: Path) -> None:
    run(tmp_path, ok(0, 0), ok(1, 0), ok(1, 1), ok(0, 1))
    with OutputDir(tmp_path) as out:
        assert out.discard_ids(pa.array([1])) == 2
    assert sorted(keys(tmp_path)) == [(0, 0), (0, 1)]


# Order


@settings(deadline=None, max_examples=20)
@given(
    st.sets(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=40).flatmap(
        lambda pairs: st.permutations(sorted(pairs))
    ),
    st.integers(1, 7),
    st.sampled_from([1, 500, 2000, 1 << 20]),
)
def test_f08_sorting_gives_input_order_whatever_the_buckets(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: list[tuple[int, int]],
    rows_per_part: int,
    bucket_bytes: int,
) -> None:
    directory = tmp_path_factory.mktemp("sorted")
    write(directory, *(ok(row, sample) for row, sample in pairs), rows_per_part=5)
    names = visible(directory)
    moved = sort_parts(directory, PartLimits.of(rows_per_part), bucket_bytes)
    assert moved == (pairs != sorted(pairs))
    if pairs:
        assert keys(directory) == sorted(pairs)
        texts = pq.read_table(directory)["generated_text"].to_pylist()
        assert texts == [f"text {row} {sample}" for row, sample in sorted(pairs)]
    if moved:
        sizes = [pq.read_metadata(path).num_rows for path in list_parts(directory)]
        assert sizes[:-1] == [rows_per_part] * (len(sizes) - 1)
    else:
        assert visible(directory) == names


def test_sorted_parts_are_cut_by_bytes_too(tmp_path: Path) -> None:
    rows = [RowResult(i, i, 0, "ok", generated_text="x" * 5000) for i in (3, 1, 2, 0)]
    write(tmp_path, *rows)
    sort_parts(tmp_path, PartLimits(rows=100, size_bytes=12_000))
    assert [pq.read_metadata(path).num_rows for path in list_parts(tmp_path)] == [2, 2]
    assert keys(tmp_path) == [(i, 0) for i in range(4)]


def test_h02_a_full_disk_while_sorting_leaves_the_parts_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, ok(2), ok(1), ok(0))

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ordering_module.pa.ipc, "new_stream", no_space)
    with OutputDir(tmp_path) as out:
        with pytest.raises(OutputError, match="No space left on device"):
            out.sort_by_input()
        monkeypatch.undo()
        assert keys(tmp_path) == [(2, 0), (1, 0), (0, 0)]
        assert out.sort_by_input()
    assert keys(tmp_path) == [(0, 0), (1, 0), (2, 0)]


# The end of a run


def test_success_comes_last_and_goes_when_work_begins(tmp_path: Path) -> None:
    run(tmp_path, ok(0))
    with OutputDir(tmp_path) as out:
        assert not out.is_complete
        out.mark_success()
    with OutputDir(tmp_path) as out:
        assert out.is_complete
        out.begin_work()
        out.begin_work()
        assert not out.is_complete


def test_f05_a_directory_without_rows_is_a_valid_table(tmp_path: Path) -> None:
    with OutputDir(tmp_path) as out:
        begin(out)
        out.write_empty_part_if_none(output_schema(pa.string()))
        out.write_empty_part_if_none(output_schema(pa.string()))
        assert len(out.parts) == 1
        assert out.finished_rows(pa.string()).num_rows == 0
        assert not out.sort_by_input()
    assert pq.read_table(tmp_path).schema.equals(output_schema(pa.string()))


def test_json_files_are_whole_and_readers_skip_them(tmp_path: Path) -> None:
    run(tmp_path, ok(0), failed(1))
    with OutputDir(tmp_path) as out:
        out.write_json("_summary.json", {"rows": 2, "text": "ü"})
        out.write_json("_summary.json", {"rows": 3})
        out.mark_success()
        query = f"select id, status from '{tmp_path}/*.parquet' order by id"
        assert duckdb.sql(query).fetchall() == [(0, "ok"), (1, "error")]
        assert pq.read_table(tmp_path).num_rows == 2
    assert json.loads((tmp_path / "_summary.json").read_text()) == {"rows": 3}


def test_failed_rows_are_an_input_again_with_their_own_columns(tmp_path: Path) -> None:
    source_dir, out_dir = tmp_path / "in", tmp_path / "out"
    source_dir.mkdir()
    first = pa.table({"id": range(4), "p": pa.array(["a", "", "c", ""], pa.string_view())})
    second = pa.table({"id": pa.array([4, 5], pa.int32()), "p": ["", "f"], "t": [None, 1.5]})
    pq.write_table(first, source_dir / "1.parquet")
    pq.write_table(second, source_dir / "2.parquet")
    source = discover(str(source_dir))
    run(out_dir, *(failed(i) if i in (1, 3, 4) else ok(i) for i in range(6)))
    with OutputDir(out_dir) as out:
        out.write_errors(source, out.finished_rows(INT).error_row_indices)
        again = discover(str(out_dir / "_errors"))
        tables = [pq.read_table(file.path) for file in again.files]
        assert tables[0].schema.equals(first.schema)
        assert tables[1].schema.equals(second.schema)
        assert [table["id"].to_pylist() for table in tables] == [[1, 3], [4]]
        assert discover(str(out_dir)).num_rows == 6
        out.write_errors(source, np.array([0]))
        assert discover(str(out_dir / "_errors")).num_rows == 1
        out.write_errors(source, np.array([], np.int64))
    assert not (out_dir / "_errors").exists()
    assert not any(name.startswith("_tmp") for name in visible(out_dir))


# Two runs


HOLDER = """
    import sys
    from batchgen.data.output.directory import OutputDir
    with OutputDir(sys.argv[1]):
        print(flush=True)
        sys.stdin.read()
"""


def test_h09_a_second_run_is_refused_with_the_owner_and_a_dead_one_succeeded(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        temporary = tmp_path / f"_tmp-{holder.pid}-0123abcd-part-00000.parquet.tmp"
        temporary.write_bytes(b"being written")
        with pytest.raises(UsageError, match=f"in use by process {holder.pid} on "):
            OutputDir(tmp_path).__enter__()
        assert temporary.exists()
        holder.kill()
    assert "_lock" in visible(tmp_path)
    with OutputDir(tmp_path) as out:
        begin(out)
        assert not temporary.exists()
    assert "_lock" not in visible(tmp_path)


def test_h09_a_lock_file_that_was_removed_meanwhile_is_not_taken(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path / "_lock"), DirectoryLock(tmp_path / "_lock")
    first.acquire()
    with pytest.raises(UsageError, match="in use by process"):
        second.acquire()
    (tmp_path / "_lock").write_text("")
    with pytest.raises(UsageError, match="has not written its name"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    assert visible(tmp_path) == set()
