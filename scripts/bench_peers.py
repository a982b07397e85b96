"""Engines of others, each run by the Python of an environment of its own.

A peer is a script `scripts/peers/run_NAME.py` that takes two files: a request (JSON: the
model, token ids and how many tokens to make for each row) and where to write its answer (JSON:
the tokens, the seconds from ids to text without loading, its version, its peak memory). It
imports nothing of this project.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_engines import Measurement, prompts_of
from job_rows import JobRows

from batchgen.config import Config
from batchgen.errors import EngineError, UsageError
from batchgen.runtime.model import resolve_device

PEERS_DIR = Path(__file__).resolve().parent / "peers"


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

    def run(self, rows: JobRows, config: Config) -> Measurement:
        """Run all rows once; the peer loads the model each time, which is not measured.

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
        answer = self._ask(request)
        outputs = dict(
            zip((prompt.row_index for prompt in prompts), answer["outputs"], strict=True)
        )
        return Measurement(
            outputs=outputs,
            seconds=answer["seconds"],
            version=answer["version"],
            peak_memory_bytes=answer["peak_memory_bytes"],
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        # Its environment must not see ours.
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        with tempfile.TemporaryDirectory(prefix="batchgen-peer-") as folder:
            asked, answered = Path(folder) / "request.json", Path(folder) / "answer.json"
            asked.write_text(json.dumps(request), encoding="utf-8")
            command = [self.python, str(self.script), str(asked), str(answered)]
            try:
                # What it says of itself must not come between the results.
                subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
                answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
            except (OSError, subprocess.CalledProcessError, ValueError) as error:
                raise EngineError(f"the peer {self.name} failed: {error}") from error
        return answer
