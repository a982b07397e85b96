"""Few-shot examples: rows with the template's columns and an answer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import UsageError
from batchgen.prompts.template import RowTemplate

Shot = tuple[str, str]
"""A rendered example: what is asked, and the answer."""


def load_shots(path: Path) -> list[dict[str, Any]]:
    """Read the rows of ``prompt.shots_file`` in their order.

    Args:
        path: a ``.parquet`` file, else JSON lines (blank lines are skipped).

    Raises:
        UsageError: the file is missing, broken, or holds no rows.
    """
    try:
        rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UsageError(f"prompt.shots_file={path} cannot be read: {error}") from error
    if not rows:
        raise UsageError(f"prompt.shots_file={path} holds no rows; leave the key out instead")
    return rows


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def _json_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a JSON object")
        rows.append(row)
    return rows


def render_shots(
    rows: Sequence[Mapping[str, Any]], template: RowTemplate, answer_column: str
) -> tuple[Shot, ...]:
    """Render every shot once.

    Raises:
        UsageError: a shot lacks a column of the template or its answer, or fails to
            render; the message names the row, counted from 1.
    """
    return tuple(
        _render_shot(row, template, answer_column, number)
        for number, row in enumerate(rows, start=1)
    )


def _render_shot(
    row: Mapping[str, Any], template: RowTemplate, answer_column: str, number: int
) -> Shot:
    where = f"prompt.shots_file, row {number}"
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
