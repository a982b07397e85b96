"""An output directory as it stands, looked at without changing anything in it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from batchgen.data.output.directory import LOCK, MANIFEST, METRICS, SUCCESS
from batchgen.data.output.files import OutputError
from batchgen.data.output.finished import FinishedRows
from batchgen.data.output.manifest import OUTPUT_ID, read_manifest
from batchgen.data.output.parts import DamagedPartError, check_part, part_schema
from batchgen.data.output.replace import is_replacing, settled_parts
from batchgen.data.stores.lock import Owner
from batchgen.data.stores.store import Place, store_of

# A live run may replace the parts while they are looked at.
_ATTEMPTS = 20
_TAIL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Glance:
    """What an output directory holds.

    Attributes:
        path: the directory.
        manifest: the manifest's content; None where no run has begun.
        finished: the rows in whole parts; None where there is no part.
        num_parts: whole parts.
        damaged: names of parts that are not whole.
        is_replacing: a replacement of parts is decided and not carried out.
        is_complete: ``_SUCCESS`` is there.
        is_held: a live process holds the directory.
        owner: who wrote the lock file last, where there is one.
        sample: the last line of ``_metrics.jsonl``, where there is one.
    """

    path: Place
    manifest: Mapping[str, Any] | None
    finished: FinishedRows | None
    num_parts: int
    damaged: tuple[str, ...]
    is_replacing: bool
    is_complete: bool
    is_held: bool
    owner: Owner | None
    sample: Mapping[str, Any] | None

    @classmethod
    def take(cls, path: Place, *, verify: bool = False) -> Self:
        """Look at a directory, which a live run may be changing.

        Args:
            path: the directory.
            verify: read all of every part, not only what tells which rows are done.

        Raises:
            UsageError: the manifest is damaged, or rows stand twice.
            OutputError: the directory cannot be read.
        """
        for _ in range(_ATTEMPTS):
            try:
                return cls._take(path, verify)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise OutputError(f"output.dir: {path} cannot be read: {error}") from error
        raise OutputError(f"output.dir: {path} keeps changing while it is looked at; try again")

    @classmethod
    def _take(cls, path: Place, verify: bool) -> Self:
        store = store_of(path)
        is_locked, owner = store.holder(path / LOCK)
        manifest = read_manifest(path / MANIFEST)
        output_id = None if manifest is None else manifest.get(OUTPUT_ID)
        finished, num_parts, damaged = _read_parts(path, output_id, verify)
        return cls(
            path=path,
            manifest=manifest,
            finished=finished,
            num_parts=num_parts,
            damaged=damaged,
            is_replacing=is_replacing(path),
            is_complete=store.exists(path / SUCCESS),
            is_held=is_locked,
            owner=owner,
            sample=_last_sample(path),
        )


def _read_parts(
    path: Place, output_id: str | None, verify: bool
) -> tuple[FinishedRows | None, int, tuple[str, ...]]:
    """Read all parts that are whole; give their rows, their number, and the others' names."""
    parts = settled_parts(path)
    damaged: list[str] = []
    unread = list(parts) if verify else []
    while parts:
        try:
            while unread:
                check_part(unread.pop())
            schema = part_schema(parts[0])
            if "id" not in schema.names:
                raise DamagedPartError(parts[0], ValueError("it has no column id"))
            id_type = schema.field("id").type
            finished = FinishedRows.read(parts, id_type, output_id)
            return finished, len(parts), tuple(damaged)
        except DamagedPartError as damage:
            damaged.append(damage.path.name)
            parts = [part for part in parts if part != damage.path]
    return None, 0, tuple(damaged)


def _last_sample(path: Place) -> Mapping[str, Any] | None:
    """Read the last whole line of the figures, those of a run on this machine first."""
    for place in (store_of(path).scratch(path) / METRICS, path / METRICS):
        try:
            with store_of(place).open(place) as file:
                file.seek(max(0, file.size() - _TAIL_BYTES))
                return _last_line(file.read().split(b"\n"))
        except FileNotFoundError:
            continue
    return None


def _last_line(lines: Sequence[bytes]) -> Mapping[str, Any] | None:
    for line in reversed(lines[:-1]):
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            continue
    return None
