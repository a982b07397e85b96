"""Changing columns of the finished parts, all of them or none (see ``replace``)."""

from collections.abc import Callable

import pyarrow as pa

from batchgen.data.output.files import OutputError
from batchgen.data.output.parts import list_parts, read_part, write_part
from batchgen.data.output.replace import replace_parts, staging_directory
from batchgen.data.stores.names import part_name, part_number
from batchgen.data.stores.store import Place


def rewrite_parts(directory: Place, change: Callable[[pa.Table], pa.Table]) -> None:
    """Put a changed part in the place of every part; numbers and rows stay.

    Args:
        directory: the output directory, complete and locked.
        change: gives a part's new table of the same schema and as many rows.

    Raises:
        OutputError: the new parts could not be written; the old ones are untouched.
        DamagedPartError: a part cannot be read; nothing has changed.
    """
    parts = list_parts(directory)
    try:
        staged = staging_directory(directory)
    except OSError as error:
        raise OutputError.at(directory, error) from error
    for part in parts:
        number = part.name.split("-")[1]
        name = part_name(part_number(part.name) or 0, len(number))
        write_part(staged / name, change(read_part(part)))
    replace_parts(directory, parts)
