"""Cells as Python values for templates, also where a value has no Python form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.prompts.columns import is_list_of


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A cell that has no Python form, such as a date beyond the year 9999.

    Attributes:
        reason: why, for the user.
    """

    reason: str

    def __str__(self) -> str:
        return self.reason


def python_rows(table: pa.RecordBatch | pa.Table) -> list[Mapping[str, Any] | Unreadable]:
    """Give the rows of a table; one with a cell that has no Python form gives the reason.

    Times are cut to whole microseconds, which is as fine as Python's own go.
    """
    columns = [
        (name, python_values(table.column(at))) for at, name in enumerate(table.schema.names)
    ]
    rows: list[Mapping[str, Any] | Unreadable] = []
    for at in range(table.num_rows):
        row = {name: values[at] for name, values in columns}
        bad = (name for name, value in row.items() if isinstance(value, Unreadable))
        name = next(bad, None)
        rows.append(row if name is None else Unreadable(f"column {name}: {row[name]}"))
    return rows


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Give the values of a column, an :class:`Unreadable` for each that has no Python form.

    A number of 16 or 32 bits becomes the float that prints as its own shortest text: ``0.1``,
    not ``0.10000000149011612``.
    """
    kind = _in_microseconds(column.type)
    if not kind.equals(column.type):
        column = column.cast(kind, safe=False)
    try:
        values: list[Any] = column.to_pylist()
    except Exception:
        # Python's date, time and zone types raise what they like.
        values = [_value(each) for each in column]
    # Arrow calls them float and halffloat, and the one of 64 bits double.
    return [_shortened(value, kind) for value in values] if "float" in str(kind) else values


def _value(cell: pa.Scalar) -> Any:
    try:
        return cell.as_py()
    except Exception as error:
        return Unreadable(f"a value of type {cell.type} cannot be used in a template: {error}")


def _shortened(value: Any, kind: pa.DataType) -> Any:
    """Give each float of 16 or 32 bits in a value as the float that its shortest text names."""
    short: Any = value
    if value is None or isinstance(value, Unreadable):
        return value
    if pa.types.is_float32(kind) or pa.types.is_float16(kind):
        short = float(str((np.float32 if pa.types.is_float32(kind) else np.float16)(value)))
    elif pa.types.is_dictionary(kind):
        short = _shortened(value, kind.value_type)
    elif pa.types.is_struct(kind):
        short = {field.name: _shortened(value[field.name], field.type) for field in kind}
    elif pa.types.is_map(kind):
        types = kind.key_type, kind.item_type
        short = [tuple(map(_shortened, pair, types)) for pair in value]
    elif is_list_of(kind, lambda _: True):
        short = [_shortened(item, kind.value_type) for item in value]
    return short


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """Give the type with microseconds in the place of nanoseconds, inside other types too."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_in_microseconds(kind.key_type), _in_microseconds(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_in_microseconds(kind.value_type), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(_in_microseconds(kind.value_type))
    return _coarser(kind)


def _coarser(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    coarser = {pa.time64("ns"): pa.time64("us"), pa.duration("ns"): pa.duration("us")}
    return coarser.get(kind, kind)
