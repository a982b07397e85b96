"""A process that holds one engine, so that its memory is its own and others do not disturb it."""

import multiprocessing
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from job_rows import JobRows, compose_job, open_rows
from transformers.utils.logging import disable_progress_bar

from batchgen.errors import BatchgenError, EngineError
from batchgen.report.machine import peak_rss_bytes
from bench_parts.engines import Measurement

# Not "fork": the threads and the GPU context of this process would not survive it.
START_METHOD = "spawn"
# Rows run once before anything is timed: the first call of a kernel pays for its set-up.
WARM_UP_ROWS = 2


class Runner(Protocol):
    """Something that is loaded once and then runs rows."""

    def run(self, rows: JobRows) -> Any:
        """Run all rows and give what can be sent to another process."""


class Worker:
    """A running process with one engine; use it in a ``with`` statement.

    Args:
        name: of the engine, for messages.
        load: makes the engine in the new process; a function that can be pickled.
        arguments: the job's, as ``python -m batchgen`` takes them.

    Raises:
        BatchgenError: the engine could not be loaded.
    """

    def __init__(self, name: str, load: Callable[[], Runner], arguments: list[str]) -> None:
        self._name = name
        context = multiprocessing.get_context(START_METHOD)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, load, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def run(self) -> Any:
        """Run all rows and give what the engine gives.

        Raises:
            BatchgenError: the engine failed.
        """
        self._connection.send(True)
        return self._receive()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._connection.send(False)
        self._process.join()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError as error:
            raise EngineError(f"the engine {self._name} died; see above for why") from error
        if isinstance(answer, BatchgenError):
            raise answer
        return answer


def serve(connection: Connection, load: Callable[[], Runner], arguments: list[str]) -> None:
    """Load an engine, say that it is ready, and run it whenever the other end asks."""
    try:
        config = compose_job(arguments)
        disable_progress_bar()
        engine = load()
        with open_rows(config, WARM_UP_ROWS) as few:
            measure(engine, few)
        with open_rows(config) as rows:
            connection.send(None)
            while connection.recv():
                connection.send(measure(engine, rows))
    except BatchgenError as error:
        connection.send(error)
    except Exception:
        traceback.print_exc()
    finally:
        connection.close()


def measure(engine: Runner, rows: JobRows) -> Any:
    """Run an engine; to what it measured comes the most memory it held meanwhile."""
    _reset_peak_memory()
    measured = engine.run(rows)
    if isinstance(measured, Measurement):
        measured = replace(measured, peak_memory_bytes=_peak_memory_bytes())
    if torch.cuda.is_available():
        # Other engines share the card.
        torch.cuda.empty_cache()
    return measured


def _reset_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    # Linux forgets the high-water mark of the resident memory when told so.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_memory_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        peak = re.search(r"VmHWM:\s*(\d+) kB", status)
        if peak is not None:
            return int(peak[1]) * 1024
    return peak_rss_bytes()
