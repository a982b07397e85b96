"""Input columns that go into the output as they are (``output.carry_columns``).

Rows come out in another order than they went in, so the columns are first copied into one
Arrow file, from which the writer takes the rows of each part. An Arrow stream keeps what
Parquet gave: dictionaries, decimals, time zones, nested types. Only views of text and lists,
which Arrow itself can neither filter nor take from, become plain text and lists.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.data.input.source import InputSource
from batchgen.errors import UsageError, listed

ALL = "all"
_KEY = "output.carry_columns"


def carried_schema(
    source: InputSource, wanted: Sequence[str], *, id_column: str | None, own: Collection[str]
) -> pa.Schema:
    """Settle which columns are carried, and their types.

    A column has the type of its files where they agree, else the common one. The ids are in
    the output already: a column ``id`` that is the id is left out.

    Args:
        source: the input.
        wanted: names, or ``all`` alone for all columns.
        id_column: ``input.id_column``.
        own: the names of the output's own columns.

    Raises:
        UsageError: a name that is no column, is there twice, has no common type over the
            files, or is a name of the output's own.
    """
    names = source.schema.names if list(wanted) == [ALL] else list(wanted)
    if id_column in (None, "id"):
        names = [name for name in names if name != "id"]
    absent = [name for name in names if name not in source.schema.names]
    if absent:
        raise UsageError(
            f"{_KEY}: no column {absent[0]} in {source.path}; the columns are: "
            f"{listed(source.schema.names)}"
        )
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UsageError(f"{_KEY} names the column {repeated[0]} twice")
    clashes = [name for name in names if name in own]
    if clashes:
        raise UsageError(
            f"{_KEY}: {', '.join(clashes)} {'is' if len(clashes) == 1 else 'are'} among the "
            "output's own columns; rename it in the input, or name the columns to carry without it"
        )
    conflicts = [source.conflicts[name] for name in names if name in source.conflicts]
    if conflicts:
        raise UsageError(f"{_KEY}: {conflicts[0]}")
    return pa.schema([(name, source.originals[name]) for name in names])


def write_carried(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Copy the columns of all rows, in input order.

    Raises:
        OSError: the disk does not take them.
    """
    # A stream and not a file: each batch may have dictionaries of its own.
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


class CarriedRows:
    """The copy, memory-mapped.

    Attributes:
        schema: the carried columns.
        row_bytes: bytes of a row, on average.
    """

    def __init__(self, path: Path) -> None:
        self._map = pa.memory_map(str(path))
        reader = pa.ipc.open_stream(self._map)
        self._batches = list(reader)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self.schema: pa.Schema = reader.schema
        self.row_bytes = self._map.size() // max(1, int(self._starts[-1]))

    def take(self, row_indices: npt.NDArray[np.int64]) -> list[pa.Array]:
        """Give the columns of some rows, in the order of the rows."""
        where = np.searchsorted(self._starts, row_indices, "right") - 1
        order = np.argsort(where, kind="stable")
        used, counts = np.unique(where, return_counts=True)
        local = np.split(row_indices[order] - self._starts[where[order]], np.cumsum(counts)[:-1])
        back = pa.array(np.argsort(order, kind="stable"))
        columns: list[pa.Array] = []
        for at in range(len(self.schema)):
            pieces = [
                self._batches[batch].column(at).take(pa.array(rows))
                for batch, rows in zip(used.tolist(), local, strict=True)
            ]
            columns.append(pa.concat_arrays(pieces).take(back))
        return columns

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._batches = []
        self._map.close()
