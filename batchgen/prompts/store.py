"""The prompts of a job as token ids, kept once on disk and read through a memory map."""

import bisect
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.errors import RowError, RowErrorType, UsageError
from batchgen.prompts.limits import IdArray
from batchgen.prompts.tokenizer import Tokenizer


def store_schema(id_type: pa.DataType) -> pa.Schema:
    """Return the store's schema for ids of the given type."""
    return pa.schema(
        [
            pa.field("row_index", pa.int64(), nullable=False),
            pa.field("id", id_type),
            pa.field("token_ids", pa.list_(pa.int32())),
            pa.field("sampling_params", pa.string()),
            pa.field("priority", pa.int64(), nullable=False),
            pa.field("cut_tokens", pa.int32(), nullable=False),
            pa.field("error_type", pa.string()),
            pa.field("error_message", pa.string()),
        ]
    )


class PromptStore:
    """An Arrow file of prompts, memory-mapped.

    A store row is counted from 0 in file order; ``row_index`` is the row's position in
    the whole input. Every array given out lies in the map or is one number a row.

    Attributes:
        path: the file.
        num_rows: rows, those with errors included.
        lengths: prompt tokens of every store row, 0 where the row has an error.
    """

    def __init__(self, path: Path) -> None:
        """Map a finished store.

        Raises:
            UsageError: the file is missing or was not written by :meth:`write`.
        """
        self.path = path
        try:
            self._map = pa.memory_map(str(path))
            reader = pa.ipc.open_file(self._map)
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"{path} cannot be read ({error}); remove it to plan again") from error
        self.schema: pa.Schema = reader.schema
        self._starts = [0]
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
        self.num_rows = self._starts[-1]
        self._tokens = [_list_buffers(batch.column("token_ids")) for batch in self._batches]
        self.lengths = _joined([np.diff(offsets) for offsets, _ in self._tokens], np.int32)

    @classmethod
    def write(cls, path: Path, id_type: pa.DataType, batches: Iterable[pa.RecordBatch]) -> Self:
        """Write a store batch by batch, and open it.

        The file appears under its name only when it is whole.

        Args:
            id_type: type of the ``id`` column, needed where there are no batches.
            batches: as ``tokenize_batches`` yields them; one is held at a time.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            with pa.ipc.new_file(file, store_schema(id_type)) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        return cls(path)

    def __len__(self) -> int:
        return self.num_rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; arrays given out before must not be used any more."""
        self._batches.clear()
        self._tokens.clear()
        self._map.close()

    def ids(self, row: int) -> IdArray:
        """Return a row's token ids ``[L]``, a view into the map."""
        at, inner = self._locate(row)
        offsets, values = self._tokens[at]
        return values[offsets[inner] : offsets[inner + 1]]

    @cached_property
    def row_index(self) -> npt.NDArray[np.int64]:
        """Position in the input of every store row ``[num_rows]``."""
        columns = [batch.column("row_index").to_numpy() for batch in self._batches]
        return _joined(columns, np.int64)

    @cached_property
    def priorities(self) -> npt.NDArray[np.int64]:
        """Priority of every store row ``[num_rows]``; lower numbers go first."""
        columns = [batch.column("priority").to_numpy() for batch in self._batches]
        return _joined(columns, np.int64)

    @cached_property
    def cut_tokens(self) -> npt.NDArray[np.int32]:
        """Tokens that truncation took from every store row's prompt ``[num_rows]``."""
        columns = [batch.column("cut_tokens").to_numpy() for batch in self._batches]
        return _joined(columns, np.int32)

    @property
    def row_ids(self) -> pa.ChunkedArray:
        """The ``id`` of every store row, in its own type."""
        return self._column("id")

    @property
    def sampling_params(self) -> pa.ChunkedArray:
        """JSON of every store row's own sampling parameters, null where it has none."""
        return self._column("sampling_params")

    @cached_property
    def good_rows(self) -> npt.NDArray[np.int64]:
        """Store rows without an error, ascending."""
        masks = [batch.column("error_type").is_null().to_numpy(False) for batch in self._batches]
        return np.flatnonzero(_joined(masks, np.bool_))

    def error(self, row: int) -> RowError | None:
        """Return what is wrong with a store row, or None."""
        at, inner = self._locate(row)
        kind = self._batches[at].column("error_type")[inner].as_py()
        if kind is None:
            return None
        message = self._batches[at].column("error_message")[inner].as_py()
        return RowError(RowErrorType(kind), message)

    def errors(self) -> Iterator[tuple[int, RowError]]:
        """Yield store row and error for every row that has one."""
        bad = np.setdiff1d(np.arange(self.num_rows), self.good_rows, assume_unique=True)
        for row in bad.tolist():
            error = self.error(row)
            assert error is not None
            yield row, error

    def _column(self, name: str) -> pa.ChunkedArray:
        chunks = [batch.column(name) for batch in self._batches]
        return pa.chunked_array(chunks, type=self.schema.field(name).type)

    def _locate(self, row: int) -> tuple[int, int]:
        if not 0 <= row < self.num_rows:
            raise IndexError(f"store row {row} of {self.num_rows}")
        at = bisect.bisect_right(self._starts, row) - 1
        return at, row - self._starts[at]


def _list_buffers(column: pa.ListArray) -> tuple[IdArray, IdArray]:
    return column.offsets.to_numpy(), column.values.to_numpy()


_Scalar = TypeVar("_Scalar", bound=np.generic)


def _joined(parts: list[npt.NDArray[_Scalar]], kind: type[_Scalar]) -> npt.NDArray[_Scalar]:
    return np.concatenate([np.empty(0, kind), *parts], dtype=kind)


def preview(store: PromptStore, tokenizer: Tokenizer | None, rows: int) -> str:
    """Show the first rows: text decoded from the ids, special tokens included, and ids.

    Args:
        tokenizer: None where the rows carry token ids and the model has no tokenizer.
        rows: store rows shown at most.
    """
    return "\n\n".join(_show(store, tokenizer, row) for row in range(min(rows, store.num_rows)))


def _show(store: PromptStore, tokenizer: Tokenizer | None, row: int) -> str:
    head = f"row {store.row_index[row]}, id {store.row_ids[row].as_py()!r}"
    error = store.error(row)
    if error is not None:
        return f"{head}: {error.type.value}: {error.message}"
    ids = store.ids(row).tolist()
    overrides = store.sampling_params[row].as_py()
    cut = int(store.cut_tokens[row])
    notes = [
        f"{len(ids)} tokens",
        f"{cut} cut off" if cut else "",
        overrides and f"sampling {overrides}",
    ]
    lines = [f"{head}: {', '.join(filter(None, notes))}"]
    if tokenizer is not None:
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        lines.append(text)
    lines.append(f"token ids: {ids}")
    return "\n".join(lines)
