"""Taking rows out of finished parts, so that they are run again or are there only once."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.output.files import OutputError
from batchgen.data.output.parts import list_parts, next_part_number, read_part, write_part
from batchgen.data.output.replace import replace_parts, staging_directory
from batchgen.data.stores.names import part_name
from batchgen.data.stores.store import Place, store_of
from batchgen.errors import UsageError

logger = logging.getLogger(__name__)


def discard_rows(directory: Place, is_unwanted: Callable[[pa.Table], Any]) -> int:
    """Rewrite the parts that hold unwanted rows without them; the rows vanish all at once.

    Args:
        directory: the output directory, locked.
        is_unwanted: gives a mask over the rows of a part.

    Returns:
        rows removed.

    Raises:
        OutputError: the new parts could not be written; the old ones are untouched.
        DamagedPartError: a part cannot be read; nothing has changed.
    """
    return _rewrite_without(directory, lambda path, table: is_unwanted(table))


def _rewrite_without(directory: Place, is_unwanted: Callable[[Place, pa.Table], Any]) -> int:
    """Rewrite parts without some rows; see :func:`discard_rows`."""
    affected: list[Place] = []
    removed = 0
    number = next_part_number(directory)
    try:
        staged = staging_directory(directory)
        for path in list_parts(directory):
            table = read_part(path)
            kept = table.filter(pc.invert(is_unwanted(path, table)))
            if len(kept) == len(table):
                continue
            affected.append(path)
            removed += len(table) - len(kept)
            if len(kept):
                write_part(staged / part_name(number + len(affected) - 1), kept)
        if not affected:
            store_of(staged).remove(staged)
    except OSError as error:
        raise OutputError.at(directory, error) from error
    if affected:
        replace_parts(directory, affected)
    return removed


# What makes two copies of a row's result equal; times and block accounts are a run's.
_RESULT = (
    "id", "row_index", "sample_index", "status", "generated_text", "output_token_ids",
    "finish_reason", "stop_reason", "error_type",
)  # fmt: skip


def drop_equal_copies(directory: Place, row_indices: npt.NDArray[np.int64]) -> int:
    """Keep one of the equal results of rows that are there more than once.

    Args:
        directory: the output directory, locked.
        row_indices: the rows.

    Returns:
        copies removed.

    Raises:
        UsageError: two results of a row differ; nothing has changed.
        OutputError: as for :func:`discard_rows`.
    """
    wanted = pa.array(row_indices, pa.int64())
    first: dict[tuple[int, int], tuple[dict[str, Any], Place]] = {}
    extra: dict[Place, set[int]] = {}
    for path in list_parts(directory):
        table = read_part(path, _RESULT)
        places = pc.indices_nonzero(pc.is_in(table.column("row_index"), value_set=wanted))
        for place, row in zip(places.to_pylist(), table.take(places).to_pylist(), strict=True):
            key = row["row_index"], row["sample_index"]
            kept, there = first.setdefault(key, (row, path))
            if kept is row:
                continue
            if kept != row:
                raise UsageError(
                    f"output.dir: row_index {key[0]}, sample_index {key[1]} has one result in "
                    f"{there} and another in {path}; remove the part that does not belong there "
                    "(its other rows are run again), or set output.overwrite=true to begin anew"
                )
            extra.setdefault(path, set()).add(place)
    removed = _rewrite_without(
        directory,
        lambda path, table: pa.array([at in extra.get(path, ()) for at in range(len(table))]),
    )
    logger.warning("%s held %d equal copies of rows; one of each is kept", directory, removed)
    return removed
