"""Reading rows, their ids, and rows again by position."""

import base64
import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow.parquet import encryption

from batchgen.data.ids import IdCheck, id_keys
from batchgen.data.input import types as types_module
from batchgen.data.input.reader import (
    RowBatch,
    check_ids,
    id_type,
    read_original_rows,
    read_rows,
)
from batchgen.data.input.source import InputSource, discover
from batchgen.errors import UsageError


def source_of(directory: Path, *tables: pa.Table, **options: Any) -> InputSource:
    for number, table in enumerate(tables):
        pq.write_table(table, directory / f"{number}.parquet", **options)
    return discover(str(directory))


def read(source: InputSource, *columns: str, **options: Any) -> list[RowBatch]:
    return list(read_rows(source, columns, **{"id_column": None, "limit": None} | options))


def ids_of(batches: list[RowBatch]) -> list[object]:
    return [value for batch in batches for value in batch.ids.to_pylist()]


def values_of(batches: list[RowBatch], column: str) -> list[object]:
    return [value for batch in batches for value in batch.table.column(column).to_pylist()]


def test_batches_are_consecutive_and_hold_only_the_asked_columns(tmp_path: Path) -> None:
    tables = [pa.table({"a": range(10), "b": ["x"] * 10, "c": [1] * 10}) for _ in range(2)]
    source = source_of(tmp_path, *tables, row_group_size=4)
    batches = read(source, "b", "a", batch_rows=3, limit=15)
    assert values_of(batches, "a") == [*range(10), *range(5)]
    assert all(batch.table.schema.names == ["b", "a"] for batch in batches)
    position = 0
    for batch in batches:
        assert batch.first_row_index == position
        assert 0 < len(batch.ids) == batch.table.num_rows <= 3
        position += len(batch.ids)


def test_made_ids_name_the_file_and_the_row_in_it(tmp_path: Path) -> None:
    source = source_of(tmp_path, pa.table({"p": ["a", "b"]}), pa.table({"p": ["c"]}))
    assert ids_of(read(source)) == ["0.parquet:0", "0.parquet:1", "1.parquet:0"]
    assert [batch.table.num_rows for batch in read(source)] == [2, 1]
    single = discover(str(tmp_path / "1.parquet"))
    assert ids_of(read(single, "p")) == ["1.parquet:0"]
    assert id_type(single, None) == pa.string()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [2**53 + 1, -(2**63), 2**63 - 1]),
        (pa.uint64(), [2**64 - 1, 0]),
        (pa.int32(), [7]),
        (pa.string(), ["a", ""]),
        (pa.large_string(), ["a", "ü"]),
    ],
)
def test_ids_keep_their_type_and_every_digit(
    tmp_path: Path, kind: pa.DataType, values: list[object]
) -> None:
    source = source_of(tmp_path, pa.table({"id": pa.array(values, kind)}))
    assert id_type(source, None) == kind
    batches = read(source)
    assert ids_of(batches) == values
    assert batches[0].ids.type == kind


def test_ids_of_like_types_become_one_type(tmp_path: Path) -> None:
    narrow, wide = pa.array([1], pa.int32()), pa.array([2**60], pa.int64())
    source = source_of(tmp_path, pa.table({"id": narrow}), pa.table({"id": wide}))
    assert ids_of(read(source)) == [1, 2**60]
    assert {batch.ids.type for batch in read(source)} == {pa.int64()}


def test_string_and_integer_ids_are_refused_with_both_files(tmp_path: Path) -> None:
    source = source_of(tmp_path, pa.table({"id": ["a"], "p": [1]}), pa.table({"id": [1], "p": [1]}))
    with pytest.raises(UsageError, match=r"id is string in 0\.parquet but int64 in 1\.parquet"):
        read_rows(source, ["p"], id_column=None, limit=None)


def test_a_conflict_in_a_column_nobody_asks_for_is_no_matter(tmp_path: Path) -> None:
    source = source_of(
        tmp_path, pa.table({"p": ["a"], "z": [1]}), pa.table({"p": ["b"], "z": ["y"]})
    )
    assert values_of(read(source, "p"), "p") == ["a", "b"]
    with pytest.raises(UsageError, match="column z is int64"):
        read_rows(source, ["z"], id_column=None, limit=None)


def test_a_null_id_is_refused_with_file_and_row(tmp_path: Path) -> None:
    good, bad = pa.table({"id": [1, 2]}), pa.table({"id": pa.array([3, 4, None])})
    source = source_of(tmp_path, good, bad)
    with pytest.raises(UsageError, match=r"column id is null in .*1\.parquet, row 2;"):
        read(source, batch_rows=2)
    assert ids_of(read(source, limit=4)) == [1, 2, 3, 4]


def test_ids_of_nulls_only_and_ids_missing_from_one_file_are_refused(tmp_path: Path) -> None:
    nulls, other = tmp_path / "nulls", tmp_path / "other"
    nulls.mkdir()
    other.mkdir()
    with pytest.raises(UsageError, match=r"null in .*0\.parquet, row 0"):
        read(source_of(nulls, pa.table({"id": pa.nulls(2)})))
    with pytest.raises(UsageError, match=r"1\.parquet has no column id"):
        read(source_of(other, pa.table({"id": [1]}), pa.table({"p": [1]})))


@pytest.mark.parametrize("values", [[1.5], [True], [[1]], [datetime.date(2020, 1, 1)]])
def test_ids_of_other_types_are_refused_by_name(tmp_path: Path, values: list[object]) -> None:
    source = source_of(tmp_path, pa.table({"key": values}))
    with pytest.raises(UsageError, match=r"column key of .* has type"):
        read_rows(source, [], id_column="key", limit=None)


def test_of_very_many_columns_some_are_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, pa.table({f"c{n}": [1] for n in range(5000)}))
    with pytest.raises(UsageError, match=r"c0, c1, .* and 4,970 more$") as refused:
        read(source, "prompt")
    assert len(str(refused.value)) < 600


def test_a_missing_column_is_refused_with_close_matches(tmp_path: Path) -> None:
    source = source_of(tmp_path, pa.table({"prompts": ["a"], "ident": [1]}))
    with pytest.raises(UsageError, match=r"no column prompt .*did you mean prompts\? .*ident"):
        read_rows(source, ["prompt"], id_column=None, limit=None)
    with pytest.raises(UsageError, match=r"input.id_column: no column idents"):
        read_rows(source, [], id_column="idents", limit=None)


def test_f01_and_f03_and_f04_text_is_one_type_whatever_the_files_hold(tmp_path: Path) -> None:
    texts = ["a", None, "lange Wörter, länger als zwölf Bytes"]
    kinds = [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
    ]
    tables = [pa.table({"p": pa.array(texts).cast(kind)}) for kind in kinds]
    source = source_of(tmp_path, pa.table({"p": pa.nulls(1)}), *tables)
    batches = read(source, "p")
    assert {batch.table.column("p").type for batch in batches} == {pa.large_string()}
    assert values_of(batches, "p") == [None, *texts * 4]


def test_f03_string_view_alone_reads_as_string(tmp_path: Path) -> None:
    source = source_of(tmp_path, pa.table({"p": pa.array(["b", "a"], pa.string_view())}))
    column = read(source, "p")[0].table.column("p")
    assert column.type == pa.string()
    assert column.sort().to_pylist() == ["a", "b"]


def test_a_column_missing_from_one_file_is_null_there(tmp_path: Path) -> None:
    source = source_of(tmp_path, pa.table({"p": ["a"], "s": ["x"]}), pa.table({"p": ["b"]}))
    assert values_of(read(source, "s"), "s") == ["x", None]


def test_f12_other_types_come_through_as_they_are(tmp_path: Path) -> None:
    table = pa.table(
        {
            "ts": pa.array([1, 2], pa.timestamp("ns", "UTC")),
            "dec": pa.array([decimal.Decimal("1.10"), None], pa.decimal128(10, 2)),
            "nodec": pa.nulls(2, pa.decimal128(10, 2)),
            "list": [[1], None],
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        }
    )
    source = source_of(tmp_path, table)
    batch = read(source, *table.schema.names)[0].table
    assert pa.Table.from_batches([batch]).equals(table)


def test_names_with_dots_are_names_and_not_paths(tmp_path: Path) -> None:
    source = source_of(tmp_path, pa.table({"a.b": [1], "a": [{"b": 2}]}))
    assert values_of(read(source, "a.b"), "a.b") == [1]
    assert values_of(read(source, "a"), "a") == [{"b": 2}]


def test_bytes_that_are_not_utf8_are_replaced_in_text_and_refused_in_ids(tmp_path: Path) -> None:
    raw = pa.array([b"ok", b"\xff!"], pa.binary())
    bad = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    source = source_of(tmp_path, pa.table({"p": bad}))
    assert values_of(read(source, "p"), "p") == ["ok", "\ufffd!"]
    with pytest.raises(UsageError, match="not UTF-8"):
        read(source, id_column="p")


def test_f04_a_batch_whose_text_outgrows_one_array_is_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(tmp_path, pa.table({"p": ["x" * 600] * 5}))

    def conform(array: pa.Array, kind: pa.DataType) -> pa.Array:
        if array.nbytes > 1500:
            raise pa.ArrowInvalid("offset overflow")
        return types_module.conform(array, kind)

    monkeypatch.setattr("batchgen.data.input.reader.conform", conform)
    batches = read(source, "p")
    assert [batch.table.num_rows for batch in batches] == [2, 1, 2]
    assert [batch.first_row_index for batch in batches] == [0, 2, 3]
    monkeypatch.setattr(
        "batchgen.data.input.reader.conform", lambda array, kind: array.cast(pa.int8())
    )
    with pytest.raises(UsageError, match=r"0\.parquet, row 0"):
        read(source, "p")


def test_a_file_damaged_behind_its_footer_is_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, pa.table({"p": ["some text"] * 1000}), compression="zstd")
    content = bytearray((tmp_path / "0.parquet").read_bytes())
    content[4:60] = b"\xff" * 56
    (tmp_path / "0.parquet").write_bytes(content)
    with pytest.raises(UsageError, match=r"0\.parquet cannot be read"):
        read(source, "p")


class NoKeys(encryption.KmsClient):
    """Keys that are wrapped as they are."""

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)


def test_encrypted_columns_under_a_plain_footer_are_said_to_be_so(tmp_path: Path) -> None:
    settings = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": ["p"]}, plaintext_footer=True
    )
    keys = encryption.CryptoFactory(lambda _: NoKeys())
    properties = keys.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    table = pa.table({"id": [1], "p": ["secret"]})
    with pq.ParquetWriter(
        tmp_path / "0.parquet", table.schema, encryption_properties=properties
    ) as writer:
        writer.write_table(table)
    with pytest.raises(UsageError, match=r"0\.parquet cannot be read: .*without encryption"):
        read(discover(str(tmp_path)), "p")


def test_memory_does_not_grow_with_the_row_group(tmp_path: Path) -> None:
    text = np.random.default_rng(0).bytes(16_000_000).hex()
    rows = [text[start : start + 1000] for start in range(0, len(text), 1000)]
    source = source_of(tmp_path, pa.table({"p": rows}))
    del rows
    before = peak = pa.total_allocated_bytes()
    for _ in read_rows(source, ["p"], id_column=None, limit=None, batch_rows=256):
        peak = max(peak, pa.total_allocated_bytes())
    assert peak - before < 8 << 20


def test_f05_no_rows_means_no_batches(tmp_path: Path) -> None:
    source = source_of(tmp_path, pa.table({"id": pa.array([], pa.int64())}))
    assert read(source) == []
    assert id_type(source, None) == pa.int64()


def test_duplicate_ids_are_refused_with_examples(tmp_path: Path) -> None:
    source = source_of(tmp_path, pa.table({"id": [1, 7, 3]}), pa.table({"id": [4, 7, 1]}))
    with pytest.raises(UsageError) as caught:
        check_ids(source, id_column=None, limit=None)
    first, second = tmp_path / "0.parquet", tmp_path / "1.parquet"
    assert f"id 7 at {first}:1 and id 7 at {second}:1" in str(caught.value)
    assert f"id 1 at {first}:0 and id 1 at {second}:2" in str(caught.value)
    check_ids(source, id_column=None, limit=4)


ANY_IDS = st.one_of(
    st.lists(st.text(alphabet="ab\x00", max_size=3)),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.integers(0, 5)),
)


@given(ANY_IDS, st.integers(1, 4))
def test_duplicates_are_found_exactly_where_a_set_finds_them(
    values: list[Any], batch_rows: int
) -> None:
    kind = pa.int64() if values and isinstance(values[0], int) else pa.string()
    check = IdCheck()
    for start in range(0, len(values), batch_rows):
        check.add(pa.array(values[start : start + batch_rows], kind))
    whole = IdCheck()
    whole.add(pa.array(values, kind))
    assert check.digest() == whole.digest()
    if len(set(values)) == len(values):
        check.raise_on_duplicates(str)
    else:
        with pytest.raises(UsageError):
            check.raise_on_duplicates(str)


def test_the_digest_depends_on_the_order_of_ids() -> None:
    digests = set()
    for values in (["a", "b"], ["b", "a"], ["ab"]):
        check = IdCheck()
        check.add(pa.array(values))
        digests.add(check.digest())
    assert len(digests) == 3
    assert len(id_keys(pa.array([], pa.string()))) == 0


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sets(st.integers(0, 29)))
def test_rows_are_read_back_by_position_with_all_columns(tmp_path: Path, wanted: set[int]) -> None:
    if not (tmp_path / "0.parquet").exists():
        view = pa.array([f"text that is long enough {i}" for i in range(20)], pa.string_view())
        first = pa.table(
            {"v": view, "i": range(20), "d": view.cast(pa.string()).dictionary_encode()}
        )
        second = pa.table({"other": pa.array(range(10), pa.int8())})
        source_of(
            tmp_path, first, pa.table({"v": pa.array([], pa.string())}), second, row_group_size=7
        )
    source = discover(str(tmp_path))
    got = list(read_original_rows(source, np.array(sorted(wanted), np.int64)))
    found = {}
    for file, batch in got:
        original = pq.read_table(file.path)
        assert batch.schema.equals(original.schema)
        rows = batch.to_pylist()
        key = "i" if "i" in batch.schema.names else "other"
        for row in rows:
            assert row == original.slice(row[key], 1).to_pylist()[0]
            found[file.first_row_index + row[key]] = row
    assert list(found) == sorted(wanted)
