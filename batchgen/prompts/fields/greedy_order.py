"""An order of fields for each row, so that rows share as long a prefix as they can.

Greedy group recursion (Liu et al., "Optimizing LLM Queries in Relational Data Analytics
Workloads", MLSys 2025): of all values of all fields take the one whose rows have most to
share, let its field lead these rows, and go on with their other fields, and with the other
rows. A field that another one determines is counted with it and stands behind it.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.prompts.values import python_values

Ints = npt.NDArray[np.int64]
Order = tuple[int, ...]
"""Fields by number, first to last."""


@dataclass(frozen=True, slots=True)
class Cells:
    """What an order of fields depends on.

    Attributes:
        codes: ``[rows, fields]``; equal within a field where the values are.
        sizes: ``[rows, fields]`` characters that a cell brings to the prompt, its name too.
    """

    codes: Ints
    sizes: Ints

    @classmethod
    def of(cls, table: pa.Table, names: Sequence[str]) -> "Cells":
        """Take the columns of a table."""
        rows, fields = table.num_rows, len(names)
        codes, sizes = np.empty((rows, fields), np.int64), np.empty((rows, fields), np.int64)
        for at, name in enumerate(names):
            codes[:, at], chars = _encoded(table.column(name))
            sizes[:, at] = chars + len(name)
        return cls(codes, sizes)

    def shared(self, orders: Sequence[Order], which: Ints) -> int:
        """Count the characters that rows share with their neighbour in the sorted table.

        Args:
            orders: the orders that are used.
            which: ``[rows]`` the order of each row.
        """
        if len(self.codes) < 2:
            return 0
        fields = np.array(orders)[which]
        codes = np.take_along_axis(self.codes, fields, axis=1)
        # A cell is shared where the same field has the same value at the same place.
        keys = codes * fields.shape[1] + fields
        ranking = np.lexsort(keys.T[::-1])
        equal = keys[ranking][1:] == keys[ranking][:-1]
        leading = np.logical_and.accumulate(equal, axis=1)
        sizes = np.take_along_axis(self.sizes, fields, axis=1)[ranking][1:]
        return int((sizes * leading).sum())


def _encoded(column: pa.ChunkedArray) -> tuple[Ints, Ints]:
    """Number a column's values, and give the characters of each row's."""
    try:
        texts = pc.cast(column, pa.large_string())
    except pa.ArrowException:
        # Lists and structs have no text in Arrow.
        values = [None if each is None else str(each) for each in python_values(column)]
        texts = pa.chunked_array([pa.array(values, pa.large_string())])
    encoded = pc.fill_null(texts, "\0").combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    lengths = pc.utf8_length(encoded.dictionary).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, lengths[codes]


# Below this many rows all that can be shared is shared by putting what is equal first.
_FEW_ROWS = 3


def group_orders(cells: Cells) -> tuple[list[Order], Ints]:
    """Order the fields of every row.

    Returns:
        the orders in use, and ``[rows]`` which of them each row has.
    """
    rows, fields = cells.codes.shape
    search = _Search(cells)
    search.solve(np.arange(rows), tuple(range(fields)), ())
    return search.orders, search.which


def fixed_order(cells: Cells) -> Order:
    """Order the fields for all rows at once: those first whose values repeat and are long."""
    worth = [
        _worth(codes, sizes) for codes, sizes in zip(cells.codes.T, cells.sizes.T, strict=True)
    ]
    return tuple(int(at) for at in np.argsort(-np.array(worth), kind="stable"))


def _worth(codes: Ints, sizes: Ints) -> float:
    _, first, counts = np.unique(codes, return_index=True, return_counts=True)
    return float((sizes[first].astype(np.float64) ** 2 * (counts - 1)).sum())


class _Search:
    def __init__(self, cells: Cells) -> None:
        self.orders: list[Order] = []
        self.which = np.zeros(len(cells.codes), np.int64)
        self._numbers: dict[Order, int] = {}
        self._cells = cells
        self._determined = _determined_fields(cells.codes)
        self._rest = fixed_order(cells)

    def solve(self, rows: Ints, fields: Order, before: Order) -> None:
        """Assign every row an order that begins with some fields."""
        if len(rows) <= _FEW_ROWS or len(fields) < 2:
            equal = [at for at in self._in_rest(fields) if self._is_constant(rows, at)]
            self._assign(rows, (*before, *equal, *(at for at in self._in_rest(fields)
                                                   if at not in equal)))  # fmt: skip
            return
        level = _Level(self._cells, rows, fields, self._determined)
        for field, members in level.groups():
            # Whatever is equal in all these rows costs nothing to have in front.
            constant = [
                at for at in self._in_rest(fields) if at != field and self._is_constant(members, at)
            ]
            leading = (field, *constant)
            others = tuple(at for at in fields if at not in leading)
            self.solve(members, others, (*before, *leading))
        self._assign(level.left(), (*before, *self._in_rest(fields)))

    def _in_rest(self, fields: Order) -> list[int]:
        return [at for at in self._rest if at in fields]

    def _is_constant(self, rows: Ints, field: int) -> bool:
        codes = self._cells.codes[rows, field]
        return bool((codes == codes[0]).all())

    def _assign(self, rows: Ints, order: Order) -> None:
        if not len(rows):
            return
        number = self._numbers.setdefault(order, len(self._numbers))
        if number == len(self.orders):
            self.orders.append(order)
        self.which[rows] = number


class _Level:
    """The choice among all values of some fields over some rows.

    Counts only fall as rows leave, so a value on the heap is worth no more than it says: it is
    looked at again when it comes to the top.
    """

    def __init__(
        self, cells: Cells, rows: Ints, fields: Order, determined: Sequence[Sequence[int]]
    ) -> None:
        self._rows = rows
        self._alive = np.ones(len(rows), dtype=bool)
        self._fields = fields
        self._codes: list[Ints] = []
        self._counts: list[Ints] = []
        self._members: list[list[Ints]] = []
        self._worth: list[list[float]] = []
        self._heap: list[tuple[float, int, int]] = []
        for at, field in enumerate(fields):
            _, first, codes, counts = np.unique(
                cells.codes[rows, field], return_index=True, return_inverse=True, return_counts=True
            )
            with_it = [field, *(other for other in determined[field] if other in fields)]
            sizes = cells.sizes[rows[first]][:, with_it].astype(np.float64)
            self._codes.append(codes)
            self._counts.append(counts)
            self._worth.append((sizes**2).sum(axis=1).tolist())
            several = np.flatnonzero(counts > 1)
            self._heap += [
                (-self._worth[at][value] * (count - 1), at, value)
                for value, count in zip(several.tolist(), counts[several].tolist(), strict=True)
            ]
            by_value = np.argsort(codes, kind="stable")
            self._members.append(np.split(by_value, np.cumsum(counts)[:-1]))
        heapq.heapify(self._heap)

    def groups(self) -> Iterator[tuple[int, Ints]]:
        """Yield the field that leads and its rows, until nothing more can be shared."""
        while self._heap:
            worth, at, value = heapq.heappop(self._heap)
            count = int(self._counts[at][value])
            if count < 2:
                continue
            now = -self._worth[at][value] * (count - 1)
            if now > worth:
                heapq.heappush(self._heap, (now, at, value))
                continue
            members = self._members[at][value]
            members = members[self._alive[members]]
            self._alive[members] = False
            for codes, counts in zip(self._codes, self._counts, strict=True):
                np.subtract.at(counts, codes[members], 1)
            yield self._fields[at], self._rows[members]

    def left(self) -> Ints:
        """Return the rows that are in no group."""
        return self._rows[self._alive]


def _determined_fields(codes: Ints) -> list[list[int]]:
    """Find for each field the others that have one value wherever it has one."""
    fields = codes.shape[1]
    distinct = [len(np.unique(codes[:, at])) for at in range(fields)]
    found: list[list[int]] = [[] for _ in range(fields)]
    for at in range(fields):
        for other in range(fields):
            # What never repeats determines everything, and shares nothing.
            if at == other or distinct[at] < distinct[other] or distinct[at] == len(codes):
                continue
            pairs = codes[:, at] * (int(codes[:, other].max(initial=0)) + 1) + codes[:, other]
            if len(np.unique(pairs)) == distinct[at]:
                found[at].append(other)
    return found
