"""The failed input rows, as they came, in a directory that can be the input of a next run."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data import failpoints
from batchgen.data.input.reader import read_original_rows
from batchgen.data.input.source import InputFile, InputSource
from batchgen.data.output.files import OutputError, durable_file
from batchgen.data.stores.names import temporary_name
from batchgen.data.stores.store import Place, store_of

_ROW_GROUP_BYTES = 16 << 20


def write_failed_rows(
    source: InputSource, row_indices: npt.NDArray[np.int64], directory: Place
) -> None:
    """Write some input rows with all their columns, in the types of their files.

    One file for each input file with such rows, since files may differ in columns and
    types. What stood in the directory before is replaced; without rows it is removed. Where
    directories can be renamed it is there whole or not at all; as objects its files come one
    after another, and all are there when ``_SUCCESS`` is.

    Args:
        source: the input.
        row_indices: global positions, ascending, each once.
        directory: ``output.dir/_errors``.

    Raises:
        OutputError: it could not be written.
        UsageError: an input file can no longer be read, or has been changed.
    """
    parent, store = directory.parent, store_of(directory)
    staged = parent / temporary_name(directory.name)
    try:
        if len(row_indices):
            failpoints.reached("errors.begin")
            store.make_directory(staged)
            source.refuse_changes(_write_files(source, row_indices, staged))
        failpoints.reached("errors.synced")
        store.remove(directory)
        failpoints.reached("errors.cleared")
        if len(row_indices):
            store.move(staged, directory)
        failpoints.reached("errors.renamed")
        store.sync(parent)
    except (OSError, pa.ArrowException) as error:
        raise OutputError.at(directory, error) from error
    finally:
        # What stays behind all the same is swept when the directory is opened again.
        with suppress(OSError):
            store.remove(staged)


def _write_files(
    source: InputSource, row_indices: npt.NDArray[np.int64], directory: Place
) -> list[InputFile]:
    """Write the rows; give the files that they stand in."""
    files: list[InputFile] = []
    by_file = groupby(read_original_rows(source, row_indices), key=lambda item: item[0])
    for number, (file, items) in enumerate(by_file):
        _write_file(directory / f"rows-{number:05d}.parquet", (batch for _, batch in items))
        files.append(file)
    return files


def _write_file(path: Place, batches: Iterator[pa.RecordBatch]) -> None:
    first = next(batches)
    with (
        durable_file(path, None) as file,
        pq.ParquetWriter(file, first.schema, compression="zstd") as writer,
    ):
        pending, pending_bytes = [first], first.nbytes
        for batch in batches:
            # A row group for every handful of rows would make a file of nothing but headers.
            if pending_bytes >= _ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(pending))
                pending, pending_bytes = [], 0
            pending.append(batch)
            pending_bytes += batch.nbytes
        writer.write_table(pa.Table.from_batches(pending))
