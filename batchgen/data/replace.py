"""Replacing finished parts by others, whole or not at all.

New parts are staged out of the readers' sight. A record then says which parts they
replace; from that moment the replacement is decided, and whoever opens the directory next
carries it out to the end. Old parts are gone before the first new one appears, so no row
is ever there twice; and none of them goes unless every new one is there.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from batchgen.data import failpoints
from batchgen.data.files import OutputError, fsync_directory, remove_durably, write_json_durably
from batchgen.data.parts import list_parts, part_number

RECORD_NAME = "_switch.json"
STAGED_NAME = "_staged"


@dataclass(frozen=True, slots=True)
class Replacement:
    """A decided replacement.

    Attributes:
        remove: names of the old parts.
        add: names of the new ones, staged or already in their place.
    """

    remove: tuple[str, ...]
    add: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read the record of a directory; None where nothing was decided.

        Raises:
            OutputError: the record is damaged.
        """
        path = directory / RECORD_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            names = tuple(content["remove"]), tuple(content["add"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutputError.at(path, error) from error
        if any(part_number(name) is None for name in (*names[0], *names[1])):
            raise OutputError.at(path, ValueError("it names files that are no parts"))
        return cls(*names)

    def missing(self, directory: Path) -> list[str]:
        """Name the new parts that are neither staged nor in their place."""
        places = directory, directory / STAGED_NAME
        return [name for name in self.add if not any((place / name).exists() for place in places)]


def staging_directory(directory: Path) -> Path:
    """Give an empty directory for new parts."""
    staged = directory / STAGED_NAME
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    return staged


def replace_parts(directory: Path, old: Iterable[Path]) -> None:
    """Put the staged parts in the place of old ones.

    Raises:
        OutputError: the record could not be written, and nothing has changed; or the
            replacement is decided but not complete, and the next run completes it.
    """
    new = list_parts(directory / STAGED_NAME)
    try:
        # The staged parts must outlive a power cut that the record outlives.
        fsync_directory(directory)
    except OSError as error:
        raise OutputError.at(directory, error) from error
    names = {"remove": [path.name for path in old], "add": [path.name for path in new]}
    write_json_durably(directory / RECORD_NAME, names)
    complete_replacement(directory)


def complete_replacement(directory: Path) -> None:
    """Carry out a decided replacement; clear away one that was never decided.

    Raises:
        OutputError: the record is damaged, a new part is not there any more (no old one
            is touched then), or the disk does not take the change.
    """
    decided = Replacement.read(directory)
    try:
        if decided is not None:
            _carry_out(directory, decided)
        shutil.rmtree(directory / STAGED_NAME, ignore_errors=True)
    except OSError as error:
        raise OutputError.at(directory, error) from error


def _carry_out(directory: Path, decided: Replacement) -> None:
    missing = decided.missing(directory)
    if missing:
        raise OutputError(
            f"output.dir={directory}: {RECORD_NAME} names {missing[0]} as a new part, but it is "
            f"nowhere; put it back into {STAGED_NAME}, or remove {RECORD_NAME} to keep the old "
            "parts"
        )
    failpoints.reached("replace.begin")
    for name in decided.remove:
        (directory / name).unlink(missing_ok=True)
        failpoints.reached("replace.removed")
    fsync_directory(directory)
    for name in decided.add:
        staged = directory / STAGED_NAME / name
        if staged.exists():
            staged.rename(directory / name)
            failpoints.reached("replace.moved")
    fsync_directory(directory)
    failpoints.reached("replace.done")
    remove_durably(directory / RECORD_NAME)


def settled_parts(directory: Path) -> list[Path]:
    """Give the parts that are there once a decided replacement is carried out; only looks."""
    decided = Replacement.read(directory)
    parts = list_parts(directory)
    if decided is None:
        return parts
    staged = [directory / STAGED_NAME / name for name in decided.add]
    kept = [path for path in parts if path.name not in decided.remove]
    return kept + [path for path in staged if path.exists()]
