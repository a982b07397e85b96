"""Results on their way into part files."""

import errno
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.data.output import parts as parts_module
from batchgen.data.output.files import OutputError
from batchgen.data.output.parts import DamagedPartError, list_parts, part_schema, read_part
from batchgen.data.output.schema import RowResult, output_schema, to_table
from batchgen.data.output.writer import PartLimits, PartWriter

SCHEMA = output_schema(pa.int64())


def result(number: int, text: str | None = "text", sample: int = 0) -> RowResult:
    return RowResult(number, number, sample, "ok", generated_text=text, output_token_ids=[1, 2])


def write(directory: Path, rows: list[RowResult], rows_per_part: int | None = None) -> PartWriter:
    with PartWriter(directory, SCHEMA, rows_per_part=rows_per_part) as writer:
        for row in rows:
            writer.put(row)
    return writer


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_schema_is_the_fields_of_a_row_in_their_order() -> None:
    assert SCHEMA.names == [field.name for field in fields(RowResult)]
    assert [f.name for f in SCHEMA if not f.nullable] == SCHEMA.names[:4]


def test_rows_arrive_in_parts_of_the_asked_size_with_one_row_group_each(tmp_path: Path) -> None:
    writer = write(tmp_path, [result(i) for i in range(10)], rows_per_part=4)
    metadata = [pq.read_metadata(path) for path in list_parts(tmp_path)]
    assert [item.num_rows for item in metadata] == [4, 4, 2]
    assert {item.num_row_groups for item in metadata} == {1}
    assert [path.name[:11] for path in list_parts(tmp_path)] == [f"part-0000{i}-" for i in range(3)]
    assert (writer.stats.rows, writer.stats.parts) == (10, 3)
    assert writer.stats.size_bytes == sum(path.stat().st_size for path in list_parts(tmp_path))
    assert writer.stats.write_s > 0


def test_independent_readers_see_one_table(tmp_path: Path) -> None:
    write(tmp_path, [result(i) for i in range(6)], rows_per_part=2)
    (tmp_path / "_lock").write_text("{}")
    (tmp_path / "_errors").mkdir()
    (tmp_path / "_errors" / "rows.parquet").write_bytes(b"not for them")
    (tmp_path / "_tmp-1-00000000-part-00009.parquet.tmp").write_bytes(b"torn")
    assert pq.read_table(tmp_path).schema.equals(SCHEMA)
    assert pq.read_table(tmp_path).column("id").to_pylist() == list(range(6))
    assert ds.dataset(tmp_path).count_rows() == 6
    query = f"select sum(id), sum(output_token_ids[2]) from '{tmp_path}/*.parquet'"
    assert duckdb.sql(query).fetchall() == [(15, 12)]


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.builds(
            RowResult,
            id=st.integers(-(2**63), 2**63 - 1),
            row_index=st.integers(0, 2**62),
            sample_index=st.integers(0, 100),
            status=st.sampled_from(["ok", "error"]),
            generated_text=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
            output_token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=5),
            stop_reason=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
            peak_blocks=st.none() | st.integers(0, 2**31 - 1),
            recomputed_tokens=st.none() | st.integers(0, 2**40),
            queue_time_ms=st.none() | st.floats(allow_nan=False),
        ),
        max_size=8,
    )
)
def test_every_value_comes_back_as_it_was(tmp_path: Path, rows: list[RowResult]) -> None:
    for path in list_parts(tmp_path):
        path.unlink()
    write(tmp_path, rows, rows_per_part=3)
    got = [row for path in list_parts(tmp_path) for row in pq.ParquetFile(path).read().to_pylist()]
    assert got == [{f.name: getattr(row, f.name) for f in fields(row)} for row in rows]


@given(st.text(st.characters()))
def test_no_text_makes_the_file_invalid_utf8(text: str) -> None:
    table = to_table([result(1, text), result(2, None)], SCHEMA)
    table.validate(full=True)
    got = table.column("generated_text")[0].as_py()
    if not any("\ud800" <= char <= "\udfff" for char in text):
        assert got == text
    else:
        assert "\ufffd" in got or len(got) < len(text)


def test_lone_surrogates_are_replaced_and_pairs_joined() -> None:
    table = to_table([result(1, "a\ud83db\ud83d\ude00")], SCHEMA)
    assert table.column("generated_text").to_pylist() == ["a\ufffdb\U0001f600"]


def test_f04_chunks_are_split_by_bytes(tmp_path: Path) -> None:
    rows = [result(i, "x" * 600) for i in range(7)]
    table = to_table(rows, SCHEMA, max_batch_bytes=2048)
    assert [len(chunk) for chunk in table.column("generated_text").chunks] == [2, 2, 2, 1]
    alone = to_table(rows[:3], SCHEMA, max_batch_bytes=1)
    assert [len(chunk) for chunk in alone.column("id").chunks] == [1, 1, 1]
    limits = PartLimits(rows=100, size_bytes=2048)
    with PartWriter(tmp_path, SCHEMA, limits=limits) as writer:
        for row in rows:
            writer.put(row)
    assert [pq.read_metadata(path).num_rows for path in list_parts(tmp_path)] == [3, 3, 1]


def test_an_old_part_is_committed_while_no_row_comes(tmp_path: Path) -> None:
    limits = PartLimits(rows=100, age_s=0.05)
    with PartWriter(tmp_path, SCHEMA, limits=limits) as writer:
        writer.put(result(1))
        eventually(lambda: len(list_parts(tmp_path)) == 1)
        writer.put(result(2))
        eventually(lambda: len(list_parts(tmp_path)) == 2)


def test_flush_makes_all_rows_so_far_safe_and_numbers_go_on(tmp_path: Path) -> None:
    with PartWriter(tmp_path, SCHEMA) as writer:
        writer.put(result(1))
        writer.flush()
        assert pq.read_table(tmp_path).num_rows == 1
        writer.flush()
    write(tmp_path, [result(2)])
    assert [path.name[:10] for path in list_parts(tmp_path)] == ["part-00000", "part-00001"]


def test_f05_no_rows_make_one_valid_part_with_the_full_schema(tmp_path: Path) -> None:
    with PartWriter(tmp_path, SCHEMA) as writer:
        writer.write_empty()
    table = pq.read_table(tmp_path)
    assert table.num_rows == 0
    assert table.schema.equals(SCHEMA)
    assert duckdb.sql(f"select count(*) from '{tmp_path}/*.parquet'").fetchall() == [(0,)]


def test_rows_put_before_an_exception_are_committed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), PartWriter(tmp_path, SCHEMA) as writer:
        writer.put(result(1))
        raise KeyboardInterrupt
    assert pq.read_table(tmp_path).num_rows == 1


def test_h02_a_full_disk_ends_the_run_with_the_path_and_keeps_earlier_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pq.write_table

    def write_table(table: pa.Table, file: object, **options: object) -> None:
        if 2 in table.column("id").to_pylist():
            file.write(b"PAR1 and then")  # type: ignore[attr-defined]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(table, file, **options)

    monkeypatch.setattr(parts_module.pq, "write_table", write_table)
    pattern = rf"cannot write {tmp_path}/part-00001-.*No space left on device"
    with (
        pytest.raises(OutputError, match=pattern),
        PartWriter(tmp_path, SCHEMA, rows_per_part=2, queue_rows=1) as writer,
    ):
        # The queue is far shorter than this: put must neither block nor go on for ever.
        for number in range(10_000):
            writer.put(result(number))
    assert [path.name[:10] for path in tmp_path.iterdir()] == ["part-00000"]
    assert pq.read_table(tmp_path).column("id").to_pylist() == [0, 1]
    with pytest.raises(OutputError):
        writer.flush()


def test_h02_a_limit_of_the_kernel_leaves_no_torn_file(tmp_path: Path) -> None:
    script = """
        import resource, signal, sys
        from pathlib import Path
        import pyarrow as pa
        from batchgen.data.output.files import OutputError
        from batchgen.data.output.schema import RowResult, output_schema
        from batchgen.data.output.writer import PartWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        tokens = [i * 7919 % 99991 for i in range(50_000)]
        rows = [RowResult(1, 1, 0, "ok"), RowResult(2, 2, 0, "ok", output_token_ids=tokens)]
        schema = output_schema(pa.int64())
        try:
            with PartWriter(Path(sys.argv[1]), schema, rows_per_part=1) as writer:
                for row in rows:
                    writer.put(row)
        except OutputError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert f"cannot write {tmp_path}/part-00001" in done.stdout
    assert "File too large" in done.stdout
    assert pq.read_table(tmp_path).column("id").to_pylist() == [1]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_value_that_fits_no_column_is_reported_and_not_lost_in_the_thread(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        write(tmp_path, [RowResult("text", 1, 0, "ok")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("max_tokens_cut", 2**31),
        ("output_token_ids", [1, 10**30]),
        ("stop_reason", 7),
        ("label_scores", [("a", "b")]),
    ],
)
def test_t6_a_value_that_fits_no_column_is_its_rows_error_and_its_neighbours_are_kept(
    tmp_path: Path, column: str, value: Any
) -> None:
    bad = replace(result(1), **{column: value})
    write(tmp_path, [result(0), bad, result(2)])
    rows = pq.read_table(tmp_path).to_pylist()
    assert [row["status"] for row in rows] == ["ok", "error", "ok"]
    assert rows[1]["error_type"] == "engine_error"
    assert f"the column {column}" in rows[1]["error_message"]
    assert rows[1]["generated_text"] is None
    assert [rows[0]["generated_text"], rows[2]["generated_text"]] == ["text", "text"]


@pytest.mark.parametrize("cut", [0.0, 0.6])
def test_a_part_that_was_cut_is_damaged(tmp_path: Path, cut: float) -> None:
    write(tmp_path, [result(1)])
    path = list_parts(tmp_path)[0]
    assert part_schema(path).equals(SCHEMA)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * cut)])
    with pytest.raises(DamagedPartError, match=path.name):
        part_schema(path)


def test_a_byte_that_changed_in_a_part_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, [result(n, f"some text {n}") for n in range(20)])
    path = list_parts(tmp_path)[0]
    content, whole = path.read_bytes(), read_part(path)
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for position in range(4, footer, 37):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        # A header may hold a bit that means nothing.
        try:
            assert read_part(path).equals(whole)
        except DamagedPartError:
            continue
    path.write_bytes(content[:200] + bytes(50) + content[250:])
    with pytest.raises(DamagedPartError, match=path.name):
        read_part(path)


def test_a_disk_that_fails_is_not_taken_for_a_damaged_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [result(1)])

    def unreadable(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(parts_module.pq, "ParquetFile", unreadable)
    with pytest.raises(OSError, match="Input/output error"):
        read_part(list_parts(tmp_path)[0])
