"""What a run says at its end of the rows that failed: how many, why, and what to do."""

from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.data.output.directory import ERRORS
from batchgen.data.stores.store import Place
from batchgen.errors import RowErrorType
from batchgen.job.accounts.report import REPORT
from batchgen.job.accounts.totals import OutputTotals, read_places
from batchgen.text import one_line

_MESSAGE_CHARS = 200


def failure_lines(totals: OutputTotals, summary: Mapping[str, Any], path: Place) -> list[str]:
    """Say a line for each kind of error, most rows first, and where to go on.

    Args:
        totals: counted over the parts.
        summary: what ``_summary.json`` holds.
        path: the output directory.

    Returns:
        No line where no row failed; there are few kinds, so there are few lines.
    """
    if not totals.errors:
        return []
    kinds = [_kind(kind, rows, totals, summary) for kind, rows in totals.errors.most_common()]
    return [
        *kinds,
        f"the input rows that failed are in {path / ERRORS}, examples in {path / REPORT}; "
        "output.retry_errors=true runs them again",
    ]


def _kind(kind: str, rows: int, totals: OutputTotals, summary: Mapping[str, Any]) -> str:
    (row,) = read_places(totals.failed[kind][:1], ("id", "error_message"))
    row_id, message = one_line(str(row["id"])), " ".join((row["error_message"] or "").split())
    if len(message) > _MESSAGE_CHARS:
        message = f"{message[:_MESSAGE_CHARS]}..."
    remedies = "".join(f"; {remedy}" for remedy in _remedies(kind, rows, summary))
    return f"failed: {rows:,} {kind}, for example id {row_id}: {message}{remedies}"


def _remedies(kind: str, rows: int, summary: Mapping[str, Any]) -> Iterator[str]:
    """Say what would do for all rows of a kind, where one row's message does not."""
    needed = summary["most_refused_blocks"]
    if kind == RowErrorType.EXCEEDS_KV_CAPACITY and rows > 1 and needed:
        covered = summary["engine_figures_cover"]
        whose = "them all" if covered["rows"] == covered["of_rows"] else "all of this run's"
        yield f"pool.num_blocks={needed} holds {whose}"
