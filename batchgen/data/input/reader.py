"""Reading input rows batch by batch, in their order, with only the columns somebody needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.data import failpoints
from batchgen.data.ids import IdCheck
from batchgen.data.input.source import InputFile, InputSource
from batchgen.data.input.types import conform, is_text, replace_invalid_text
from batchgen.data.stores.store import parquet_file
from batchgen.errors import UsageError, listed

# Column chunks are read through a buffer of this size, and not fetched ahead: otherwise whole
# column chunks are loaded at once and memory grows with the row group.
_READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Some consecutive input rows.

    Attributes:
        first_row_index: global position of the first of them.
        ids: ``[N]`` ids, integer or text, never null.
        table: ``[N]`` rows of the asked columns, in the asked order.
    """

    first_row_index: int
    ids: pa.Array
    table: pa.RecordBatch


def id_type(source: InputSource, id_column: str | None) -> pa.DataType:
    """Give the Arrow type of the ids: the column's own, or string where ids are made.

    Args:
        source: the input.
        id_column: the column named for it; None takes ``id`` where the files have it and
            makes ids where they do not.

    Raises:
        UsageError: a named column that is not there, or one that is neither integer nor
            text.
    """
    column = _find_id_column(source, id_column)
    if column is None:
        return pa.string()
    kind = source.schema.field(column).type
    if pa.types.is_null(kind):
        return pa.string()
    if not (pa.types.is_integer(kind) or is_text(kind)):
        raise UsageError(
            f"input.id_column: column {column} of {source.path} has type {kind}; ids must be "
            "integers or strings: cast it, or name another column with input.id_column"
        )
    return kind


def read_rows(
    source: InputSource,
    columns: Sequence[str],
    *,
    id_column: str | None,
    limit: int | None,
    batch_rows: int = 1024,
) -> Iterator[RowBatch]:
    """Read rows in input order, ``batch_rows`` at a time at most.

    Where ids are made, a row's id is ``<file name relative to input.path>:<row in file>``.
    Text bytes that are not UTF-8 are replaced by U+FFFD. A column that only some files
    have is null in the rows of the others.

    Args:
        source: the input.
        columns: the columns needed besides the id; none at all is fine.
        id_column: see :func:`id_type`.
        limit: rows to read at most; None reads all.
        batch_rows: rows in a batch at most.

    Raises:
        UsageError: at once for a column that is not there or has no common type over the
            files; while reading for a null id or a damaged row group, naming the file.
    """
    for column in columns:
        _require_column(source, column, "input.path")
    kind = id_type(source, id_column)
    reader = _Reader(source, tuple(columns), _find_id_column(source, id_column), kind, batch_rows)
    return reader.rows(source.num_rows if limit is None else limit)


def check_ids(source: InputSource, *, id_column: str | None, limit: int | None) -> str:
    """Read only the ids; give their digest.

    Raises:
        UsageError: as :func:`read_rows`, and for an id that stands more than once.
    """
    check = IdCheck()
    for batch in read_rows(source, (), id_column=id_column, limit=limit, batch_rows=1 << 16):
        check.add(batch.ids)
    check.raise_on_duplicates(lambda row: describe_row(source, row, id_column))
    return check.digest()


def describe_row(source: InputSource, row_index: int, id_column: str | None) -> str:
    """Name a row for the user: its id, its file and its position in that file."""
    file, row = source.locate(row_index)
    column = _find_id_column(source, id_column)
    where = f"{file.path}:{row}"
    if column is None:
        return where
    batch = next(_read_original(file, np.array([row]), [column]))
    return f"id {batch.column(0).to_pylist()[0]} at {where}"


def read_original_rows(
    source: InputSource, row_indices: npt.NDArray[np.int64]
) -> Iterator[tuple[InputFile, pa.RecordBatch]]:
    """Read some rows back with all their columns, in the types of their file.

    Row groups without any of the rows are not read.

    Args:
        source: the input.
        row_indices: global positions, ascending, each once.

    Yields:
        the file and some of its rows, in input order.
    """
    for file in source.files:
        first = file.first_row_index
        start, stop = np.searchsorted(row_indices, [first, first + file.num_rows])
        if start < stop:
            for batch in _read_original(file, row_indices[start:stop] - first, None):
                yield file, batch


def read_carried(
    source: InputSource, schema: pa.Schema, limit: int | None
) -> Iterator[pa.RecordBatch]:
    """Read columns in the types of a schema, in input order; null where a file has none.

    Text bytes that are not UTF-8 are replaced by U+FFFD.

    Raises:
        UsageError: an input file can no longer be read, or its values do not fit the type.
    """
    most = source.num_rows if limit is None else limit
    for file in source.files:
        left = min(file.num_rows, most - file.first_row_index)
        for batch in _carried_batches(file, schema.names) if left > 0 else ():
            rows = batch.slice(0, left)
            try:
                columns = [_carried(rows, field) for field in schema]
            except pa.ArrowException as error:
                raise UsageError(f"output.carry_columns: {file.path}: {error}") from error
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
            left -= rows.num_rows
            if left <= 0:
                break


def _carried_batches(file: InputFile, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield a file's carried columns.

    Raises:
        UsageError: naming the column that cannot be read, if it is one of them.
    """
    try:
        yield from _iter_batches(file, names, 1024)
    except UsageError:
        for name in names:
            try:
                for _ in _iter_batches(file, [name], 1024):
                    pass
            except UsageError as error:
                raise UsageError(f"output.carry_columns: column {name}: {error}") from error
        raise


def _carried(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    if index < 0:
        return pa.nulls(batch.num_rows, field.type)
    array = conform(batch.column(index), field.type)
    return array if pa.types.is_dictionary(field.type) else replace_invalid_text(array)


@dataclass(frozen=True, slots=True)
class _Reader:
    source: InputSource
    columns: tuple[str, ...]
    id_column: str | None
    id_type: pa.DataType
    batch_rows: int

    def rows(self, limit: int) -> Iterator[RowBatch]:
        for file in self.source.files:
            wanted = min(file.num_rows, limit - file.first_row_index)
            if wanted > 0:
                yield from self._file_rows(file, wanted)

    def _file_rows(self, file: InputFile, wanted: int) -> Iterator[RowBatch]:
        needed = dict.fromkeys(self.columns)
        if self.id_column is not None:
            needed[self.id_column] = None
        row = 0
        for raw in _iter_batches(file, list(needed), self.batch_rows):
            batch = raw.slice(0, wanted - row)
            for part in self._convert(file, row, batch):
                yield part
                row += part.table.num_rows
            if row == wanted:
                return
        raise UsageError(
            f"input.path: {file.path} holds {row} rows where its footer says {file.num_rows}; "
            "write it again"
        )

    def _convert(self, file: InputFile, row: int, batch: pa.RecordBatch) -> Iterator[RowBatch]:
        """Turn rows as they stand in the file into rows of the common types."""
        try:
            arrays = [self._column(batch, name) for name in self.columns]
            ids = self._ids(file, row, batch)
        except pa.ArrowInvalid as error:
            # Text of 2 GiB does not fit one array; half the rows do, sooner or later.
            if batch.num_rows <= 1:
                raise UsageError(f"input.path: {file.path}, row {row}: {error}") from error
            half = batch.num_rows // 2
            yield from self._convert(file, row, batch.slice(0, half))
            yield from self._convert(file, row + half, batch.slice(half))
            return
        table = _record_batch(arrays, self.columns, batch.num_rows)
        yield RowBatch(file.first_row_index + row, ids, table)

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        kind = self.source.schema.field(name).type
        index = batch.schema.get_field_index(name)
        if index < 0:
            return pa.nulls(batch.num_rows, kind)
        array = batch.column(index)
        try:
            return replace_invalid_text(conform(array, kind))
        except pa.ArrowNotImplementedError as error:
            raise UsageError(
                f"input.path: column {name} is {array.type}, which cannot be read as {kind}: "
                f"{error}; cast it when the files are written"
            ) from error

    def _ids(self, file: InputFile, row: int, batch: pa.RecordBatch) -> pa.Array:
        if self.id_column is None:
            made = [f"{file.name}:{i}" for i in range(row, row + batch.num_rows)]
            return pa.array(made, pa.string())
        index = batch.schema.get_field_index(self.id_column)
        if index < 0:
            raise UsageError(f"input.id_column: {file.path} has no column {self.id_column}")
        ids = conform(batch.column(index), self.id_type)
        if ids.null_count:
            first = ids.is_null().index(True).as_py()
            raise UsageError(
                f"input.id_column: column {self.id_column} is null in {file.path}, row "
                f"{row + first}; every row needs an id: fill it in, or name another column "
                "with input.id_column"
            )
        return _valid_ids(ids, self.id_column, file, row)


def _valid_ids(ids: pa.Array, column: str, file: InputFile, row: int) -> pa.Array:
    try:
        ids.validate(full=True)
    except pa.ArrowInvalid as error:
        raise UsageError(
            f"input.id_column: column {column} of {file.path} holds an id that is not UTF-8, "
            f"in row {row} or one of the {len(ids) - 1} after it ({error})"
        ) from error
    return ids


def _record_batch(arrays: list[pa.Array], names: Sequence[str], num_rows: int) -> pa.RecordBatch:
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, names=list(names))
    # A batch without columns still has to say how many rows it stands for.
    struct = pa.StructArray.from_arrays([pa.nulls(num_rows)], names=["rows"])
    return pa.RecordBatch.from_struct_array(struct).select([])


def _find_id_column(source: InputSource, id_column: str | None) -> str | None:
    """Give the column that holds the ids, or None where ids are made."""
    if id_column is None:
        if "id" not in source.schema.names:
            return None
        id_column = "id"
    _require_column(source, id_column, "input.id_column")
    return id_column


def _require_column(source: InputSource, column: str, key: str) -> None:
    """Refuse a column that is in no file, or has no common type over the files.

    Raises:
        UsageError: naming the key, the column and the columns there are.
    """
    names = source.schema.names
    if column not in names:
        close = get_close_matches(column, names, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ";"
        raise UsageError(
            f"{key}: no column {column} in {source.path}{hint} the columns are: {listed(names)}"
        )
    if column in source.conflicts:
        raise UsageError(f"{key}: {source.conflicts[column]}")


def _iter_batches(
    file: InputFile, columns: list[str] | None, batch_rows: int, row_group: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield a file's rows as they stand in it, from all row groups or from one.

    Raises:
        UsageError: the file changed or is damaged behind its footer.
    """
    try:
        options = {"buffer_size": _READ_BUFFER_BYTES, "pre_buffer": False}
        with parquet_file(file.path, **options) as (parquet, _):
            groups = None if row_group is None else [row_group]
            for batch in parquet.iter_batches(batch_rows, columns=columns, row_groups=groups):
                failpoints.reached("input.batch")
                yield batch
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def _read_original(
    file: InputFile, rows: npt.NDArray[np.int64], columns: list[str] | None
) -> Iterator[pa.RecordBatch]:
    """Yield some rows of one file in the file's own types."""
    sizes = _row_group_sizes(file)
    start = 0
    for row_group, size in enumerate(sizes):
        low, high = np.searchsorted(rows, [start, start + size])
        position = start
        if low < high:
            for batch in _iter_batches(file, columns, 1024, row_group):
                low, high = np.searchsorted(rows, [position, position + batch.num_rows])
                if low < high:
                    yield _take(batch, rows[low:high] - position)
                position += batch.num_rows
            if position != start + size:
                raise UsageError(
                    f"input.path: {file.path} holds {position - start} rows in its row group "
                    f"{row_group} where its footer says {size}; write it again"
                )
        start += size
    if len(rows) and rows[-1] >= start:
        raise UsageError(f"input.path: {file.path} holds {start} rows, fewer than it did")


def _row_group_sizes(file: InputFile) -> list[int]:
    """Give the rows of each row group.

    Raises:
        UsageError: the file is not what it was when it was found.
    """
    try:
        with parquet_file(file.path) as (parquet, _):
            metadata = parquet.metadata
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: InputFile, error: Exception) -> UsageError:
    # Of a file whose footer is not encrypted only the columns say that they are.
    advice = "; write it without encryption" if "decrypt" in str(error).lower() else ""
    return UsageError(f"input.path: {file.path} cannot be read: {error}{advice}")


def _take(batch: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Take rows of a batch, every type as it is."""
    indices = pa.array(rows)
    arrays = [_take_array(array, indices) for array in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _take_array(array: pa.Array, indices: pa.Array) -> pa.Array:
    try:
        return array.take(indices)
    except pa.ArrowNotImplementedError:
        # Arrow has no take for string_view; gluing single rows together works for all types.
        return pa.concat_arrays([array.slice(index, 1) for index in indices.to_pylist()])
