"""Taking rows out of finished parts, so that they are run again."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.output.files import OutputError
from batchgen.data.output.parts import list_parts, next_part_number, read_part, write_part
from batchgen.data.output.replace import replace_parts, staging_directory
from batchgen.data.stores.names import part_name
from batchgen.data.stores.store import Place, store_of


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
    affected: list[Place] = []
    removed = 0
    number = next_part_number(directory)
    try:
        staged = staging_directory(directory)
        for path in list_parts(directory):
            table = read_part(path)
            kept = table.filter(pc.invert(is_unwanted(table)))
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
