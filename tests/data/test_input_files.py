"""Finding and checking input files."""

import gzip
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, orc

from batchgen.data.input import source as source_module
from batchgen.data.input.reader import read_original_rows
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


def test_a_directory_that_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.parquet", "closed/b.parquet"):
        write(tmp_path / name, id=[1])
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UsageError, match=r"cannot be read: .*Permission denied: .*closed"):
        discover(str(tmp_path))


def test_a_link_that_leads_nowhere_is_not_left_out_unsaid(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", id=[1])
    (tmp_path / "b.parquet").symlink_to(tmp_path / "moved.parquet")
    (tmp_path / "notes.txt").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path, f"{tmp_path}/*.parquet"):
        with pytest.raises(UsageError, match=r"this link leads to no file: .*b\.parquet"):
            discover(str(path))
    write(tmp_path / "moved.parquet", id=[2])
    assert names(tmp_path) == ["a.parquet", "b.parquet", "moved.parquet"]


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


ROWS = [{"id": 1, "prompt": "one, two"}, {"id": 2, "prompt": "three\nfour \u00e9"}]
CSV = 'id;prompt\n1;"one, two"\n2;"three\nfour \u00e9"\n'


def _feather(path: Path) -> None:
    feather.write_feather(pa.Table.from_pylist(ROWS), path)


def _orc(path: Path) -> None:
    orc.write_table(pa.Table.from_pylist(ROWS), path)


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "csv": (lambda path: path.write_text(CSV, encoding="utf-8-sig"), "CSV"),
    "jsonl": (lambda path: path.write_text("\n".join(map(json.dumps, ROWS))), "JSON lines"),
    "feather": (_feather, r"Arrow IPC \(Feather\)"),
    "orc": (_orc, "ORC"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_table_of_another_format_is_named_with_a_command_that_converts_it(
    tmp_path: Path, kind: str
) -> None:
    write_other, name = OTHERS[kind]
    path = tmp_path / f"it's {kind}.parquet"
    write_other(path)
    with pytest.raises(UsageError, match=f"is no Parquet file: it looks like {name}; ") as refused:
        discover(str(path))
    command = shlex.split(str(refused.value).partition("say: python ")[2])
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, timeout=60)
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == ROWS


LOOKS = {
    "gzip": (gzip.compress(CSV.encode()), "gzip; unpack it"),
    "array": (b'[\n{"id": 1}\n]', "one JSON array; write it"),
    "page": (b"\n<!DOCTYPE html><html>", "a web page or XML; download"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d", "git lfs pull"),
    "text": (b"one prompt\nanother prompt", "text; write it"),
    # The last of the bytes that are looked at is half a character.
    "long text": (b"x" + "\u00e9".encode() * 4000, "text; write it"),
}


@pytest.mark.parametrize("kind", LOOKS)
def test_what_is_no_table_is_named_with_what_to_do(tmp_path: Path, kind: str) -> None:
    content, said = LOOKS[kind]
    (tmp_path / "rows.parquet").write_bytes(content)
    with pytest.raises(UsageError, match="it looks like") as refused:
        discover(str(tmp_path))
    assert said in str(refused.value)
    assert str(tmp_path / "rows.parquet") in str(refused.value)


def test_an_encrypted_file_is_said_to_be_one(tmp_path: Path) -> None:
    content = write(tmp_path / "a.parquet", prompt=["a"]).read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:-4] + b"PARE")
    with pytest.raises(UsageError, match="is an encrypted Parquet file; write it without"):
        discover(str(tmp_path))


@pytest.mark.parametrize("names", [["prompt", "prompt"], ["x", "x", "prompt"]])
def test_f06_duplicate_column_names_are_refused_with_their_names(
    tmp_path: Path, names: list[str]
) -> None:
    columns = [pa.array([text]) for text in "abc"[: len(names)]]
    pq.write_table(pa.Table.from_arrays(columns, names), tmp_path / "twice.parquet")
    repeated = rf"twice\.parquet has more than one column named {names[0]};"
    with pytest.raises(UsageError, match=repeated):
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


def test_a_change_since_a_file_was_found_is_noticed_and_a_touch_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", id=[1, 2])
    write(tmp_path / "b.parquet", id=[3])
    source = discover(str(tmp_path))
    source.identity()
    path.touch()
    source.refuse_changes()
    content = path.read_bytes()
    write(tmp_path / "other", id=[1, 3]).replace(path)
    with pytest.raises(UsageError, match=r"a\.parquet has been changed since this run"):
        source.refuse_changes()
    source.refuse_changes(source.files[1:])
    path.write_bytes(content)
    source.refuse_changes()
    path.unlink()
    with pytest.raises(UsageError, match=r"a\.parquet cannot be read"):
        source.refuse_changes()


def test_a_file_replaced_before_its_identity_is_taken_has_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", id=[1, 2])
    source = discover(str(tmp_path))
    write(tmp_path / "other", id=[1, 3]).replace(path)
    with pytest.raises(UsageError, match=r"a\.parquet is being changed while it is read"):
        source.identity()


def test_a_footer_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(5)}), path, row_group_size=3)
    whole, found = path.read_bytes(), 0
    for at in range(whole.rindex(b"PAR1") - 4 - _footer_bytes(whole), len(whole) - 8):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 2]) + whole[at + 1 :])
        try:
            assert _rows(path) == 5
        except UsageError as error:
            found += "row groups hold" in str(error)
    assert found


def _footer_bytes(content: bytes) -> int:
    return int.from_bytes(content[-8:-4], "little")


def _rows(path: Path) -> int:
    """The rows read back by position from all row groups, as many as the footer says."""
    source = discover(str(path))
    wanted = np.arange(source.num_rows)
    rows = sum(batch.num_rows for _, batch in read_original_rows(source, wanted))
    assert rows == source.num_rows
    return rows


def test_a_giant_row_group_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.parquet", id=[1, 2])
    monkeypatch.setattr(source_module, "GIANT_ROW_GROUP_BYTES", 1)
    with caplog.at_level(logging.WARNING):
        discover(str(tmp_path))
    assert "a.parquet has a row group" in caplog.text
