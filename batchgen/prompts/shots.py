"""Few-shot examples: rows with the template's columns and an answer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import UsageError
from batchgen.prompts.template import RowTemplate
from batchgen.prompts.values import Unreadable, python_rows
from batchgen.text import refuse_lone_surrogates

Shot = tuple[str, str]
"""A rendered example: what is asked, and the answer."""


@dataclass(frozen=True, slots=True)
class Shots:
    """The rows of a file of examples.

    Attributes:
        rows: as they stand in it, in their order.
        places: where each of them stands, for messages: the file with the line, counted from
            1 as editors do, or with the row of a table, counted from 0 as everywhere.
    """

    rows: tuple[Mapping[str, Any], ...] = ()
    places: tuple[str, ...] = ()


def load_shots(path: Path) -> Shots:
    """Read the rows of ``prompt.shots_file`` in their order.

    Args:
        path: a ``.parquet`` file, else JSON lines (blank lines are skipped).

    Raises:
        UsageError: the file is missing, broken, or holds no rows.
    """
    try:
        read = _parquet_rows if path.suffix == ".parquet" else _json_rows
        found = list(read(path))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UsageError(f"prompt.shots_file={path} cannot be read: {error}") from error
    if not found:
        raise UsageError(f"prompt.shots_file={path} holds no rows; leave the key out instead")
    return Shots(
        tuple(row for _, row in found),
        tuple(f"prompt.shots_file={path}, {place}" for place, _ in found),
    )


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(python_rows(pq.read_table(path))):
        if isinstance(row, Unreadable):
            raise ValueError(f"row {number}: {row}")
        yield f"row {number}", dict(row)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            refuse_lone_surrogates(row, "a text")
        except json.JSONDecodeError as error:
            # The error's own text counts lines as well, within this one.
            where = f"{error.msg} at character {error.pos + 1}"
            raise ValueError(f"line {number} is not JSON: {where}") from error
        except RecursionError as error:
            raise ValueError(f"line {number} is nested too deeply") from error
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a JSON object")
        yield f"line {number}", row


def render_shots(
    rows: Sequence[Mapping[str, Any]],
    template: RowTemplate,
    answer_column: str,
    places: Sequence[str],
) -> tuple[Shot, ...]:
    """Render every shot once.

    Args:
        rows: the examples, with the template's columns and the answer.
        places: where each of them stands, as ``Shots.places``.

    Raises:
        UsageError: a shot lacks a column of the template or its answer, or fails to
            render; the message names its place.
    """
    return tuple(
        _render_shot(row, template, answer_column, where)
        for row, where in zip(rows, places, strict=True)
    )


def _render_shot(
    row: Mapping[str, Any], template: RowTemplate, answer_column: str, where: str
) -> Shot:
    missing = [name for name in (*template.columns, answer_column) if name not in row]
    if missing:
        raise UsageError(
            f"{where} lacks {', '.join(missing)}; a shot needs the template's columns "
            f"({', '.join(template.columns)}) and prompt.answer_column={answer_column}"
        )
    answer = row[answer_column]
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise UsageError(f"{where}: {answer_column}={answer!r} must be a text or a number")
    try:
        return template.render(row), str(answer)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error
