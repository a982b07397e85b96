"""Sorting the finished parts into input order, as the last step of a run.

An external bucket sort: rows are first dealt into buckets by range of input position, each
small enough for memory, then each bucket is sorted and written as parts. The old parts
stay until all new ones are there (see ``replace``).
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.data import failpoints
from batchgen.data.output.files import OutputError
from batchgen.data.output.parts import list_parts, read_part, write_part
from batchgen.data.output.replace import replace_parts, staging_directory
from batchgen.data.output.writer import PartLimits
from batchgen.data.stores.names import part_name
from batchgen.data.stores.store import Place, store_of

_KEYS = ["row_index", "sample_index"]
# Each bucket is an open file while rows are dealt out.
_MAX_BUCKETS = 512


def sort_parts(directory: Place, limits: PartLimits, bucket_bytes: int = 256 << 20) -> bool:
    """Sort the rows of all parts by (row_index, sample_index).

    Memory is about two buckets (one and its sorted copy), one part being dealt out, and
    8 bytes an output row for the bounds of the buckets. A bucket holds ``bucket_bytes``
    where rows are of like size, more where they are very uneven or the output is beyond
    512 buckets. The disk holds the output up to three times for a while.

    Args:
        directory: the output directory, complete and locked.
        limits: how large the new parts are; the age does not matter.
        bucket_bytes: Arrow bytes in a bucket.

    Returns:
        whether anything had to be moved.

    Raises:
        OutputError: the new parts could not be written; the old ones are untouched.
        DamagedPartError: a part cannot be read; nothing has changed.
    """
    parts = list_parts(directory)
    if _is_sorted(parts):
        return False
    try:
        staged = staging_directory(directory)
        _write_sorted(parts, staged, limits, bucket_bytes)
    except (OSError, pa.ArrowException) as error:
        raise OutputError.at(directory, error) from error
    replace_parts(directory, parts)
    return True


def _is_sorted(parts: Sequence[Place]) -> bool:
    """Whether reading the parts by number gives the rows in input order."""
    last = (-1, -1)
    for path in parts:
        table = read_part(path, _KEYS)
        rows, samples = (table.column(name).to_numpy() for name in _KEYS)
        if len(rows) == 0:
            continue
        ascends = (rows[1:] > rows[:-1]) | ((rows[1:] == rows[:-1]) & (samples[1:] > samples[:-1]))
        if (rows[0], samples[0]) < last or not ascends.all():
            return False
        last = (rows[-1], samples[-1])
    return True


def _write_sorted(
    parts: Sequence[Place], staged: Place, limits: PartLimits, bucket_bytes: int
) -> None:
    total_bytes = sum(read_part(path).nbytes for path in parts)
    rows = np.sort(np.concatenate([_row_index(path) for path in parts]))
    # Names must sort as numbers do, or readers would see another order than ours.
    most_parts = 2 * (len(rows) // limits.rows + total_bytes // limits.size_bytes + 1)
    width = max(5, len(str(most_parts)))
    bucket_directory = store_of(staged).scratch(staged) / "buckets"
    shutil.rmtree(bucket_directory, ignore_errors=True)
    bucket_directory.mkdir(parents=True)
    buckets = _deal(parts, _bucket_bounds(rows, total_bytes, bucket_bytes), bucket_directory)
    failpoints.reached("sort.dealt")
    for number, table in enumerate(_full_parts(map(_read_sorted, buckets), limits)):
        write_part(staged / part_name(number, width), table)
    shutil.rmtree(bucket_directory)
    failpoints.reached("sort.staged")


def _row_index(path: Place) -> npt.NDArray[np.int64]:
    return np.asarray(read_part(path, ["row_index"]).column(0).to_numpy(), np.int64)


def _bucket_bounds(
    rows: npt.NDArray[np.int64], total_bytes: int, bucket_bytes: int
) -> npt.NDArray[np.int64]:
    """Give the input positions at which a new bucket begins, equal numbers of rows in each."""
    count = min(_MAX_BUCKETS, -(-total_bytes // bucket_bytes))
    return np.unique(rows[[len(rows) * i // count for i in range(1, count)]])


def _deal(parts: Sequence[Place], bounds: npt.NDArray[np.int64], directory: Path) -> list[Path]:
    """Deal the rows of all parts into one Arrow file for each bucket, in order of position."""
    paths = [directory / f"{bucket:04d}.arrow" for bucket in range(len(bounds) + 1)]
    with ExitStack() as stack:
        schema = read_part(parts[0]).schema
        # Streams: what is dealt in later may have dictionaries of its own.
        writers = [stack.enter_context(pa.ipc.new_stream(str(path), schema)) for path in paths]
        for part in parts:
            table = read_part(part)
            bucket_of = np.searchsorted(bounds, table.column("row_index").to_numpy(), "right")
            for bucket in np.unique(bucket_of):
                writers[bucket].write_table(table.filter(pa.array(bucket_of == bucket)))
    return paths


def _read_sorted(bucket: Path) -> pa.Table:
    with pa.OSFile(str(bucket)) as file, pa.ipc.open_stream(file) as reader:
        table = reader.read_all().unify_dictionaries()
    return table.sort_by([(name, "ascending") for name in _KEYS])


def _full_parts(tables: Iterable[pa.Table], limits: PartLimits) -> Iterator[pa.Table]:
    """Cut consecutive tables into parts; only the last one is smaller than it could be."""
    rest: pa.Table | None = None
    for table in tables:
        rest = table if rest is None else pa.concat_tables([rest, table])
        row_bytes = max(1, rest.nbytes // max(1, len(rest)))
        step = max(1, min(limits.rows, limits.size_bytes // row_bytes))
        while len(rest) >= step:
            yield rest.slice(0, step)
            rest = rest.slice(step)
    if rest is not None and len(rest):
        yield rest
