"""Writing results beside the device: a thread, a bounded queue, one part after another."""

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import pyarrow as pa

from batchgen.data.output.carry import CarriedRows
from batchgen.data.output.files import OutputError
from batchgen.data.output.parts import next_part_number, write_part
from batchgen.data.output.schema import RowResult, to_table
from batchgen.data.stores.names import part_name
from batchgen.data.stores.store import Place

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartLimits:
    """When a part is full: whatever is reached first.

    Attributes:
        rows: rows in a part.
        size_bytes: Arrow bytes of the rows in a part; bounds the writer's memory.
        age_s: seconds since the first row of the part came; bounds what a crash loses.
    """

    rows: int = 10_000
    size_bytes: int = 64 << 20
    age_s: float = 30.0

    @classmethod
    def of(cls, rows_per_part: int | None) -> Self:
        """Give the limits for ``output.rows_per_part``; None is auto.

        A number means parts of exactly that many rows, however long they take to come
        (only 512 MiB end a part earlier).
        """
        if rows_per_part is None:
            return cls()
        return cls(rows=rows_per_part, size_bytes=512 << 20, age_s=float("inf"))


@dataclass(slots=True)
class WriterStats:
    """What the writer has done so far.

    Attributes:
        rows: rows in finished parts.
        parts: finished parts.
        size_bytes: bytes of finished parts.
        write_s: seconds the writer's thread spent on making and syncing parts.
        last_write_s: of them, those for the last part.
    """

    rows: int = 0
    parts: int = 0
    size_bytes: int = 0
    write_s: float = 0.0
    last_write_s: float = 0.0


@dataclass(slots=True)
class _Flush:
    done: threading.Event = field(default_factory=threading.Event)


class _Close:
    pass


class PartWriter:
    """Writes rows into part files in a thread of its own.

    A row is safe once its part has its name; :meth:`flush` makes all rows so far safe.
    Leaving the context commits what is pending, also on the way of an exception: those
    rows are finished work.

    Args:
        directory: the output directory, existing.
        schema: from ``output_schema``.
        rows_per_part: see :meth:`PartLimits.of`.
        limits: instead of ``rows_per_part``, all limits at once.
        carried: the input columns in the schema.
        queue_rows: rows that may wait; :meth:`put` blocks above it.
    """

    def __init__(
        self,
        directory: Place,
        schema: pa.Schema,
        *,
        rows_per_part: int | None = None,
        limits: PartLimits | None = None,
        carried: CarriedRows | None = None,
        queue_rows: int = 1024,
    ) -> None:
        self.stats = WriterStats()
        self._directory = directory
        self._schema = schema
        self._limits = limits or PartLimits.of(rows_per_part)
        self._carried = carried
        self._carried_bytes = carried.row_bytes if carried is not None else 0
        self._queue: queue.Queue[RowResult | _Flush | _Close] = queue.Queue(queue_rows)
        self._next_number = next_part_number(directory)
        self._pending: list[RowResult] = []
        self._pending_bytes = 0
        self._deadline = float("inf")
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="batchgen-writer", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Rows that have come and are in no part yet, about."""
        return self._queue.qsize() + len(self._pending)

    def put(self, row: RowResult) -> None:
        """Hand over a row; blocks while the queue is full.

        Raises:
            OutputError: the thread could not write an earlier row.
        """
        self._raise_failure()
        self._queue.put(row)

    def flush(self) -> None:
        """Commit all rows so far and wait for it.

        Raises:
            OutputError: they could not be written.
        """
        if self._thread.is_alive():
            request = _Flush()
            self._queue.put(request)
            request.done.wait()
        self._raise_failure()

    def write_empty(self) -> None:
        """Write a part without rows, so that a directory without results is a valid table.

        Raises:
            OutputError: it could not be written.
        """
        self.flush()
        self._write(self._schema.empty_table())

    def close(self) -> None:
        """Commit what is pending and end the thread.

        Raises:
            OutputError: rows could not be written.
        """
        if self._thread.is_alive():
            self._queue.put(_Close())
            self._thread.join()
        self._raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except OutputError as failure:
            # The exception on its way out says why the run ends; it must not be replaced.
            if error is None:
                raise
            if error is not failure:
                logger.error("%s", failure)

    def _raise_failure(self) -> None:
        if isinstance(self._failure, OutputError):
            raise self._failure
        if self._failure is not None:
            raise OutputError.at(self._directory, self._failure) from self._failure

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._wait_s())
            except queue.Empty:
                self._attempt_commit()
                continue
            if isinstance(item, RowResult):
                self._accept(item)
                continue
            self._attempt_commit()
            if isinstance(item, _Close):
                return
            item.done.set()

    def _wait_s(self) -> float | None:
        if not self._pending or self._limits.age_s == float("inf"):
            return None
        return max(0.0, self._deadline - time.monotonic())

    def _accept(self, row: RowResult) -> None:
        # After a failure rows are taken and dropped, so that no put waits for ever; they
        # are not in any part, so a resumed run makes them again.
        if self._failure is not None:
            return
        if not self._pending:
            self._deadline = time.monotonic() + self._limits.age_s
        self._pending.append(row)
        self._pending_bytes += row.size_bytes + self._carried_bytes
        if (
            len(self._pending) >= self._limits.rows
            or self._pending_bytes >= self._limits.size_bytes
            or time.monotonic() >= self._deadline
        ):
            self._attempt_commit()

    def _attempt_commit(self) -> None:
        rows, self._pending, self._pending_bytes = self._pending, [], 0
        if not rows or self._failure is not None:
            return
        try:
            start = time.perf_counter()
            self._write(to_table(rows, self._schema, carried=self._carried))
            self.stats.last_write_s = time.perf_counter() - start
            self.stats.write_s += self.stats.last_write_s
        except Exception as error:
            # Handed to the thread that puts rows.
            self._failure = error

    def _write(self, table: pa.Table) -> None:
        path = self._directory / part_name(self._next_number)
        self.stats.size_bytes += write_part(path, table)
        self.stats.rows += len(table)
        self.stats.parts += 1
        self._next_number += 1
