"""Finding and checking input files."""

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.input import source as source_module
from batchgen.data.input.source import discover, natural_key
from batchgen.errors import UsageError


def write(path: Path, **columns: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def names(path: Path | str) -> list[str]:
    return [file.name for file in discover(str(path)).files]


def test_f08_shards_stand_in_natural_order_with_running_row_indices(tmp_path: Path) -> None:
    for number in range(12):
        write(tmp_path / f"part-{number}.parquet", id=[number])
    found = discover(str(tmp_path))
    assert [file.name for file in found.files] == [f"part-{n}.parquet" for n in range(12)]
    assert [file.first_row_index for file in found.files] == list(range(12))
    assert found.num_rows == 12
    file, row = found.locate(10)
    assert (file.name, row) == ("part-10.parquet", 0)


def test_natural_order_copes_with_digits_that_are_not_ascii() -> None:
    assert sorted(["x10", "x²", "x9"], key=natural_key) == ["x9", "x10", "x²"]


def test_a_directory_is_read_through_without_hidden_names(tmp_path: Path) -> None:
    for name in ("a.parquet", "date=1/b.parquet", "_errors/c.parquet", ".x/d.parquet",
                 "_tmp.parquet", ".e.parquet", "notes.txt"):  # fmt: skip
        write(tmp_path / name, id=[1])
    assert names(tmp_path) == ["a.parquet", "date=1/b.parquet"]
    assert names(tmp_path / "_errors") == ["c.parquet"]


def test_a_link_to_the_directory_above_ends(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a.parquet", id=[1])
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d", target_is_directory=True)
    assert names(tmp_path / "d") == ["a.parquet"]


def test_a_glob_gives_names_relative_to_its_fixed_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x/1.parquet", "y/2.parquet", "y/_3.parquet", "_z/4.parquet"):
        write(tmp_path / name, id=[1])
    assert names(f"{tmp_path}/*/*.parquet") == ["x/1.parquet", "y/2.parquet"]
    assert names(f"{tmp_path}/**") == ["x/1.parquet", "y/2.parquet"]
    monkeypatch.chdir(tmp_path)
    assert names("y/*.parquet") == ["2.parquet"]
    assert names("?/*.parquet") == ["x/1.parquet", "y/2.parquet"]
    assert names("y/2.parquet") == ["2.parquet"]


@pytest.mark.parametrize("missing", ["nowhere", "empty", "empty/*.parquet"])
def test_nothing_found_says_what_was_looked_for(tmp_path: Path, missing: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="input.path=.*" + missing.replace("*", r"\*")):
        discover(str(tmp_path / missing))


@pytest.mark.parametrize("cut", [0.0, 0.5, 0.99])
def test_f13_a_truncated_file_is_named_before_the_run(tmp_path: Path, cut: float) -> None:
    write(tmp_path / "good.parquet", prompt=["a"] * 100)
    content = write(tmp_path / "bad.parquet", prompt=["b"] * 100).read_bytes()
    (tmp_path / "bad.parquet").write_bytes(content[: int(len(content) * cut)])
    with pytest.raises(UsageError, match=r"bad\.parquet is not a complete Parquet file"):
        discover(str(tmp_path))


def test_f06_duplicate_column_names_are_refused_with_their_names(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array([1])], ["x", "x", "y"])
    pq.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(UsageError, match=r"twice\.parquet has more than one column named x;"):
        discover(str(tmp_path))


def test_f01_a_column_of_nulls_takes_the_type_of_the_other_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", sys=pa.nulls(1))
    write(tmp_path / "b.parquet", sys=["be nice"])
    assert discover(str(tmp_path)).schema.field("sys").type == pa.string()


def test_types_of_one_column_are_unified_over_files(tmp_path: Path) -> None:
    message = pa.struct([("role", pa.string_view())])
    longer = pa.struct([("role", pa.large_string()), ("tools", pa.list_(pa.string()))])
    write(
        tmp_path / "a.parquet",
        text=pa.array(["a"], pa.string_view()),
        code=pa.array(["a"]).dictionary_encode(),
        number=pa.array([1], pa.int32()),
        unsigned=pa.array([1], pa.uint32()),
        count=pa.array([1], pa.int64()),
        messages=pa.array([[{"role": "user"}]], pa.list_(message)),
        ids=pa.array([[1, 2]], pa.list_(pa.int32(), 2)),
        only_here=pa.array([True]),
    )
    write(
        tmp_path / "b.parquet",
        text=pa.array(["b"], pa.large_string()),
        code=pa.array(["b"]),
        number=pa.array([1], pa.int64()),
        unsigned=pa.array([1], pa.int32()),
        count=pa.array([1.0]),
        messages=pa.array([[{"role": "user", "tools": ["t"]}]], pa.list_(longer)),
        ids=pa.array([[1]], pa.list_(pa.int64())),
    )
    schema = discover(str(tmp_path)).schema
    merged = pa.struct([("role", pa.large_string()), ("tools", pa.list_(pa.string()))])
    assert {field.name: field.type for field in schema} == {
        "text": pa.large_string(),
        "code": pa.string(),
        "number": pa.int64(),
        "unsigned": pa.int64(),
        "count": pa.float64(),
        "messages": pa.list_(merged),
        "ids": pa.list_(pa.int64()),
        "only_here": pa.bool_(),
    }


def test_f05_files_without_rows_or_row_groups_are_fine(tmp_path: Path) -> None:
    schema = pa.schema([("prompt", pa.string())])
    pq.ParquetWriter(tmp_path / "no_groups.parquet", schema).close()
    pq.write_table(schema.empty_table(), tmp_path / "no_rows.parquet")
    assert discover(str(tmp_path)).num_rows == 0
    write(tmp_path / "one.parquet", prompt=["a"])
    found = discover(str(tmp_path))
    assert found.num_rows == 1
    assert found.locate(0)[0].name == "one.parquet"


def test_the_identity_tells_names_sizes_rows_and_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", id=[1, 2])
    (identity,) = discover(str(path)).identity()
    digest = identity.pop("digest")
    assert identity == {"name": "a.parquet", "size_bytes": path.stat().st_size, "rows": 2}
    write(tmp_path / "a.parquet", id=[1, 3])
    assert discover(str(path)).identity()[0]["digest"] != digest


def test_a_giant_row_group_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.parquet", id=[1, 2])
    monkeypatch.setattr(source_module, "GIANT_ROW_GROUP_BYTES", 1)
    with caplog.at_level(logging.WARNING):
        discover(str(tmp_path))
    assert "a.parquet has a row group" in caplog.text
