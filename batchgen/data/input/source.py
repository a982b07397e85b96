"""Finding the input files and checking them all before anything else is loaded."""

import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data import failpoints
from batchgen.data.input.find import find_files
from batchgen.data.input.lookalike import verdict
from batchgen.data.input.types import common_type, normalize_type, without_views
from batchgen.data.stores.store import Place, parquet_file, store_of
from batchgen.errors import UsageError, listed

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
        size_bytes: size of the file.
        stamp: what is another once the file is written again (see ``Store``).
    """

    path: Place
    name: str
    num_rows: int
    first_row_index: int
    size_bytes: int
    stamp: str


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
        gaps: columns that some files lack, each with such a file and one that has it.
        widened: columns of whole numbers in some files and of floating ones in others, with
            these files.
    """

    path: str
    files: tuple[InputFile, ...]
    schema: pa.Schema
    originals: Mapping[str, pa.DataType]
    conflicts: Mapping[str, str]
    gaps: Mapping[str, str]
    widened: Mapping[str, str]
    _digests: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

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
        """Give what tells this input from another without reading its rows.

        An edit may leave a file's size as it was, so a digest of the content is part of it;
        on object storage it is the ETag.

        Raises:
            UsageError: a file can no longer be read, or is not the one that was found.
        """
        return [self._identity(file) for file in self.files]

    def refuse_changes(self, files: Iterable[InputFile] | None = None, *, advice: str = "") -> None:
        """Make sure that what has been read of some files is still what stands in them.

        Args:
            files: of this input; None for all.
            advice: what to do, for the message.

        Raises:
            UsageError: one has another content now, or can no longer be read.
        """
        for file in self.files if files is None else files:
            # A file that was only touched, or copied to where it was, is the same.
            is_same = _stamp(file) == file.stamp or _digest(file) == self._digests.get(file.name)
            if not is_same:
                raise UsageError(
                    f"input.path: {file.path} has been changed since this run began to read it"
                    f"{advice}"
                )

    def _identity(self, file: InputFile) -> dict[str, str | int]:
        digest = self._digests[file.name] = _digest(file)
        if _stamp(file) != file.stamp:
            raise UsageError(
                f"input.path: {file.path} is being changed while it is read; run the same command "
                "again when it is complete"
            )
        return {
            "name": file.name,
            "size_bytes": file.size_bytes,
            "rows": file.num_rows,
            "digest": digest,
        }


def discover(path: str) -> InputSource:
    """Find the Parquet files under ``input.path`` and open every footer.

    A directory means all ``*.parquet`` files below it; names beginning with ``_`` or ``.``
    are skipped below the given path (a name the path itself spells out is taken). Memory
    grows with the number of files, not of rows.

    Args:
        path: a file, a directory, or a glob (``**`` goes through directories), on a local
            file system or as ``s3://bucket/...``.

    Raises:
        UsageError: nothing found; a file that is not Parquet or is cut short; a file in
            which two columns have the same name. The message names the file.
    """
    found = sorted(find_files(path), key=lambda item: natural_key(item[1]))
    files: list[InputFile] = []
    columns = _Columns()
    first_row_index = 0
    for file_path, name in found:
        stamp = _of_file(file_path, store_of(file_path).stamp)
        schema, num_rows, size_bytes = _read_footer(file_path)
        columns.add(schema, name, num_rows)
        files.append(InputFile(file_path, name, num_rows, first_row_index, size_bytes, stamp))
        first_row_index += num_rows
    return InputSource(
        path,
        tuple(files),
        columns.schema(),
        columns.originals(),
        columns.conflicts,
        columns.gaps(),
        columns.widened,
    )


def _digest(file: InputFile) -> str:
    return _of_file(file.path, store_of(file.path).digest)


def _stamp(file: InputFile) -> str:
    return _of_file(file.path, store_of(file.path).stamp)


def _of_file(path: Place, ask: Callable[[Place], str]) -> str:
    try:
        return ask(path)
    except OSError as error:
        raise UsageError(f"input.path: {path} cannot be read: {error}") from error


def natural_key(name: str) -> tuple[list[list[str | int]], str]:
    """Sort key under which ``part-2`` comes before ``part-10``, directory by directory."""
    return [_numbers_as_numbers(part) for part in name.split("/")], name


def _numbers_as_numbers(text: str) -> list[str | int]:
    # Pieces at odd places are the digits, so that like is compared with like.
    pieces = re.split("([0-9]+)", text)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)]


def _read_footer(path: Place) -> tuple[pa.Schema, int, int]:
    """Give a file's schema, row count and size in bytes.

    Raises:
        UsageError: the file cannot be read as Parquet, or has two columns of one name.
    """
    try:
        failpoints.reached("input.footer")
        with parquet_file(path) as (file, size_bytes):
            schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UsageError(f"input.path: {path} cannot be read: {error}") from error
        raise UsageError(f"input.path: {path} {_what_it_is(path, error)}") from error
    repeated = [name for name, count in Counter(schema.names).items() if count > 1]
    if repeated:
        raise UsageError(
            f"input.path: {path} has more than one column named {', '.join(repeated)}; "
            "rename them so that each name stands once"
        )
    in_groups = sum(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    if in_groups != metadata.num_rows:
        raise UsageError(
            f"input.path: {path} is damaged: its footer says that it holds {metadata.num_rows} "
            f"rows and that its row groups hold {in_groups}; write it again or move it away"
        )
    _warn_of_giant_row_groups(path, metadata)
    return schema, metadata.num_rows, size_bytes


def _what_it_is(path: Place, error: Exception) -> str:
    try:
        with store_of(path).open(path) as file:
            return verdict(file, path, error)
    except OSError as failure:
        return f"cannot be read: {failure}"


def _warn_of_giant_row_groups(path: Place, metadata: pq.FileMetaData) -> None:
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
        self.widened: dict[str, str] = {}
        self._schemas: list[tuple[str, frozenset[str]]] = []
        self._types: dict[str, pa.DataType] = {}
        self._first_seen: dict[str, str] = {}
        self._originals: dict[str, list[pa.DataType]] = {}

    def add(self, schema: pa.Schema, file_name: str, num_rows: int) -> None:
        if num_rows:
            self._schemas.append((file_name, frozenset(schema.names)))
        for column in schema:
            original, kinds = (
                without_views(column.type),
                self._originals.setdefault(column.name, []),
            )
            if original not in kinds:
                kinds.append(original)
            kind = normalize_type(column.type)
            known = self._types.get(column.name, pa.null())
            common = common_type(known, kind)
            if common is None:
                first = self._first_seen[column.name]
                self.conflicts.setdefault(
                    column.name,
                    f"column {column.name} is {known} in {first} but {kind} in {file_name}; "
                    "write it with one type in all files",
                )
                continue
            if known != kind and {True, False} == set(map(pa.types.is_floating, (known, kind))):
                seen = self._first_seen.get(column.name)
                if seen is not None and not pa.types.is_null(kind):
                    self.widened.setdefault(
                        column.name,
                        f"column {column.name} is {known} in {seen} and {kind} in {file_name}",
                    )
            self._types[column.name] = common
            # A column of nulls has no type to disagree with, so its file is not named.
            if not pa.types.is_null(kind):
                self._first_seen.setdefault(column.name, file_name)

    def gaps(self) -> dict[str, str]:
        """Describe for each column that some files lack, the first of them."""
        found = {}
        for name in self._types:
            lacking = [(file, names) for file, names in self._schemas if name not in names]
            having = [file for file, names in self._schemas if name in names]
            if lacking and having:
                (file, names), has = lacking[0], having[0]
                found[name] = (
                    f"{file} has no column {name}, which {has} has; its columns are "
                    f"{listed(sorted(names))}"
                )
        return found

    def originals(self) -> dict[str, pa.DataType]:
        return {
            name: kinds[0] if len(kinds) == 1 else self._types[name]
            for name, kinds in self._originals.items()
        }

    def schema(self) -> pa.Schema:
        return pa.schema(list(self._types.items()))
