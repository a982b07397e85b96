"""The seam between what is read and where it lies.

All of ``data`` speaks of places, which have names and can be joined to names as paths are;
what is done with a place goes through its store.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.digest import file_digest
from batchgen.data.stores.objects import ObjectPath

Place = Path | ObjectPath

_P_contra = TypeVar("_P_contra", contravariant=True)


class Store(Protocol[_P_contra]):
    """Where files lie. All of it raises ``OSError``, with an ``errno``, for what fails."""

    def open(self, place: _P_contra) -> AbstractContextManager[Any]:
        """Open a file for random access; the result has a ``size()`` in bytes.

        Raises:
            FileNotFoundError: there is none.
        """

    def digest(self, place: _P_contra) -> str:
        """Give what changes when the file's content does."""


class LocalStore:
    """Files of a local file system (see ``Store``)."""

    def open(self, place: Path) -> pa.NativeFile:
        """Open a file for random access."""
        return pa.OSFile(str(place))

    def digest(self, place: Path) -> str:
        """Give a digest of a file, of samples where it is large."""
        return file_digest(place)


_LOCAL = LocalStore()


def store_of(place: Place) -> Store[Any]:
    """Give the store in which a place lies."""
    return place.store if isinstance(place, ObjectPath) else _LOCAL


@contextmanager
def parquet_file(place: Place, **options: Any) -> Iterator[tuple[pq.ParquetFile, int]]:
    """Open a Parquet file, wherever it lies; give it and its size in bytes.

    Raises:
        pyarrow.ArrowException: it is not Parquet.
        OSError: it cannot be read.
    """
    with store_of(place).open(place) as file, pq.ParquetFile(file, **options) as parquet:
        yield parquet, file.size()
