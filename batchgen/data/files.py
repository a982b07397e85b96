"""Files that are either there whole or not at all, whatever moment the machine dies."""

import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

from batchgen.errors import BatchgenError

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
    """Make names that came or went in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_durably(path: Path, text: str) -> None:
    """Write a file so that readers see the old content or the new one, never a part.

    Raises:
        OutputError: naming the path.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError.at(path, error) from error


def write_json_durably(path: Path, content: Any) -> None:
    """Write JSON as :func:`write_text_durably` does, indented, for people to read."""
    write_text_durably(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def remove_durably(path: Path) -> None:
    """Remove a file that may not be there, and make that durable.

    Raises:
        OutputError: it could not be removed.
    """
    try:
        path.unlink(missing_ok=True)
        fsync_directory(path.parent)
    except OSError as error:
        raise OutputError.at(path, error) from error
