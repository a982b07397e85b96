"""The output directory from the first look at it to ``_SUCCESS``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data import failpoints
from batchgen.data.input.source import InputSource
from batchgen.data.output.discard import discard_rows, drop_equal_copies
from batchgen.data.output.failed_rows import write_failed_rows
from batchgen.data.output.files import (
    OutputError,
    remove_durably,
    write_json_durably,
    write_text_durably,
)
from batchgen.data.output.finished import FinishedRows, RepeatedRowsError
from batchgen.data.output.manifest import (
    OUTPUT_ID,
    Fingerprint,
    compare_manifest,
    read_manifest,
    refuse_mismatch,
    write_manifest,
)
from batchgen.data.output.ordering import sort_parts
from batchgen.data.output.parts import DamagedPartError, check_part, list_parts, write_part
from batchgen.data.output.recovery import QUARANTINE, recover, set_aside, sweep_strays
from batchgen.data.output.replace import DAMAGED_NAME, RECORD_NAME, STAGED_NAME
from batchgen.data.output.rewrite import rewrite_parts
from batchgen.data.output.schema import marked
from batchgen.data.output.writer import PartLimits
from batchgen.data.stores.lock import DirectoryLock
from batchgen.data.stores.names import part_name, part_number
from batchgen.data.stores.store import Place, place_of, store_of
from batchgen.errors import UsageError

Resume = Literal["if_possible", "never", "always"]

MANIFEST, SUCCESS, LOCK, ERRORS = "_manifest.json", "_SUCCESS", "_lock", "_errors"
SUMMARY, METRICS = "_summary.json", "_metrics.jsonl"
# What a run leaves, in the order in which it is thrown away, also where a folder has its
# name: the manifest goes last, so that a half-cleared directory is still known as ours.
_RESULT_NAMES = (
    "_plan",
    "_plan.json",
    "_plan.svg",
    RECORD_NAME,
    DAMAGED_NAME,
    STAGED_NAME,
    SUMMARY,
    METRICS,
    "_report.html",
    ERRORS,
    QUARANTINE,
    MANIFEST,
)


class OutputDir:
    """An output directory, held by this process while the context is open.

    Entering creates the directory, refuses one that is not ours, takes the lock, and puts
    right what a killed run left: a decided replacement of parts is carried out,
    temporaries are removed, parts without a footer are moved to ``_quarantine``. A refusal
    while the context is open leaves no directory that was made for it and is empty still.

    Args:
        path: ``output.dir``, on a local file system or as ``s3://bucket/...``.
        overwrite: ``output.overwrite``: :meth:`begin` throws away the results that are
            there. Files that are not ours are never removed.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path: Place = place_of("output.dir", str(path))
        self._overwrite = overwrite
        self._is_new = False
        self._output_id: str | None = None
        self._store = store_of(self.path)
        self._lock = self._store.lock(self.path / LOCK)

    def __enter__(self) -> Self:
        """Open the directory.

        Raises:
            UsageError: it cannot be made, holds what is not ours, or another run holds it.
            OutputError: what a killed run left cannot be put right.
        """
        try:
            self._is_new = self._store.make_directory(self.path)
            self._refuse_foreign()
            self._refuse_links()
            if self._overwrite:
                self._store.make_way(self.path / LOCK)
            self._lock.acquire()
        except OSError as error:
            raise UsageError(f"output.dir={self.path} cannot be used: {error}") from error
        try:
            self._recover()
        except BaseException:
            self._lock.release()
            raise
        return self

    def _recover(self) -> None:
        try:
            recover(self.path)
        except OutputError:
            if not self._overwrite:
                raise
            # A replacement that cannot be carried out is thrown away with the rest.
            self._store.remove(self.path / RECORD_NAME)
            recover(self.path)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
        if self._is_new and isinstance(error, UsageError):
            self._store.drop_empty(self.path)

    @property
    def parts(self) -> list[Place]:
        """The finished parts by number."""
        return list_parts(self.path)

    @property
    def is_complete(self) -> bool:
        """Whether the run here ended with every row done, and few enough of them failed."""
        return self._store.exists(self.path / SUCCESS)

    @property
    def scratch(self) -> Path:
        """The local directory for what only runs on this machine read."""
        return self._store.scratch(self.path)

    def read(self, name: str) -> bytes:
        """Read a file of the directory.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read.
        """
        return self._store.read(self.path / name)

    def appended(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local file to append to; in the end it stands in the directory."""
        return self._store.appended(self.path / name)

    def begin(
        self,
        fingerprint: Fingerprint,
        *,
        resume: Resume,
        details: Mapping[str, Any],
        version_1: Callable[[], Fingerprint] | None = None,
    ) -> bool:
        """Decide whether to go on from the results that are there, and leave the manifest.

        Results of different fingerprints never come together. ``if_possible`` goes on
        where there are results of the same fingerprint and starts where there are none;
        ``never`` refuses results that are there; ``always`` refuses where there are none.

        Args:
            fingerprint: what can change the text of a result.
            resume: ``output.resume``.
            details: written into a new manifest for people.
            version_1: makes the fingerprint in the form of an older manifest.

        Returns:
            whether there are results to go on from.

        Raises:
            UsageError: the results there do not fit, with the differing keys; or the
                resume mode refuses.
        """
        if self._overwrite:
            self._clear()
        manifest = self.path / MANIFEST
        has_results = bool(self.parts)
        if has_results:
            if resume == "never":
                raise UsageError(
                    f"output.resume=never, but output.dir={self.path} holds results; choose "
                    "another output.dir, or set output.overwrite=true to throw them away"
                )
            begun = read_manifest(manifest) or {"schema_version": None, "fingerprint": {}}
            refuse_mismatch(self.path, compare_manifest(begun, fingerprint, version_1))
            self._output_id = begun.get(OUTPUT_ID)
            if begun.get("schema_version") is not None:
                self._watch_manifest()
            return True
        if resume == "always":
            raise UsageError(
                f"output.resume=always, but output.dir={self.path} holds no results to go on "
                "from; check output.dir, or use output.resume=if_possible"
            )
        self._output_id = write_manifest(manifest, fingerprint, details)
        self._watch_manifest()
        return False

    def _watch_manifest(self) -> None:
        """Let the lock look, before each change, whether the manifest is still the one begun with.

        On object storage the list of parts is tied to the run that wrote it.
        """
        if not isinstance(self._lock, DirectoryLock):
            return
        manifest, seen = self.path / MANIFEST, [""]

        def is_ours() -> bool:
            try:
                stamp = self._store.stamp(manifest)
                if stamp != seen[0]:
                    if (read_manifest(manifest) or {}).get(OUTPUT_ID) != self._output_id:
                        return False
                    seen[0] = stamp
            except (OSError, UsageError):
                return False
            return True

        self._lock.is_ours = is_ours

    def marked(self, schema: pa.Schema) -> pa.Schema:
        """Give the schema of a part that belongs to what was begun here."""
        return marked(schema, self._output_id)

    def begin_work(self) -> None:
        """Take back ``_SUCCESS`` before rows are added or removed."""
        remove_durably(self.path, SUCCESS)

    def finished_rows(self, id_type: pa.DataType, *, verify: bool = False) -> FinishedRows:
        """Read which rows are done; a part that turns out to be damaged is set aside.

        Of equal copies of a row, as two runs at a time leave them, one is kept.

        Args:
            id_type: Arrow type of the ids.
            verify: read all of every part, not only what tells which rows are done.

        Raises:
            UsageError: a row has two different results, or ids are of another type.
            OutputError: the parts cannot be read.
        """
        try:
            if verify:
                self._set_damaged_aside()
            while True:
                try:
                    return FinishedRows.read(self.parts, id_type, self._output_id)
                except DamagedPartError as damage:
                    set_aside(self.path, damage)
                except RepeatedRowsError as repeated:
                    drop_equal_copies(self.path, repeated.row_indices)
        except OSError as error:
            raise OutputError.at(self.path, error) from error

    def _set_damaged_aside(self) -> None:
        for part in self.parts:
            try:
                check_part(part)
            except DamagedPartError as damage:
                set_aside(self.path, damage)

    def discard_errors(self) -> int:
        """Remove the output rows of failed input rows, so that they are run again.

        Returns:
            rows removed.

        Raises:
            OutputError: the disk does not take the change.
        """
        with self._damage_set_aside():
            return discard_rows(self.path, lambda table: pc.equal(table.column("status"), "error"))

    def discard_ids(self, ids: pa.Array) -> int:
        """Remove all output rows of some ids, as of rows with only some of their samples.

        Returns:
            rows removed.

        Raises:
            OutputError: the disk does not take the change.
        """
        with self._damage_set_aside():
            return discard_rows(
                self.path, lambda table: pc.is_in(table.column("id"), value_set=ids)
            )

    def write_empty_part_if_none(self, schema: pa.Schema) -> None:
        """Make sure that the directory is a valid table, even without any row.

        Raises:
            OutputError: the part could not be written.
        """
        if not self.parts:
            write_part(self.path / part_name(0), self.marked(schema).empty_table())

    def sort_by_input(self, rows_per_part: int | None = None) -> bool:
        """Bring the parts into input order (see ``sort_parts``).

        Returns:
            whether anything had to be moved.

        Raises:
            OutputError: the disk does not take the change.
        """
        with self._damage_set_aside():
            return sort_parts(self.path, PartLimits.of(rows_per_part))

    def rewrite(self, change: Callable[[pa.Table], pa.Table]) -> None:
        """Change columns of all parts (see ``rewrite_parts``).

        Raises:
            OutputError: the disk does not take the change.
        """
        with self._damage_set_aside():
            rewrite_parts(self.path, change)

    def write_errors(self, source: InputSource, row_indices: npt.NDArray[np.int64]) -> None:
        """Write the failed input rows to ``_errors`` (see ``write_failed_rows``).

        Raises:
            OutputError: they could not be written, or no longer be read.
        """
        try:
            write_failed_rows(source, row_indices, self.path / ERRORS)
        except UsageError as error:
            raise OutputError(
                f"{error}; so the failed input rows could not be copied to {self.path / ERRORS}. "
                "All finished rows are kept: put the input back as it was and run the same "
                "command again"
            ) from error

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file whole: ``_summary.json``, ``_plan.json``.

        Raises:
            OutputError: it could not be written.
        """
        write_json_durably(self.path / name, content)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file whole: ``_report.html``.

        Raises:
            OutputError: it could not be written.
        """
        write_text_durably(self.path / name, text)

    def mark_success(self) -> None:
        """Write ``_SUCCESS``: every row is done. The last thing a run does.

        Raises:
            OutputError: it could not be written.
        """
        try:
            sweep_strays(self.path)
        except OSError as error:
            raise OutputError.at(self.path, error) from error
        write_text_durably(self.path / SUCCESS, "")
        self._store.drop_scratch(self.path)

    def withhold_success(self) -> None:
        """Leave no ``_SUCCESS``, since too many rows failed although every row is done.

        Raises:
            OutputError: the disk does not take it.
        """
        try:
            sweep_strays(self.path)
        except OSError as error:
            raise OutputError.at(self.path, error) from error
        remove_durably(self.path, SUCCESS)

    def _refuse_links(self) -> None:
        """Refuse symbolic links in the place of our own files: what they lead to is not ours.

        Raises:
            UsageError: naming the link.
        """
        if not isinstance(self.path, Path):
            return
        for name in (LOCK, SUCCESS, *_RESULT_NAMES):
            if (self.path / name).is_symlink():
                raise UsageError(
                    f"output.dir: {self.path / name} is a symbolic link, which batchgen does not "
                    "follow; remove it, or choose another output.dir"
                )

    def _refuse_foreign(self) -> None:
        """Refuse a directory whose readers would see, or whose owner keeps, other things.

        Names beginning with ``_`` or ``.`` are no reader's business and never foreign.
        """
        there = sorted(self._store.entries(self.path), key=lambda entry: str(entry.name))
        visible = [entry for entry in there if not entry.name.startswith(("_", "."))]
        foreign = [entry for entry in visible if part_number(entry.name) is None]
        mixing = [entry for entry in foreign if self._is_read_as_data(entry)]
        if mixing:
            raise UsageError(
                f"output.dir={self.path} holds {_names(mixing)}, which would be read together "
                "with the output; choose another output.dir"
            )
        is_ours = self._overwrite or self._store.exists(self.path / MANIFEST)
        if visible and not is_ours:
            raise UsageError(
                f"output.dir={self.path} is not empty and not an output of batchgen (it holds "
                f"{_names(visible)} and no {MANIFEST}); choose another output.dir, or set "
                "output.overwrite=true to write there all the same"
            )

    def _is_read_as_data(self, entry: Place) -> bool:
        return PurePosixPath(entry.name).suffix == ".parquet" or self._store.is_directory(entry)

    def _clear(self) -> None:
        try:
            for path in (
                self.path / SUCCESS,
                *self.parts,
                *(self.path / name for name in _RESULT_NAMES),
            ):
                self._store.remove(path)
                failpoints.reached("clear.removed")
            # A power cut must not bring old parts back beside a new manifest.
            self._store.sync(self.path)
        except OSError as error:
            raise OutputError.at(self.path, error) from error

    @contextmanager
    def _damage_set_aside(self) -> Iterator[None]:
        """Set a part aside that turns out to be damaged, and say that a new run mends it."""
        try:
            yield
        except DamagedPartError as damage:
            set_aside(self.path, damage)
            raise OutputError(f"{damage}; the same command runs its rows again") from damage


def _names(entries: Sequence[Place]) -> str:
    shown = ", ".join(entry.name for entry in entries[:3])
    return f"{shown} and {len(entries) - 3} more" if len(entries) > 3 else shown
