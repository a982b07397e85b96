"""Engines of others, each run by the Python of an environment of its own.

A peer is a script `scripts/peers/run_NAME.py`, which imports nothing of this project. It is
started with a request (JSON: the model, token ids and how many tokens to make for each row),
gets ready, and then runs the rows whenever it is told where to write its answer (JSON: the
tokens, the seconds from ids to text, its version, its peak memory). Between its runs it is
stopped, so that it takes nothing from the others.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from job_rows import JobRows

from batchgen.config import Config
from batchgen.errors import EngineError, UsageError
from batchgen.runtime.model import resolve_device
from bench_parts.engines import Measurement, prompts_of

PEERS_DIR = Path(__file__).resolve().parents[1] / "peers"
LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer as it is named on the command line: ``NAME[:VARIANT]=PYTHON``.

    Attributes:
        name: with the variant, as results call it.
        python: the interpreter that can import it.
        script: what that runs.
        variant: one of the script's own; empty is its default.
    """

    name: str
    python: str
    script: Path
    variant: str

    @classmethod
    def parse(cls, text: str, directory: Path = PEERS_DIR) -> "Peer":
        """Read a peer from the command line.

        Raises:
            UsageError: the form is another, or there is no such peer.
        """
        name, equals, python = text.partition("=")
        base, _, variant = name.partition(":")
        script = directory / f"run_{base}.py"
        if not equals or not python or not script.is_file():
            known = sorted(path.stem.removeprefix("run_") for path in directory.glob("run_*.py"))
            raise UsageError(
                f"--peer {text}: give NAME=PYTHON or NAME:VARIANT=PYTHON, where NAME is one of "
                f"{', '.join(known)} and PYTHON the interpreter of the environment it is in"
            )
        return cls(name, python, script, variant)

    def start(self, rows: JobRows, config: Config) -> "RunningPeer":
        """Start it and wait until it is ready; use what comes in a ``with`` statement.

        Raises:
            EngineError: it failed; it has said why.
        """
        prompts = prompts_of(rows)
        request = {
            "model": config.model.path,
            "dtype": config.model.dtype,
            "device": resolve_device(config.model.device).type,
            "threads": torch.get_num_threads(),
            "variant": self.variant,
            "prompts": [prompt.token_ids for prompt in prompts],
            "max_tokens": [prompt.max_tokens for prompt in prompts],
        }
        return RunningPeer(self, request, [prompt.row_index for prompt in prompts])


class RunningPeer:
    """A peer that is ready and stopped.

    Args:
        peer: what to start.
        request: what it is to run.
        row_indices: of the request's rows, positions in the input.

    Raises:
        EngineError: it failed; it has said why.
    """

    def __init__(self, peer: Peer, request: dict[str, Any], row_indices: list[int]) -> None:
        self._name = peer.name
        self._row_indices = row_indices
        self._folder = tempfile.TemporaryDirectory(prefix="batchgen-peer-")
        asked, ready = (Path(self._folder.name) / name for name in ("request", "ready"))
        asked.write_text(json.dumps(request), encoding="utf-8")
        # Its environment must not see ours.
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        try:
            self._process = subprocess.Popen(
                [peer.python, str(peer.script), str(asked), str(ready)],
                env={name: value for name, value in os.environ.items() if name not in hidden},
                stdin=subprocess.PIPE,
                # What it says of itself must not come between the results.
                stdout=sys.stderr,
                start_new_session=True,
                text=True,
            )
        except OSError as error:
            self._folder.cleanup()
            raise EngineError(f"the peer {self._name} cannot be started: {error}") from error
        try:
            self._wait_for(ready)
        except EngineError:
            self.close()
            raise
        self._stop()

    def run(self) -> Measurement:
        """Run all rows once.

        Raises:
            EngineError: it failed; it has said why.
        """
        answered = Path(self._folder.name) / "answer"
        answered.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(f"{answered}\n")
        self._process.stdin.flush()
        answer = self._wait_for(answered)
        self._stop()
        return Measurement(
            outputs=dict(zip(self._row_indices, answer["outputs"], strict=True)),
            seconds=answer["seconds"],
            version=answer["version"],
            peak_memory_bytes=answer["peak_memory_bytes"],
        )

    def close(self) -> None:
        """End it and whatever it has started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._folder.cleanup()

    def __enter__(self) -> "RunningPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        self._signal(signal.SIGSTOP)
        # It stands still only when the kernel says so.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _wait_for(self, path: Path) -> Any:
        while not path.exists():
            if self._process.poll() is not None:
                code = self._process.returncode
                raise EngineError(f"the peer {self._name} failed: it ended with exit code {code}")
            time.sleep(LOOK_EVERY_S)
        return json.loads(path.read_text(encoding="utf-8"))
