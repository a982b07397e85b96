"""Part files: ``part-00042-9f3a1c07.parquet``, each complete from the moment it has its name."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.output.files import OutputError, durable_file
from batchgen.data.stores.names import part_number
from batchgen.data.stores.store import Place, parquet_file, store_of


def list_parts(directory: Place) -> list[Place]:
    """Give the parts of a directory by number."""
    found = [(part_number(entry.name), entry) for entry in store_of(directory).entries(directory)]
    numbered = [(number, entry.name, entry) for number, entry in found if number is not None]
    return [entry for *_, entry in sorted(numbered, key=lambda item: item[:2])]


def next_part_number(directory: Place) -> int:
    """Give the first number above those of all parts."""
    return max((part_number(path.name) or 0 for path in list_parts(directory)), default=-1) + 1


def write_part(path: Place, table: pa.Table) -> int:
    """Write one part in one row group; it counts once it is whole and durable.

    Args:
        path: where the part shall stand.
        table: its rows; none is fine.

    Returns:
        its bytes.

    Raises:
        OutputError: naming the path; what stands under it is whole, if anything does.
    """
    try:
        with durable_file(path, "part") as file:
            pq.write_table(
                table,
                file,
                row_group_size=max(1, len(table)),
                compression="zstd",
                write_page_checksum=True,
            )
            size_bytes = file.tell()
    except pa.ArrowException as error:
        raise OutputError.at(path, error) from error
    return size_bytes


class DamagedPartError(Exception):
    """A part does not hold what its writer put into it.

    Attributes:
        path: the part.
    """

    def __init__(self, path: Place, reason: Exception) -> None:
        super().__init__(f"{path} is damaged ({reason})")
        self.path = path


def read_part(path: Place, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a part, or some of its columns, as it stands.

    ``pyarrow.parquet.read_table`` would add a column for each ``key=value`` in the path.

    Raises:
        DamagedPartError: it is cut short, or bytes in it are not what they were.
        OSError: the operating system could not read it.
    """
    with _opened(path) as file:
        return file.read(columns=columns)


def part_schema(path: Place) -> pa.Schema:
    """Read the schema in a part's footer, without any rows.

    Raises:
        DamagedPartError: it has none.
        OSError: the operating system could not read it.
    """
    with _opened(path) as file:
        return file.schema_arrow


def check_part(path: Place) -> None:
    """Compare every page of a part with its checksum, a column at a time.

    Raises:
        DamagedPartError: it is cut short, or bytes in it are not what they were.
        OSError: the operating system could not read it.
    """
    with _opened(path) as file:
        for name in file.schema_arrow.names:
            file.read(columns=[name])


@contextmanager
def _opened(path: Place) -> Iterator[pq.ParquetFile]:
    try:
        # In as few requests as can be, where each one costs.
        options = {"page_checksum_verification": True, "pre_buffer": True}
        with parquet_file(path, **options) as (file, _):
            yield file
    except pa.ArrowException as error:
        raise DamagedPartError(path, error) from error
    except OSError as error:
        # Arrow says in this way, too, that it cannot make sense of a footer or a page. A
        # disk that fails is another matter: what it holds may be read again tomorrow.
        if error.errno is not None:
            raise
        raise DamagedPartError(path, error) from error
