"""A warm process that runs of the command are forked from, to be killed by the hundred.

Starting one the usual way takes seconds, all of them imports. Here a child process imports
everything and loads tokenizer and weights once; a run is a fork of it.
"""

import contextlib
import errno
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
NO_LOCKS = {"TEST_NO_LOCKS": "1"}
"""Of a run's environment: the file system knows no locks."""
_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class CommandServer:
    """Starts runs; they end with it. Threads can share it.

    Args:
        model: the folder of the model that every run uses.
        prepare: ``module:function``, called once before any run.
    """

    def __init__(self, model: Path, prepare: str | None = None) -> None:
        command = [sys.executable, "-m", "tests.support.command_server", str(model)]
        command += [prepare] if prepare else []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | _ENV,
        )
        self._lock = threading.Lock()
        assert self._receive() == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def start(
        self, given: Mapping[str, str], log: Path, environment: Mapping[str, str] | None = None
    ) -> "Run":
        """Start a run of the command.

        Args:
            given: its ``key=value`` arguments.
            log: gets what it writes to its standard output and error; begun anew.
            environment: added to the run's environment.
        """
        log.unlink(missing_ok=True)
        order = {"given": dict(given), "log": str(log), "env": dict(environment or {})}
        return Run(self, int(self.ask(order)), log)

    def ask(self, order: Mapping[str, Any]) -> Any:
        """Send an order to the warm process and give its answer."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the warm process has ended"
        return json.loads(line)


class Run:
    """A run of the command in a process of its own."""

    def __init__(self, command_server: CommandServer, pid: int, log: Path) -> None:
        self.pid = pid
        self._code: int | None = None
        self._command_server = command_server
        self._log = log

    @property
    def said(self) -> str:
        """All that it has written so far."""
        return self._log.read_text() if self._log.exists() else ""

    def wait(self, timeout_s: float = 60.0) -> int | None:
        """Wait for its end: the exit code, minus the signal, or None if it still runs."""
        if self._code is None:
            # It is there, and its number is its own, until it has been looked at.
            descriptor = os.pidfd_open(self.pid)
            try:
                select.select([descriptor], [], [], timeout_s)
            finally:
                os.close(descriptor)
            self._code = self._command_server.ask({"look_at": self.pid})
        return self._code

    def wait_until_stopped(self) -> bool:
        """Wait until a signal has stopped it; False where it has ended instead."""
        status = Path(f"/proc/{self.pid}/stat")
        while self.wait(0.005) is None:
            if status.read_text().rpartition(")")[2].split()[0] == "T":
                return True
        return False

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> int | None:
        """Kill it as ``kill -9`` does; the exit code, its own where it had ended already."""
        self.send(signal.SIGKILL)
        return self.wait()


def _serve(model: str, prepare: str = "") -> None:
    _warm_up(model)
    if prepare:
        module, _, function = prepare.partition(":")
        getattr(importlib.import_module(module), function)()
    ended: dict[int, int] = {}
    children: set[int] = set()
    _answer("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if "look_at" in order:
            _answer(_look_at(order["look_at"], ended))
            continue
        pid = os.fork()
        if pid == 0:
            _run(order)
        children.add(pid)
        _answer(pid)
    for pid in children - ended.keys():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _answer(content: Any) -> None:
    print(json.dumps(content), flush=True)


def _look_at(pid: int, ended: dict[int, int]) -> int | None:
    """Return the exit code of a child, or None while it runs."""
    if pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended.get(pid)


def _warm_up(model: str) -> None:
    """Import all that a run imports; load what it loads, once for all of them."""
    import numpy.ma  # noqa: F401
    import torch
    from tqdm import tqdm
    from transformers.models.llama import modeling_llama  # noqa: F401

    import batchgen.run
    from batchgen.cli import app
    from batchgen.job import front
    from batchgen.keys import declared_keys
    from batchgen.report.machine import versions
    from batchgen.report.page import page_template
    from batchgen.runtime.model import ModelSource, load_model

    torch.set_num_threads(1)
    # By default a lock between processes, whose name a kill would leave behind.
    tqdm.set_lock(threading.RLock())
    source, cpu = ModelSource(model), torch.device("cpu")
    loaded = load_model(source, dtype="auto", device=cpu, max_model_len=None)
    batchgen.run.load_job_model = lambda config: loaded
    config = front.load_config(source)
    front.load_config = lambda source: config
    front.load_tokenizer = functools.cache(front.load_tokenizer)
    front.load_tokenizer(model, revision=None, trust_remote_code=False)
    app.store_jobs = lambda folder, names: None
    # What is made once a process, from the code alone.
    versions()
    declared_keys()
    page_template()
    # A collection in a run would copy every page that holds an object.
    gc.disable()
    gc.freeze()


def _refuse_lock(descriptor: int, how: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _run(order: Mapping[str, Any]) -> None:
    from tests.support.killed_job import composed, run_composed

    descriptor = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(order["env"])
    if order["env"].items() >= NO_LOCKS.items():
        fcntl.flock = _refuse_lock
    # What the warm process found may not be what the run is told.
    tempfile.tempdir = None
    code = 1
    try:
        code = run_composed(composed(order["given"]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
