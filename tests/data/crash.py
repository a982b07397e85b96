"""Rows, runs and crashes for the tests of the output directory."""

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data import failpoints
from batchgen.data.output.directory import OutputDir
from batchgen.data.output.schema import RowResult, output_schema
from batchgen.data.output.writer import PartWriter
from batchgen.data.stores.store import Place

INT = pa.int64()


def ok(number: int, sample: int = 0, row_id: str | int | None = None) -> RowResult:
    row_id = number if row_id is None else row_id
    return RowResult(row_id, number, sample, "ok", generated_text=f"text {number} {sample}")


def failed(number: int) -> RowResult:
    return RowResult(number, number, 0, "error", error_type="empty_prompt", error_message="empty")


def write(
    directory: Place, *rows: RowResult, rows_per_part: int = 2, kind: pa.DataType = INT
) -> None:
    with PartWriter(directory, output_schema(kind), rows_per_part=rows_per_part) as writer:
        for row in rows:
            writer.put(row)


def begin(out: OutputDir, resume: Any = "if_possible", **fingerprint: str) -> bool:
    return out.begin({"model": "a"} | fingerprint, resume=resume, details={})


def run(directory: Path | str, *rows: RowResult, rows_per_part: int = 2) -> None:
    with OutputDir(directory) as out:
        begin(out)
        write(out.path, *rows, rows_per_part=rows_per_part)


def keys(directory: Path) -> list[tuple[int, int]]:
    table = pq.read_table(directory)
    return list(zip(table["row_index"].to_pylist(), table["sample_index"].to_pylist(), strict=True))


def visible(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


class Crash(BaseException):
    """Stands for the machine dying: nothing catches it."""


def crash_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """Die at the failpoint of this number, counted from 0."""
    calls = itertools.count()

    def reached(name: str) -> None:
        if next(calls) == number:
            raise Crash(name)

    patch.setattr(failpoints, "reached", reached)


def spoil(part: Path, column: str) -> None:
    """Change bytes in the middle of a column, under a footer that stays good."""
    group = pq.read_metadata(part).row_group(0)
    chunks = [group.column(n) for n in range(group.num_columns)]
    (chunk,) = [each for each in chunks if each.path_in_schema == column]
    content = bytearray(part.read_bytes())
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    middle = begin + chunk.total_compressed_size // 2
    for at in range(middle - 4, middle + 4):
        content[at] ^= 0xFF
    part.write_bytes(content)
