"""The whole command in tests: keys in, exit code and files out."""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from tests.support.killed_job import composed, run_composed

DEADLINE_S = 60


class Job:
    """An input, a model and an output directory, and the command over them.

    Called with ``key=value`` arguments it runs in this process and gives the exit code.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.input = folder / "input.parquet"
        self.out = folder / "out"
        self.given = {
            "model.path": str(model),
            "input.path": str(self.input),
            "output.dir": str(self.out),
            "sampling.max_tokens": "8",
            "pool.num_blocks": "512",
            "pool.swap_blocks": "64",
        }

    def write(self, rows: Sequence[dict[str, Any]] | pa.Table) -> None:
        """Write the input."""
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows))
        pq.write_table(table, self.input)

    def values(self, *arguments: str) -> dict[str, Any]:
        """The composed values of a command; later arguments win."""
        return composed(self.given | dict(each.split("=", 1) for each in arguments))

    def __call__(self, *arguments: str) -> int:
        return run_composed(self.values(*arguments))

    def start(
        self,
        *arguments: str,
        before: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> "Child":
        """Start the command in a process of its own.

        Args:
            arguments: as of a call.
            before: called in that process first.
            environment: added to that process's environment.
            log: gets what it says.
        """
        log = log or self.folder / "log.txt"
        return Child(self.values(*arguments), log, before, dict(environment or {}))

    @property
    def parts(self) -> list[Path]:
        return sorted(self.out.glob("part-*.parquet"))

    def rows(self, columns: str = "*") -> list[dict[str, Any]]:
        """The output as DuckDB reads it, in input order."""
        table = f"read_parquet('{self.out}/*.parquet')"
        query = f"SELECT {columns} FROM {table} ORDER BY row_index, sample_index"
        return duckdb.sql(query).to_arrow_table().to_pylist()

    def results(self) -> list[tuple[Any, ...]]:
        """What must not depend on how the rows were run."""
        names = "id, row_index, sample_index, status, generated_text, output_token_ids, "
        names += "finish_reason, stop_reason, error_type"
        return [tuple(str(value) for value in row.values()) for row in self.rows(names)]

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.out / name).read_text())

    @property
    def summary(self) -> dict[str, Any]:
        return self.json("_summary.json")


class Child:
    """A command that runs in a process forked from one with all imports done."""

    def __init__(
        self,
        values: dict[str, Any],
        log: Path,
        before: Callable[[], None] | None,
        environment: dict[str, str],
    ) -> None:
        self.log = log
        log.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        given = (values, log, before, environment)
        self._process = context.Process(target=_child, args=given, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def said(self) -> str:
        """All it has written to its standard output and error so far."""
        return self.log.read_text() if self.log.exists() else ""

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, while the process lives."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert self._process.is_alive(), self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.002)

    def wait(self, timeout_s: float = DEADLINE_S) -> int | None:
        """Wait for its end; the exit code (minus the signal), None where it still runs."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> int | None:
        """Kill it as ``kill -9`` does; the exit code, its own where it had ended already."""
        self._process.kill()
        return self.wait()

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)


def _child(
    values: dict[str, Any],
    log: Path,
    before: Callable[[], None] | None,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    # By default a lock between processes, whose name a kill would leave behind.
    tqdm.set_lock(threading.RLock())
    if before is not None:
        before()
    sys.exit(run_composed(values))
