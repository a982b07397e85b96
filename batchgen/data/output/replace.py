"""Replacing finished parts by others, whole or not at all.

New parts are staged out of the readers' sight. A record then says which parts they
replace; from that moment the replacement is decided, and whoever opens the directory next
carries it out to the end. Old parts are gone before the first new one appears, so no row
is ever there twice; and none of them goes unless every new one is there.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from batchgen.data import failpoints
from batchgen.data.output.files import OutputError, remove_durably, write_json_durably
from batchgen.data.output.parts import list_parts
from batchgen.data.stores.names import part_number
from batchgen.data.stores.store import Place, store_of

logger = logging.getLogger(__name__)

RECORD_NAME = "_switch.json"
DAMAGED_NAME = "_switch.damaged.json"
STAGED_NAME = "_staged"


class DamagedRecordError(Exception):
    """A disk has not kept the record of a replacement."""


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
    def read(cls, directory: Place) -> Self | None:
        """Read the record of a directory; None where nothing was decided.

        Raises:
            OSError: it cannot be read.
            DamagedRecordError: it is there, but says nothing that can be carried out.
        """
        path = directory / RECORD_NAME
        try:
            content = json.loads(store_of(path).read(path))
            names = tuple(content["remove"]), tuple(content["add"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedRecordError(f"{path} is damaged ({error!r})") from error
        every = (*names[0], *names[1])
        if any(not isinstance(name, str) or part_number(name) is None for name in every):
            raise DamagedRecordError(f"{path} is damaged (it names files that are no parts)")
        return cls(*names)

    def missing(self, directory: Place) -> list[str]:
        """Name the new parts that are neither staged nor in their place."""
        places = directory, directory / STAGED_NAME
        exists = store_of(directory).exists
        return [name for name in self.add if not any(exists(place / name) for place in places)]


def staging_directory(directory: Place) -> Place:
    """Give an empty directory for new parts."""
    staged, store = directory / STAGED_NAME, store_of(directory)
    store.remove(staged)
    store.make_directory(staged)
    return staged


def replace_parts(directory: Place, old: Iterable[Place]) -> None:
    """Put the staged parts in the place of old ones.

    Raises:
        OutputError: the record could not be written, and nothing has changed; or the
            replacement is decided but not complete, and the next run completes it.
    """
    new = list_parts(directory / STAGED_NAME)
    try:
        # The staged parts must outlive a power cut that the record outlives.
        store_of(directory).sync(directory)
    except OSError as error:
        raise OutputError.at(directory, error) from error
    names = {"remove": [path.name for path in old], "add": [path.name for path in new]}
    write_json_durably(directory / RECORD_NAME, names)
    complete_replacement(directory)


def complete_replacement(directory: Place) -> None:
    """Carry out a decided replacement; clear away one that was never decided.

    A damaged record is set aside. No row is there twice then, since old parts go before new
    ones come; rows that went with old parts are run again.

    Raises:
        OutputError: a new part is not there any more (no old one is touched then), or the disk
            does not take the change.
    """
    try:
        try:
            decided = Replacement.read(directory)
        except DamagedRecordError as damage:
            decided = None
            store_of(directory).move(directory / RECORD_NAME, directory / DAMAGED_NAME)
            logger.warning(
                "%s; moved it to %s: rows that are missing now are run again", damage, DAMAGED_NAME
            )
        if decided is not None:
            _carry_out(directory, decided)
        store_of(directory).remove(directory / STAGED_NAME)
    except OSError as error:
        raise OutputError.at(directory, error) from error


def _carry_out(directory: Place, decided: Replacement) -> None:
    missing = decided.missing(directory)
    if missing:
        raise OutputError(
            f"output.dir={directory}: {RECORD_NAME} names {missing[0]} as a new part, but it is "
            f"nowhere; put it back into {STAGED_NAME}, or remove {RECORD_NAME} to keep the old "
            "parts"
        )
    store = store_of(directory)
    failpoints.reached("replace.begin")
    for name in decided.remove:
        store.remove(directory / name)
        failpoints.reached("replace.removed")
    store.sync(directory)
    for name in decided.add:
        staged = directory / STAGED_NAME / name
        if store.exists(staged):
            store.move(staged, directory / name)
            failpoints.reached("replace.moved")
    store.sync(directory)
    failpoints.reached("replace.done")
    remove_durably(directory, RECORD_NAME)


def is_replacing(directory: Place) -> bool:
    """Whether a replacement is decided and not carried out; only looks."""
    try:
        return Replacement.read(directory) is not None
    except (DamagedRecordError, OSError):
        return False


def settled_parts(directory: Place) -> list[Place]:
    """Give the parts that are there once a decided replacement is carried out; only looks."""
    parts = list_parts(directory)
    try:
        decided = Replacement.read(directory)
    except (DamagedRecordError, OSError):
        return parts
    if decided is None:
        return parts
    kept = [path for path in parts if path.name not in decided.remove]
    moved = {path.name for path in kept}
    staged = [directory / STAGED_NAME / name for name in decided.add if name not in moved]
    return kept + [path for path in staged if store_of(path).exists(path)]
