"""What a file that is no readable Parquet looks like, and what to do about it."""

import codecs
import json
import re
import shlex
from pathlib import Path
from typing import Any

from batchgen.data.stores.store import Place

_PARQUET, _ENCRYPTED, _MARK_BYTES = b"PAR1", b"PARE", 4
_HEAD_BYTES = 4096

# First bytes of formats that are taken for Parquet, with what to do about each.
_UNPACK = "unpack it first"
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "gzip", _UNPACK),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"BZh", "bzip2", _UNPACK),
    (b"\xfd7zXZ", "xz", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "zstd", _UNPACK),
    (b"ARROW1", "Arrow IPC (Feather)", "feather"),
    (b"ORC", "ORC", "orc"),
    (b"Obj\x01", "Avro", "write it as Parquet with the tool that made it"),
    (b"SQLite format 3", "an SQLite database", "export the table as Parquet, with DuckDB say"),
)
# An upload's chunks with a checksum after them, kept as they came.
_FRAMED = re.compile(rb"[0-9a-fA-F]{1,8}\r\n" + _PARQUET)
_LFS_POINTER = "version https://git-lfs"
# The modules of pyarrow, which is installed wherever this runs, that read the rest.
_READERS = {"feather": "read_table", "orc": "read_table", "json": "read_json", "csv": "read_csv"}
_DELIMITERS = ",;\t"
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f]")


def verdict(file: Any, place: Place, error: Exception) -> str:
    """Say what a file looks like that could not be opened as Parquet.

    Args:
        file: open for random access, with a ``size()`` in bytes.
        place: where it lies.
        error: what opening it gave.

    Returns:
        What it looks like and what to do, to stand behind its name.
    """
    size = file.size()
    file.seek(0)
    head = bytes(file.read(min(size, _HEAD_BYTES)))
    file.seek(max(0, size - _MARK_BYTES))
    tail = bytes(file.read(min(size, _MARK_BYTES)))
    if tail == _ENCRYPTED:
        return "is an encrypted Parquet file; write it without encryption"
    if _FRAMED.match(head):
        return (
            "is a Parquet file whose storage kept an upload's checksums as content; upload it "
            "again with AWS_REQUEST_CHECKSUM_CALCULATION=when_required in the environment"
        )
    text = _text(head)
    looks, advice = _binary(head) if text is None else _of_text(text)
    if head.startswith(_PARQUET) or not looks:
        return (
            f"is not a complete Parquet file ({str(error).strip()}); write it again or move it away"
        )
    return f"is no Parquet file: it looks like {looks}; {_conversion(advice, place, text or '')}"


def _text(head: bytes) -> str | None:
    """Read a file's first bytes as text, or give None where they are none."""
    try:
        # The last character may have been cut.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head).lstrip()
    except UnicodeDecodeError:
        return None
    return text if text and not _CONTROL.search(text) else None


def _binary(head: bytes) -> tuple[str, str]:
    """Name a format by a file's first bytes, with what to do; empty where unknown."""
    found = (each for each in _SIGNATURES if head.startswith(each[0]))
    _, looks, advice = next(found, (b"", "", ""))
    return looks, advice


def _of_text(text: str) -> tuple[str, str]:
    """Name a format by a file's first characters, with what to do."""
    begin = text[:9].lower()
    if text.startswith(_LFS_POINTER):
        return "a Git LFS pointer", "fetch the file itself with: git lfs pull"
    if begin.startswith(("<!doctype", "<html", "<?xml")):
        return "a web page or XML", "download or export the data itself"
    if text.startswith("{"):
        return "JSON lines", "json"
    if text.startswith("["):
        return "one JSON array", "write it as Parquet, a row for each of its objects"
    if _delimiter(text):
        return "CSV", "csv"
    return "text", "write it as Parquet, a row for each prompt"


def _delimiter(text: str) -> str:
    """Give the character that parts the columns of a table's first line, if any does."""
    line = text.splitlines()[0]
    return max(_DELIMITERS, key=line.count) if any(each in line for each in _DELIMITERS) else ""


def _conversion(advice: str, place: Place, text: str) -> str:
    """Give a command that writes the file as Parquet, where pyarrow reads its format."""
    if advice not in _READERS:
        return advice
    # An object has to be copied to this machine first.
    read = json.dumps(str(place) if isinstance(place, Path) else place.name)
    if advice == "csv":
        options = f"delimiter={json.dumps(_delimiter(text))}, newlines_in_values=True"
        read += f", parse_options=rows.ParseOptions({options})"
    code = (
        f"import pyarrow.{advice} as rows, pyarrow.parquet as parquet; "
        f'parquet.write_table(rows.{_READERS[advice]}({read}), "rows.parquet")'
    )
    return f"convert it, with pyarrow say: python -c {shlex.quote(code)}"
