"""Carried columns: what goes in comes out, in type and value, whatever happens to the row."""

import datetime as dt
import random
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.output.schema import output_schema
from tests.job.harness import Job

ROWS = 40
UTC = dt.UTC


def _table(rows: int = ROWS) -> pa.Table:
    """Rows of all kinds of types, nulls among them, and prompts of which some fail."""
    rng = random.Random(4)

    def some(values: list[Any]) -> list[Any]:
        return [None if rng.random() < 0.2 else rng.choice(values) for _ in range(rows)]

    moments = [
        dt.datetime(2024, 3, 31, 1, 59, 59, 123456, UTC),
        dt.datetime(1900, 1, 1, tzinfo=UTC),
    ]
    inner = pa.struct([("name", pa.string()), ("sizes", pa.list_(pa.decimal128(5, 2)))])
    columns = {
        "prompt": pa.array([None if i % 7 == 3 else f"The dog {i % 5}" for i in range(rows)]),
        "price": pa.array(some([Decimal("12345678901234567.89"), Decimal("-0.01")]),
                          pa.decimal128(25, 2)),
        "seen": pa.array(some(moments), pa.timestamp("us", "Europe/Vienna")),
        "plain": pa.array(some([m.replace(tzinfo=None, microsecond=0) for m in moments]),
                          pa.timestamp("ms")),
        "day": pa.array(some([dt.date(2000, 2, 29)]), pa.date32()),
        "clock": pa.array(some([dt.time(23, 59, 59, 1)]), pa.time64("us")),
        "nested": pa.array(
            some([{"name": "é", "sizes": [Decimal("1.50"), None]}, {"name": None, "sizes": []}]),
            inner,
        ),
        "deep": pa.array(some([[{"name": "x", "sizes": None}], []]), pa.list_(inner)),
        "pairs": pa.array(some([[("a", 1), ("b", None)], []]), pa.map_(pa.string(), pa.int16())),
        "kind": pa.array(some(["red", "green", "blue"])).dictionary_encode(),
        "long": pa.array(some(["x" * 100, ""]), pa.large_string()),
        "bytes": pa.array(some([b"\xff\x00", b""]), pa.binary()),
        "fixed": pa.array(some([b"abcd"]), pa.binary(4)),
        "wide": pa.array(some([2**64 - 1, 0]), pa.uint64()),
        "flag": pa.array(some([True, False])),
        "nothing": pa.nulls(rows),
        "label_of_row": pa.array(some(["good", "bad"])),
    }  # fmt: skip
    return pa.table({"id": pa.array(range(100, 100 + rows)), **columns})


def _carried(job: Job, names: list[str]) -> pa.Table:
    """The carried columns of the output, in input order."""
    table = pq.read_table(job.out).sort_by(
        [("row_index", "ascending"), ("sample_index", "ascending")]
    )
    assert table.schema.names[-len(names) :] == names
    return table


def _write(job: Job, table: pa.Table) -> pa.Table:
    pq.write_table(table, job.input, row_group_size=7)
    # What Parquet itself keeps is what went in.
    return pq.read_table(job.input)


@pytest.mark.parametrize("order", ["completion", "input"])
@pytest.mark.parametrize("samples", [1, 3])
def test_f12_all_columns_come_out_as_they_went_in(job: Job, order: str, samples: int) -> None:
    given = _write(job, _table())
    arguments = ("output.carry_columns=[all]", f"output.order={order}", f"sampling.n={samples}",
                 "sampling.temperature=1", "output.rows_per_part=9")  # fmt: skip
    assert job(*arguments) == 0
    names = [name for name in given.schema.names if name != "id"]
    out = _carried(job, names)
    assert out.column("status").to_pylist().count("error") == 6
    expected = given.take(pa.array(out.column("row_index").to_pylist()))
    for name in names:
        assert out.schema.field(name).type == given.schema.field(name).type, name
        assert out.column(name).to_pylist() == expected.column(name).to_pylist(), name
    assert out.column("id").to_pylist() == expected.column("id").to_pylist()
    schema = output_schema(pa.int64(), pa.schema([given.schema.field(name) for name in names]))
    assert all(pq.read_schema(part).names == schema.names for part in job.parts)
    # And as another reader sees it.
    query = f"SELECT price, kind, nested.name FROM '{job.out}/*.parquet' ORDER BY row_index"
    assert len(duckdb.sql(query).fetchall()) == len(out)


def test_rows_of_a_lost_part_get_their_columns_again_and_a_change_of_columns_is_refused(
    job: Job, capsys: Any
) -> None:
    given = _write(job, _table())
    arguments = ("output.carry_columns=[kind,seen]", "output.rows_per_part=9")
    assert job(*arguments) == 0
    job.parts[1].unlink()
    (job.out / "_SUCCESS").unlink()
    assert job("output.carry_columns=[kind]", "output.rows_per_part=9") == 2
    assert "output.carry_columns" in capsys.readouterr().err
    assert job(*arguments) == 0
    out = _carried(job, ["kind", "seen"])
    assert out.column("row_index").to_pylist() == list(range(ROWS))
    for name in ("kind", "seen"):
        assert out.column(name).to_pylist() == given.column(name).to_pylist()
        assert out.schema.field(name).type == given.schema.field(name).type


def test_failed_rows_that_are_tried_again_keep_their_columns(job: Job) -> None:
    given = _write(job, _table())
    arguments = ("output.carry_columns=[price,kind,deep]", "output.order=input")
    assert job(*arguments) == 0
    assert job(*arguments, "output.retry_errors=true") == 0
    out = _carried(job, ["price", "kind", "deep"])
    for name in ("price", "kind", "deep"):
        assert out.column(name).to_pylist() == given.column(name).to_pylist()


def test_files_that_differ_get_one_type_and_nulls_where_a_column_is_missing(job: Job) -> None:
    folder = job.folder / "data"
    folder.mkdir()
    files = [
        pa.table({"prompt": ["a dog"], "size": pa.array([1], pa.int8()),
                  "kind": pa.array(["x"]).dictionary_encode(), "only": ["here"]}),
        pa.table({"prompt": ["a fox"], "size": pa.array([300], pa.int32()),
                  "kind": pa.array(["y"]).dictionary_encode()}),
        pa.table({"prompt": ["a cat"], "size": pa.nulls(1), "kind": pa.array(["z"])}),
    ]  # fmt: skip
    for number, table in enumerate(files):
        pq.write_table(table, folder / f"{number}.parquet")
    job.given["input.path"] = str(folder)
    assert job("output.carry_columns=[size,kind,only]") == 0
    out = _carried(job, ["size", "kind", "only"])
    assert out.column("size").to_pylist() == [1, 300, None]
    assert out.schema.field("size").type == pa.int32()
    assert out.column("kind").to_pylist() == ["x", "y", "z"]
    assert out.column("only").to_pylist() == ["here", None, None]


def test_views_become_plain_and_dictionaries_of_every_row_group_their_own(job: Job) -> None:
    kinds = pa.array([f"k{i // 3}" for i in range(30)]).dictionary_encode()
    views = pa.array([None if i % 4 == 0 else f"v{i}" for i in range(30)], pa.string_view())
    table = pa.table({"prompt": [f"dog {i}" for i in range(30)], "kind": kinds, "view": views})
    _write(job, table)
    common = ("output.carry_columns=[all]", "output.rows_per_part=7", "output.order=input")
    assert job(*common, "schedule.order=length") == 0
    out = _carried(job, ["prompt", "kind", "view"])
    assert out.schema.field("view").type == pa.string()
    assert out.column("view").to_pylist() == views.to_pylist()
    assert pa.types.is_dictionary(out.schema.field("kind").type)
    assert out.column("kind").to_pylist() == kinds.to_pylist()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("[status,price]", "status is among the output's own columns"),
        ("[all]", "status, label are among"),
        ("[prise]", "no column prise"),
        ("[price,price]", "price twice"),
    ],
)
def test_f06_what_cannot_be_carried_is_refused_by_name(
    job: Job, columns: str, message: str, capsys: Any
) -> None:
    table = _table(3).append_column("status", pa.array(["x"] * 3))
    _write(job, table.append_column("label", pa.array(["x"] * 3)))
    assert job(f"output.carry_columns={columns}") == 2
    assert message in capsys.readouterr().err
    assert not job.parts
