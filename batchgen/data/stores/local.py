"""Files of a local file system: there whole or not at all, whatever moment the machine dies."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from weakref import WeakSet

import pyarrow as pa

from batchgen.data import failpoints
from batchgen.data.digest import file_digest
from batchgen.data.stores.lock import DirectoryLock, Owner, is_held
from batchgen.data.stores.names import temporary_name

_NO_SYNC_HERE = {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class LocalStore:
    """Temporary name, sync, rename, sync of the directory (see ``Store``).

    Before a name in a directory that this process has locked comes or goes, the lock is looked
    at: it may be somebody else's by now.
    """

    def __init__(self) -> None:
        self._locks: WeakSet[DirectoryLock] = WeakSet()

    def open(self, place: Path) -> pa.NativeFile:
        """Open a file for random access."""
        return pa.OSFile(str(place))

    def digest(self, place: Path) -> str:
        """Return a digest of all of a file."""
        return file_digest(place)

    def stamp(self, place: Path) -> str:
        """Give a file's number, size and time of change."""
        found = place.stat()
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"

    def read(self, place: Path) -> bytes:
        """Read a whole file."""
        return place.read_bytes()

    def exists(self, place: Path) -> bool:
        """Whether there is a file or a directory."""
        return place.exists()

    def is_directory(self, place: Path) -> bool:
        """Whether it is a directory."""
        return place.is_dir()

    def entries(self, place: Path) -> list[Path]:
        """Give what stands in a directory."""
        return list(place.iterdir())

    def strays(self, place: Path) -> list[Path]:
        """Give no part: each one counts from the moment it has its name."""
        return []

    @contextmanager
    def put(self, place: Path, what: str | None) -> Iterator[BinaryIO]:
        """Yield a file that has its name only once it is whole and synced."""
        temporary = place.with_name(temporary_name(place.name))
        try:
            _reached(what, "begin")
            with temporary.open("xb") as file:
                yield file
                _reached(what, "written")
                file.flush()
                os.fsync(file.fileno())
            _reached(what, "synced")
            self._confirm(place)
            temporary.replace(place)
            _reached(what, "renamed")
            fsync_directory(place.parent)
            _reached(what, "durable")
        finally:
            # What stays behind all the same is swept when the directory is opened again.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def move(self, source: Path, target: Path) -> None:
        """Rename a file or a directory."""
        self._confirm(source)
        source.rename(target)

    def remove(self, place: Path) -> None:
        """Remove a file, a link or a whole directory that may not be there."""
        self._confirm(place)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)

    def make_directory(self, place: Path) -> bool:
        """Make a directory and what is missing above it, so that no power cut takes it away.

        Returns:
            whether it was not there.
        """
        self._confirm(place)
        missing = [each for each in (place, *place.parents) if not each.exists()]
        place.mkdir(parents=True, exist_ok=True)
        for each in missing:
            # A directory may be writable and not readable; then its sync is left to the system.
            with suppress(PermissionError):
                fsync_directory(each.parent)
        return place in missing

    def drop_empty(self, place: Path) -> None:
        """Remove a directory; the system refuses one with anything in it."""
        with suppress(OSError):
            place.rmdir()

    def sync(self, place: Path) -> None:
        """Make names that came or went in a directory durable."""
        fsync_directory(place)

    def make_way(self, place: Path) -> None:
        """Remove a directory there: no lock of ours is one."""
        if place.is_dir():
            self.remove(place)

    def lock(self, place: Path) -> DirectoryLock:
        """Return the lock that a lock file stands for."""
        lock = DirectoryLock(place)
        self._locks.add(lock)
        return lock

    def _confirm(self, place: Path) -> None:
        """Look at the lock of the directory that a place is in.

        Raises:
            TakenOverError: another run has it.
        """
        for lock in list(self._locks):
            if lock.directory in place.parents:
                lock.confirm()

    def holder(self, place: Path) -> tuple[bool, Owner | None]:
        """Say whether a live process holds a lock file, and who wrote it last."""
        return is_held(place), Owner.read(place)

    def scratch(self, place: Path) -> Path:
        """Give the directory itself: what only this process reads may lie beside the rest."""
        return place

    def drop_scratch(self, place: Path) -> None:
        """Leave it: it belongs to the output."""

    @contextmanager
    def appended(self, place: Path) -> Iterator[Path]:
        """Yield the file itself."""
        yield place


def fsync_directory(directory: Path) -> None:
    """Make names that came or went in a directory durable, where the file system can do that."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no sync of a directory (PostgreSQL passes over it, too).
        if error.errno not in _NO_SYNC_HERE:
            raise
    finally:
        os.close(descriptor)


def _reached(what: str | None, step: str) -> None:
    if what is not None:
        failpoints.reached(f"{what}.{step}")
