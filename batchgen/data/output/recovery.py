"""Putting right what a run left that was killed, or whose disk failed it."""

import logging

from batchgen.data import failpoints
from batchgen.data.output.files import OutputError
from batchgen.data.output.parts import DamagedPartError, list_parts, part_schema
from batchgen.data.output.replace import complete_replacement
from batchgen.data.stores.names import is_temporary
from batchgen.data.stores.store import Place, store_of

logger = logging.getLogger(__name__)

QUARANTINE = "_quarantine"


def recover(directory: Place) -> None:
    """Carry out a decided replacement, sweep temporaries, set aside what is no whole part.

    Raises:
        OutputError: the disk does not take the changes, or cannot be read.
    """
    try:
        failpoints.reached("recover.begin")
        complete_replacement(directory)
        store = store_of(directory)
        for entry in store.entries(directory):
            if is_temporary(entry.name):
                store.remove(entry)
        sweep_strays(directory)
        failpoints.reached("recover.swept")
        for path in list_parts(directory):
            try:
                part_schema(path)
            except DamagedPartError as damage:
                set_aside(directory, damage)
        store.sync(directory)
    except OSError as error:
        raise OutputError.at(directory, error) from error


def sweep_strays(directory: Place) -> None:
    """Set parts aside that do not count, out of the sight of other readers.

    Raises:
        OSError: they could not be moved.
    """
    for part in store_of(directory).strays(directory):
        _quarantine(directory, part)
        logger.warning("%s does not count; moved it to %s", part, directory / QUARANTINE)


def set_aside(directory: Place, damage: DamagedPartError) -> None:
    """Move a damaged part out of the readers' sight; its rows count as not done.

    Raises:
        OSError: it could not be moved.
    """
    _quarantine(directory, damage.path)
    where = directory / QUARANTINE
    logger.warning("%s; moved it to %s: its rows are run again", damage, where)


def _quarantine(directory: Place, part: Place) -> None:
    store, where = store_of(directory), directory / QUARANTINE
    store.make_directory(where)
    store.move(part, where / part.name)
    store.sync(directory)
