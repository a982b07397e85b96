"""Cells of every type reach a template, and one without a Python form fails its row alone."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.errors import RowError, RowErrorType, UsageError
from batchgen.prompts.render import Renderer, Text
from batchgen.prompts.shots import load_shots
from batchgen.prompts.source import PromptSpec
from batchgen.prompts.values import Unreadable, python_rows, python_values

NOON = datetime.datetime(2026, 6, 1, 12, 0, 0, 123456)
NOON_NS = np.array([NOON]).astype("datetime64[ns]").astype(np.int64)[0] + 789
SECOND = 10**9


def times(kind: pa.DataType, value: int) -> pa.Array:
    return pa.array([int(value), None], pa.int64()).cast(kind)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (times(pa.timestamp("ns"), NOON_NS), NOON),
        (times(pa.timestamp("ns", "UTC"), NOON_NS), NOON.replace(tzinfo=datetime.UTC)),
        (times(pa.time64("ns"), SECOND + 1), datetime.time(0, 0, 1)),
        (times(pa.duration("ns"), SECOND + 1), datetime.timedelta(seconds=1)),
    ],
)
def test_f12_nanoseconds_are_cut_to_what_python_has(column: pa.Array, value: object) -> None:
    assert python_values(column) == [value, None]
    nested = pa.StructArray.from_arrays([column], ["t"])
    assert python_values(nested) == [{"t": value}, {"t": None}]
    lists = pa.ListArray.from_arrays([0, 2], column)
    assert python_values(lists) == [[value, None]]


def test_other_types_are_as_arrow_gives_them() -> None:
    table = pa.table(
        {
            "ms": pa.array([1, None], pa.timestamp("ms")),
            "list": [[1, None], None],
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
            "bytes": [b"\xff", None],
        }
    )
    assert python_rows(table) == table.to_pylist()
    assert python_rows(table.to_batches()[0].select([])) == [{}, {}]


def test_a_cell_without_a_python_form_is_a_reason_and_the_others_stay() -> None:
    far = pa.array([10**12, 0, None], pa.timestamp("s"))
    rows = python_rows(pa.table({"n": [1, 2, 3], "far": far}))
    assert isinstance(rows[0], Unreadable)
    assert str(rows[0]).startswith("column far: a value of type timestamp[s] cannot be used in a")
    assert rows[1:] == [
        {"n": 2, "far": datetime.datetime(1970, 1, 1)},
        {"n": 3, "far": None},
    ]


def test_such_a_row_fails_alone(base_tokenizer) -> None:
    table = pa.record_batch({"far": pa.array([10**12, 0], pa.timestamp("s"))})
    spec = PromptSpec(template="{{ far.year }}", format="plain")
    failed, text = Renderer(spec, table.schema, base_tokenizer).render(table)
    assert isinstance(failed, RowError)
    assert failed.type is RowErrorType.TEMPLATE_ERROR
    assert text == Text("1970", hides=False)


def test_a_zone_that_nobody_knows_fails_the_rows_that_have_a_time(tmp_path) -> None:
    column = pa.array([0, None], pa.timestamp("us", "Nowhere/Atall"))
    first, second = python_values(column)
    assert isinstance(first, Unreadable)
    assert second is None
    pq.write_table(pa.table({"text": column, "answer": ["a", "b"]}), tmp_path / "shots.parquet")
    with pytest.raises(UsageError, match=r"shots\.parquet cannot be read: row 0: column text: "):
        load_shots(tmp_path / "shots.parquet")
