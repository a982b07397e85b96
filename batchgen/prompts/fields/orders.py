"""``prompt.fields`` and ``prompt.field_order``: which field stands where in which row."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from batchgen.prompts.fields.greedy_order import Cells, Ints, Order, fixed_order, group_orders

WINDOW_ROWS = 1 << 17
"""Rows that are looked at together; some hundred bytes a cell are held meanwhile."""


class TableBatch(Protocol):
    """Some rows of the input, in order."""

    @property
    def table(self) -> pa.RecordBatch:
        """At least the columns of the fields."""


class FieldOrders:
    """The order of the fields in each row of the input.

    Memory: four bytes a row.
    """

    def __init__(self, names: Sequence[str], orders: Sequence[Order], which: Ints) -> None:
        """Take the orders in use and which of them each row has."""
        self._orders: list[tuple[str, ...]] = [tuple(names[at] for at in order) for order in orders]
        self._which = which.astype(np.int32)

    def of(self, row: int) -> tuple[str, ...]:
        """Return the names of a row's fields, first to last.

        Args:
            row: position in the input.
        """
        return self._orders[int(self._which[row])]


def find_orders(
    batches: Iterable[TableBatch], names: Sequence[str], kind: str, window_rows: int = WINDOW_ROWS
) -> FieldOrders:
    """Order the fields of all rows, window by window.

    A window keeps the best of the order as it was given, one order for all its rows, and an
    order for each row, as far as ``kind`` allows: so it never shares less than before.

    Args:
        batches: all rows that the job reads, in order.
        names: the fields in the order given.
        kind: ``given``; ``fixed``: one order for all rows, found in the first window;
            ``rows``: one for each row.
    """
    given = tuple(range(len(names)))
    orders: dict[Order, int] = {given: 0}
    found: list[Ints] = []
    fixed: Order | None = None
    for table in _windows(batches, names, window_rows):
        cells = Cells.of(table, names)
        none = np.zeros(table.num_rows, np.int64)
        ways: list[tuple[list[Order], Ints]] = [([given], none)]
        if kind != "given":
            fixed = fixed or fixed_order(cells)
            ways.append(([fixed], none))
        if kind == "rows":
            ways.append(group_orders(cells))
        if kind == "fixed" and found:
            # One order is one order: what the first window chose holds.
            ways = [([list(orders)[int(found[0][0])]], none)]
        best, which = max(ways, key=lambda way: cells.shared(*way))
        numbers = np.array([orders.setdefault(order, len(orders)) for order in best])
        found.append(numbers[which])
    return FieldOrders(names, list(orders), np.concatenate([np.empty(0, np.int64), *found]))


def _windows(
    batches: Iterable[TableBatch], names: Sequence[str], window_rows: int
) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        part = batch.table.select(list(names))
        while rows + part.num_rows >= window_rows:
            taken = window_rows - rows
            yield pa.Table.from_batches([*held, part.slice(0, taken)])
            held, rows, part = [], 0, part.slice(taken)
        if part.num_rows:
            held.append(part)
            rows += part.num_rows
    if held:
        yield pa.Table.from_batches(held)
