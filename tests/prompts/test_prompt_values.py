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


@pytest.mark.parametrize(("kind", "number"), [(pa.float32(), "19.99"), (pa.float16(), "1.1")])
def test_n12_a_small_float_is_printed_as_its_own_shortest_text(kind, number, base_tokenizer):
    floats = pa.array([float(number), 0.1, None], pa.float64()).cast(pa.float32()).cast(kind)
    lists = pa.ListArray.from_arrays([0, 2, 2, 2], floats)
    columns = {
        "bare": floats,
        "list": lists,
        "fixed": pa.array([[float(number)]] * 3, pa.list_(pa.float32(), 1)),
        "struct": pa.StructArray.from_arrays([floats, lists], ["x", "xs"]),
        "map": pa.array([[("k", float(number))], [], None], pa.map_(pa.string(), pa.float32())),
        "coded": pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), floats),
        "wide": pa.array([0.1 + 0.2, 1e300, None]),
    }
    table = pa.record_batch(columns)
    template = (
        "{{ bare }} {{ list }} {{ struct | tojson }} {{ map }} {{ fixed[0] }} "
        "{{ coded }} {{ wide }} {{ '%s' % bare }} {{ bare ~ '' }}"
    )
    prompt = Renderer(PromptSpec(template=template, format="plain"), table.schema, base_tokenizer)
    text = prompt.render(table)[0].text
    assert text == (
        f'{number} [{number}, 0.1] {{"x": {number}, "xs": [{number}, 0.1]}} '
        f"[('k', {number})] {number} {number} 0.30000000000000004 {number} {number}"
    )


def test_n12_the_text_of_a_small_float_names_the_same_number_again():
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    floats = np.concatenate([bits.view(np.float32), np.float32([0.0, -0.0, np.inf, 16777216])])
    values = python_values(pa.array(floats))
    assert np.array_equal(np.float32(values), floats, equal_nan=True)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    assert np.array_equal(np.float16(python_values(pa.array(halves))), halves, equal_nan=True)
    # Spark, DuckDB and pandas print the same digits.
    assert [str(value) for value in python_values(pa.array([0.1, 1e-7], pa.float32()))] == [
        "0.1",
        "1e-07",
    ]


def test_n12_a_shot_prints_the_same_number_as_a_row(tmp_path) -> None:
    table = pa.table({"price": pa.array([19.99], pa.float32()), "answer": ["a"]})
    pq.write_table(table, tmp_path / "shots.parquet")
    assert load_shots(tmp_path / "shots.parquet").rows == ({"price": 19.99, "answer": "a"},)


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
    assert text == Text("1970", is_marked=True)


def test_a_zone_that_nobody_knows_fails_the_rows_that_have_a_time(tmp_path) -> None:
    column = pa.array([0, None], pa.timestamp("us", "Nowhere/Atall"))
    first, second = python_values(column)
    assert isinstance(first, Unreadable)
    assert second is None
    pq.write_table(pa.table({"text": column, "answer": ["a", "b"]}), tmp_path / "shots.parquet")
    with pytest.raises(UsageError, match=r"shots\.parquet cannot be read: row 0: column text: "):
        load_shots(tmp_path / "shots.parquet")
