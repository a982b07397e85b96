"""Putting right what a run left that was killed, or whose disk failed it."""

import logging
import shutil
from pathlib import Path

from batchgen.data import failpoints
from batchgen.data.files import OutputError, fsync_directory, is_temporary
from batchgen.data.parts import DamagedPartError, list_parts, part_schema
from batchgen.data.replace import complete_replacement

logger = logging.getLogger(__name__)

QUARANTINE = "_quarantine"


def recover(directory: Path) -> None:
    """Carry out a decided replacement, sweep temporaries, set damaged parts aside.

    Raises:
        OutputError: the disk does not take the changes, or cannot be read.
    """
    try:
        failpoints.reached("recover.begin")
        complete_replacement(directory)
        for entry in list(directory.iterdir()):
            if is_temporary(entry.name):
                remove(entry)
        failpoints.reached("recover.swept")
        for path in list_parts(directory):
            try:
                part_schema(path)
            except DamagedPartError as damage:
                set_aside(damage)
        fsync_directory(directory)
    except OSError as error:
        raise OutputError.at(directory, error) from error


def set_aside(damage: DamagedPartError) -> None:
    """Move a damaged part out of the readers' sight; its rows count as not done.

    Raises:
        OSError: it could not be moved.
    """
    directory = damage.path.parent / QUARANTINE
    directory.mkdir(exist_ok=True)
    damage.path.rename(directory / damage.path.name)
    fsync_directory(damage.path.parent)
    logger.warning("%s; moved it to %s: its rows are run again", damage, directory)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole directory that may not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
