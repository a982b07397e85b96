"""Part files: ``part-00042-9f3a1c07.parquet``, each complete from the moment it has its name."""

import logging
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.files import OutputError, fsync_directory, temporary_path

logger = logging.getLogger(__name__)

_PART = re.compile(r"part-(\d{5,})-[0-9a-f]{8}\.parquet")


def part_name(number: int, width: int = 5) -> str:
    """Make a new name for a part; the random end keeps two processes from one name."""
    return f"part-{number:0{width}d}-{uuid.uuid4().hex[:8]}.parquet"


def part_number(name: str) -> int | None:
    """Give a part's number, or None where the name is not a part's."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None


def list_parts(directory: Path) -> list[Path]:
    """Give the parts of a directory by number."""
    found = [(part_number(entry.name), entry) for entry in directory.iterdir()]
    return [path for number, path in sorted((n, p) for n, p in found if n is not None)]


def next_part_number(directory: Path) -> int:
    """Give the first number above those of all parts."""
    return max((part_number(path.name) or 0 for path in list_parts(directory)), default=-1) + 1


def write_part(path: Path, table: pa.Table) -> int:
    """Write one part in one row group: temporary name, sync, rename, sync of the directory.

    Args:
        path: where the part shall stand.
        table: its rows; none is fine.

    Returns:
        bytes on disk.

    Raises:
        OutputError: naming the path; nothing is left under either name.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as file:
            pq.write_table(table, file, row_group_size=max(1, len(table)), compression="zstd")
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        temporary.rename(path)
        fsync_directory(path.parent)
    except (OSError, pa.ArrowException) as error:
        temporary.unlink(missing_ok=True)
        raise OutputError.at(path, error) from error
    return size_bytes


def read_part(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a part, or some of its columns, as it stands.

    ``pyarrow.parquet.read_table`` would add a column for each ``key=value`` in the path.
    """
    with pq.ParquetFile(path) as file:
        return file.read(columns=columns)


def is_complete_part(path: Path) -> bool:
    """Whether a part has a readable footer."""
    try:
        with pq.ParquetFile(path):
            return True
    except (pa.ArrowException, OSError) as error:
        logger.warning("%s is damaged (%s)", path, error)
        return False
