"""Replacing finished parts by others, whole or not at all.

New parts are staged out of the readers' sight. A record then says which parts they
replace; from that moment the replacement is decided, and whoever opens the directory next
carries it out to the end. Old parts are gone before the first new one appears, so no row
is ever there twice.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from batchgen.data.files import fsync_directory, remove_durably, write_json_durably
from batchgen.data.parts import list_parts

RECORD_NAME = "_switch.json"
STAGED_NAME = "_staged"


def staging_directory(directory: Path) -> Path:
    """Give an empty directory for new parts."""
    staged = directory / STAGED_NAME
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    return staged


def replace_parts(directory: Path, old: Iterable[Path]) -> None:
    """Put the staged parts in the place of old ones.

    Raises:
        OutputError: the record could not be written; nothing has changed.
    """
    write_json_durably(directory / RECORD_NAME, {"remove": [path.name for path in old]})
    complete_replacement(directory)


def complete_replacement(directory: Path) -> None:
    """Carry out a decided replacement; clear away one that was never decided."""
    record, staged = directory / RECORD_NAME, directory / STAGED_NAME
    if record.exists():
        for name in json.loads(record.read_text())["remove"]:
            (directory / name).unlink(missing_ok=True)
        fsync_directory(directory)
        if staged.exists():
            for path in list_parts(staged):
                path.rename(directory / path.name)
            fsync_directory(directory)
        remove_durably(record)
    shutil.rmtree(staged, ignore_errors=True)
