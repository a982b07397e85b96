"""The seam between what is read or written and where it lies.

All of ``data`` speaks of places, which have names and can be joined to names as paths are;
what is done with a place goes through its store.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import pyarrow.parquet as pq

from batchgen.data.stores.local import LocalStore
from batchgen.data.stores.lock import Owner
from batchgen.data.stores.objects import ObjectPath
from batchgen.s3_uri import S3Uri, is_s3

Place = Path | ObjectPath

_P = TypeVar("_P")


class Lock(Protocol):
    """Keeps all others out of an output directory."""

    def acquire(self) -> None:
        """Take it.

        Raises:
            UsageError: another live run holds it; the message names it.
            OSError: it cannot be taken.
        """

    def release(self) -> None:
        """Let go of it."""


class Store(Protocol[_P]):
    """Where files lie. Whatever fails raises ``OSError`` with an ``errno``."""

    def open(self, place: _P) -> AbstractContextManager[Any]:
        """Open a file for random access; the result has a ``size()`` in bytes.

        Raises:
            FileNotFoundError: there is none.
        """

    def digest(self, place: _P) -> str:
        """Give what changes when the file's content does."""

    def stamp(self, place: _P) -> str:
        """Give what is most likely another when the file is written again; no content is read."""

    def read(self, place: _P) -> bytes:
        """Read a whole file.

        Raises:
            FileNotFoundError: there is none.
        """

    def exists(self, place: _P) -> bool:
        """Whether there is a file, or a directory with something in it."""

    def is_directory(self, place: _P) -> bool:
        """Whether it is a directory."""

    def entries(self, place: _P) -> list[_P]:
        """Give files and directories in a directory; of the parts those that count."""

    def strays(self, place: _P) -> list[_P]:
        """Give the parts in a directory that do not count."""

    def put(self, place: _P, what: str | None) -> AbstractContextManager[BinaryIO]:
        """Yield a file to write, which has its name only once it is whole and durable.

        Readers see the old content or the new one, never a part. A part counts from then on.

        Args:
            what: what it is, for the names of the failpoints; None for none.
        """

    def move(self, source: _P, target: _P) -> None:
        """Give a file or a directory another name; once more is as good as once."""

    def remove(self, place: _P) -> None:
        """Remove a file or a whole directory that may not be there."""

    def make_directory(self, place: _P) -> bool:
        """Make a directory and what is missing above it; say whether it was not there."""

    def drop_empty(self, place: _P) -> None:
        """Remove a directory if there is nothing in it."""

    def sync(self, place: _P) -> None:
        """Make names that came or went in a directory durable."""

    def make_way(self, place: _P) -> None:
        """Remove a directory that stands where a lock file is to be."""

    def lock(self, place: _P) -> Lock:
        """Give the lock that a lock file stands for."""

    def holder(self, place: _P) -> tuple[bool, Owner | None]:
        """Say whether a live run holds a lock file, and who wrote it last; only looks."""

    def scratch(self, place: _P) -> Path:
        """Name the local directory for what only runs on this machine read."""

    def drop_scratch(self, place: _P) -> None:
        """Remove that directory, where it is not the place itself."""

    def appended(self, place: _P) -> AbstractContextManager[Path]:
        """Yield a local file to append to, which stands at the place in the end."""


_LOCAL = LocalStore()


def place_of(setting: str, path: str) -> Place:
    """Give the place that a path or an address means.

    Args:
        setting: the key whose value it is, for messages.
        path: a path, or ``s3://bucket/...``.

    Raises:
        UsageError: the address makes no sense.
    """
    return ObjectPath.of(S3Uri.parse(setting, path)) if is_s3(path) else Path(path)


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
