"""The failed input rows, as they came, in a directory that can be the input of a next run."""

import os
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data import failpoints
from batchgen.data.files import OutputError, fsync_directory, temporary_path
from batchgen.data.reader import read_original_rows
from batchgen.data.source import InputSource

_ROW_GROUP_BYTES = 16 << 20


def write_failed_rows(
    source: InputSource, row_indices: npt.NDArray[np.int64], directory: Path
) -> None:
    """Write some input rows with all their columns, in the types of their files.

    One file for each input file with such rows, since files may differ in columns and
    types. What stood in the directory before is replaced; without rows it is removed.

    Args:
        source: the input.
        row_indices: global positions, ascending, each once.
        directory: ``output.dir/_errors``.

    Raises:
        OutputError: it could not be written.
        UsageError: an input file can no longer be read.
    """
    staged = temporary_path(directory)
    try:
        if len(row_indices):
            failpoints.reached("errors.begin")
            staged.mkdir()
            _write_files(source, row_indices, staged)
        failpoints.reached("errors.synced")
        shutil.rmtree(directory, ignore_errors=True)
        failpoints.reached("errors.cleared")
        if len(row_indices):
            staged.rename(directory)
        failpoints.reached("errors.renamed")
        fsync_directory(directory.parent)
    except (OSError, pa.ArrowException) as error:
        raise OutputError.at(directory, error) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _write_files(source: InputSource, row_indices: npt.NDArray[np.int64], directory: Path) -> None:
    by_file = groupby(read_original_rows(source, row_indices), key=lambda item: item[0])
    for number, (_, items) in enumerate(by_file):
        _write_file(directory / f"rows-{number:05d}.parquet", (batch for _, batch in items))
    fsync_directory(directory)


def _write_file(path: Path, batches: Iterator[pa.RecordBatch]) -> None:
    first = next(batches)
    with path.open("xb") as file:
        with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
            pending, pending_bytes = [first], first.nbytes
            for batch in batches:
                # A row group for every handful of rows would make a file of nothing but headers.
                if pending_bytes >= _ROW_GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(pending))
                    pending, pending_bytes = [], 0
                pending.append(batch)
                pending_bytes += batch.nbytes
            writer.write_table(pa.Table.from_batches(pending))
        file.flush()
        os.fsync(file.fileno())
