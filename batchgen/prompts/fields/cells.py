"""A table's cells as codes and sizes, and what rows share where their fields stand in an order."""

from collections.abc import Sequence
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
