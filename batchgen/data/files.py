"""Files that are either there whole or not at all, whatever moment the machine dies."""

import errno
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.data import failpoints
from batchgen.errors import BatchgenError

_NO_SYNC_HERE = {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_TEMPORARY = re.compile(r"_tmp-\d+-[0-9a-f]{8}-.+\.tmp")


class OutputError(BatchgenError):
    """The output directory cannot be written. Finished parts are kept; the same command resumes."""

    @classmethod
    def at(cls, path: Path, error: Exception) -> "OutputError":
        """Wrap an error of the operating system, naming the path."""
        return cls(
            f"output.dir: cannot write {path}: {error}; finished parts are kept, "
            "and the same command resumes"
        )


def temporary_path(path: Path) -> Path:
    """Give a name beside ``path`` that no other process uses and that readers skip.

    Arrow and Spark skip it for its first letter, DuckDB's ``*.parquet`` for its end.
    """
    return path.with_name(f"_tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}-{path.name}.tmp")


def is_temporary(name: str) -> bool:
    """Whether :func:`temporary_path` made this name."""
    return _TEMPORARY.fullmatch(name) is not None


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


def make_directory_durably(path: Path) -> None:
    """Make a directory and what is missing above it, so that no power cut takes it away."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        # A directory may be writable and not readable; then its sync is left to the system.
        with suppress(PermissionError):
            fsync_directory(each.parent)


@contextmanager
def durable_file(path: Path, what: str) -> Iterator[BinaryIO]:
    """Yield a file to write that has its name only once it is whole and synced.

    Readers see the old content or the new one, never a part; the name is durable at the end.

    Args:
        path: where the file shall stand.
        what: what it is, for the names of the failpoints.

    Raises:
        OutputError: naming the path. The old content, or none, is under it; only where
            the last step failed, the sync of the directory, is it the new content.
    """
    temporary = temporary_path(path)
    try:
        failpoints.reached(f"{what}.begin")
        with temporary.open("xb") as file:
            yield file
            failpoints.reached(f"{what}.written")
            file.flush()
            os.fsync(file.fileno())
        failpoints.reached(f"{what}.synced")
        temporary.replace(path)
        failpoints.reached(f"{what}.renamed")
        fsync_directory(path.parent)
        failpoints.reached(f"{what}.durable")
    except OSError as error:
        raise OutputError.at(path, error) from error
    finally:
        # What stays behind all the same is swept when the directory is opened again.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text_durably(path: Path, text: str) -> None:
    """Write a file so that readers see the old content or the new one, never a part.

    Raises:
        OutputError: naming the path.
    """
    with durable_file(path, path.stem.strip("_").lower()) as file:
        file.write(text.encode())


def write_json_durably(path: Path, content: Any) -> None:
    """Write JSON as :func:`write_text_durably` does, indented, for people to read."""
    write_text_durably(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def remove_durably(path: Path) -> None:
    """Remove a file that may not be there, and make that durable.

    Raises:
        OutputError: it could not be removed.
    """
    what = path.stem.strip("_").lower()
    try:
        failpoints.reached(f"{what}.leaves")
        path.unlink(missing_ok=True)
        failpoints.reached(f"{what}.gone")
        fsync_directory(path.parent)
    except OSError as error:
        raise OutputError.at(path, error) from error
