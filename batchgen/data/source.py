"""Finding the input files and checking them all before anything else is loaded."""

import glob
import logging
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data import failpoints
from batchgen.data.types import common_type, normalize_type, without_views
from batchgen.errors import UsageError

logger = logging.getLogger(__name__)

GIANT_ROW_GROUP_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class InputFile:
    """One Parquet file of the input.

    Attributes:
        path: where it is.
        name: its path relative to ``input.path``, with forward slashes.
        num_rows: rows in it, from its footer.
        first_row_index: global position of its first row.
        size_bytes: size on disk.
    """

    path: Path
    name: str
    num_rows: int
    first_row_index: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class InputSource:
    """All input files in their order, with one schema over them.

    Attributes:
        path: ``input.path`` as it was given.
        files: the files in natural order of their names.
        schema: one type for each column found in any file; text is ``string`` or
            ``large_string`` here, whatever the files hold.
        originals: the type of each column as the files have it where they agree, else the one
            in ``schema``; views are plain text and lists here, too.
        conflicts: columns whose types cannot be one, each with the reason; harmless
            until somebody asks for the column.
    """

    path: str
    files: tuple[InputFile, ...]
    schema: pa.Schema
    originals: Mapping[str, pa.DataType]
    conflicts: Mapping[str, str]

    @property
    def num_rows(self) -> int:
        """Rows in all files together."""
        return sum(file.num_rows for file in self.files)

    def locate(self, row_index: int) -> tuple[InputFile, int]:
        """Give the file that holds a global row, and the row's position in that file.

        Empty files share their first row index with the next file; the last one of them
        is the one that can hold the row.
        """
        firsts = [file.first_row_index for file in self.files]
        file = self.files[bisect_right(firsts, row_index) - 1]
        return file, row_index - file.first_row_index

    def identity(self) -> list[dict[str, str | int]]:
        """Give what tells this input from another without reading its rows."""
        return [
            {"name": file.name, "size_bytes": file.size_bytes, "rows": file.num_rows}
            for file in self.files
        ]


def discover(path: str) -> InputSource:
    """Find the Parquet files under ``input.path`` and open every footer.

    A directory means all ``*.parquet`` files below it; names beginning with ``_`` or ``.``
    are skipped below the given path (a name the path itself spells out is taken). Memory
    grows with the number of files, not of rows.

    Args:
        path: a file, a directory, or a glob (``**`` goes through directories).

    Raises:
        UsageError: nothing found; a file that is not Parquet or is cut short; a file in
            which two columns have the same name. The message names the file.
    """
    found = sorted(_find(path), key=lambda item: natural_key(item[1]))
    if not found:
        raise UsageError(_nothing_found(path))
    files: list[InputFile] = []
    columns = _Columns()
    first_row_index = 0
    for file_path, name in found:
        schema, num_rows = _read_footer(file_path)
        columns.add(schema, name)
        size_bytes = file_path.stat().st_size
        files.append(InputFile(file_path, name, num_rows, first_row_index, size_bytes))
        first_row_index += num_rows
    return InputSource(path, tuple(files), columns.schema(), columns.originals(), columns.conflicts)


def natural_key(name: str) -> tuple[list[list[str | int]], str]:
    """Sort key under which ``part-2`` comes before ``part-10``, directory by directory."""
    return [_numbers_as_numbers(part) for part in name.split("/")], name


def _numbers_as_numbers(text: str) -> list[str | int]:
    # Pieces at odd places are the digits, so that like is compared with like.
    pieces = re.split("([0-9]+)", text)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)]


def _find(path: str) -> Iterator[tuple[Path, str]]:
    """Yield (path, relative name) of the files that ``path`` stands for."""
    root = Path(path)
    if root.is_file():
        yield root, root.name
    elif root.is_dir():
        yield from _walk(root)
    elif glob.has_magic(path):
        base = _glob_base(path)
        # Path.glob takes no absolute pattern.
        for match in glob.iglob(path, recursive=True):  # noqa: PTH207
            name = Path(os.path.relpath(match, base)).as_posix()
            if _is_data_name(name) and Path(match).is_file():
                yield Path(match), name


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    # Data sets are often assembled from links to directories; a link to a directory above
    # itself would never end, so each real directory is entered once.
    seen: set[str] = set()
    for directory, subdirectories, names in os.walk(root, followlinks=True):
        real = os.path.realpath(directory)
        if real in seen:
            subdirectories.clear()
            continue
        seen.add(real)
        subdirectories[:] = [name for name in subdirectories if not name.startswith(("_", "."))]
        for name in names:
            file_path = Path(directory, name)
            if _is_data_name(name) and file_path.is_file():
                yield file_path, file_path.relative_to(root).as_posix()


def _glob_base(pattern: str) -> str:
    """Give the leading directories of a glob that hold no wildcard."""
    parts = Path(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return str(Path(*parts[:fixed])) if fixed else "."


def _is_data_name(name: str) -> bool:
    parts = name.split("/")
    return name.endswith(".parquet") and not any(
        part.startswith(("_", ".")) for part in parts if part != ".."
    )


def _nothing_found(path: str) -> str:
    root = Path(path)
    if root.is_dir():
        what = "has no *.parquet file below it (names beginning with _ or . are skipped)"
    elif glob.has_magic(path):
        what = "matches no *.parquet file (names beginning with _ or . are skipped)"
    else:
        what = "does not exist"
    return f"input.path={path} {what}; give a Parquet file, a directory of them, or a glob"


def _read_footer(path: Path) -> tuple[pa.Schema, int]:
    """Give a file's schema and row count.

    Raises:
        UsageError: the file cannot be read as Parquet, or has two columns of one name.
    """
    try:
        failpoints.reached("input.footer")
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UsageError(f"input.path: {path} cannot be read: {error}") from error
        raise UsageError(
            f"input.path: {path} is not a complete Parquet file ({error}); "
            "write it again or move it away"
        ) from error
    repeated = [name for name, count in Counter(schema.names).items() if count > 1]
    if repeated:
        raise UsageError(
            f"input.path: {path} has more than one column named {', '.join(repeated)}; "
            "rename them so that each name stands once"
        )
    _warn_of_giant_row_groups(path, metadata)
    return schema, metadata.num_rows


def _warn_of_giant_row_groups(path: Path, metadata: pq.FileMetaData) -> None:
    largest = max(
        (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)), default=0
    )
    if largest > GIANT_ROW_GROUP_BYTES:
        logger.warning(
            "%s has a row group of %.1f GiB; many tools load such a group whole. "
            "Row groups of 100 MiB or so read better.",
            path,
            largest / (1 << 30),
        )


class _Columns:
    """The columns seen so far: the common type of each, and the file it comes from."""

    def __init__(self) -> None:
        self.conflicts: dict[str, str] = {}
        self._types: dict[str, pa.DataType] = {}
        self._first_seen: dict[str, str] = {}
        self._originals: dict[str, list[pa.DataType]] = {}

    def add(self, schema: pa.Schema, file_name: str) -> None:
        for field in schema:
            original, kinds = without_views(field.type), self._originals.setdefault(field.name, [])
            if original not in kinds:
                kinds.append(original)
            kind = normalize_type(field.type)
            known = self._types.get(field.name, pa.null())
            common = common_type(known, kind)
            if common is None:
                first = self._first_seen[field.name]
                self.conflicts.setdefault(
                    field.name,
                    f"column {field.name} is {known} in {first} but {kind} in {file_name}; "
                    "write it with one type in all files",
                )
                continue
            self._types[field.name] = common
            # A column of nulls has no type to disagree with, so its file is not named.
            if not pa.types.is_null(kind):
                self._first_seen.setdefault(field.name, file_name)

    def originals(self) -> dict[str, pa.DataType]:
        return {
            name: kinds[0] if len(kinds) == 1 else self._types[name]
            for name, kinds in self._originals.items()
        }

    def schema(self) -> pa.Schema:
        return pa.schema(list(self._types.items()))
