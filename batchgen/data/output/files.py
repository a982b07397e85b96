"""Files of the output, each there whole or not at all, wherever the output lies."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from batchgen.data import failpoints
from batchgen.data.stores.store import Place, store_of
from batchgen.errors import BatchgenError


class OutputError(BatchgenError):
    """The output directory cannot be written. Finished parts are kept; the same command resumes."""

    @classmethod
    def at(cls, place: Place, error: Exception) -> "OutputError":
        """Wrap an error of the operating system or the storage, naming the place."""
        return cls(
            f"output.dir: cannot write {place}: {error}; finished parts are kept, "
            "and the same command resumes"
        )


@contextmanager
def durable_file(place: Place, what: str | None) -> Iterator[BinaryIO]:
    """Yield a file to write that has its name only once it is whole and durable.

    Args:
        place: where the file shall stand.
        what: what it is, for the names of the failpoints; None for none.

    Raises:
        OutputError: naming the place. The old content, or none, is under it; only where
            the last step failed, the sync of the directory, is it the new content.
    """
    try:
        with store_of(place).put(place, what) as file:
            yield file
    except OSError as error:
        raise OutputError.at(place, error) from error


def write_text_durably(place: Place, text: str) -> None:
    """Write a file so that readers see the old content or the new one, never a part.

    Raises:
        OutputError: naming the place.
    """
    with durable_file(place, _what(place)) as file:
        file.write(text.encode())


def write_json_durably(place: Place, content: Any) -> None:
    """Write JSON as :func:`write_text_durably` does, indented, for people to read."""
    write_text_durably(place, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def remove_durably(directory: Place, name: str) -> None:
    """Remove a file that may not be there, and make that durable.

    Raises:
        OutputError: it could not be removed.
    """
    store, place = store_of(directory), directory / name
    what = _what(place)
    try:
        failpoints.reached(f"{what}.leaves")
        store.remove(place)
        failpoints.reached(f"{what}.gone")
        store.sync(directory)
    except OSError as error:
        raise OutputError.at(place, error) from error


def _what(place: Place) -> str:
    return PurePosixPath(place.name).stem.strip("_").lower()
