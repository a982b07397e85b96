"""``python -m batchgen`` as scripts call it, in a process forked from one with all imports done."""

import multiprocessing
import subprocess
import sys
from collections.abc import Sequence

import torch

from batchgen.cli import app


def run_batchgen(command: Sequence[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
    """Stand in for :func:`subprocess.run`; wants the ``fork_server``."""
    assert list(command[:3]) == [sys.executable, "-m", "batchgen"]
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_main, args=(list(command[3:]),))
    process.start()
    process.join()
    assert process.exitcode is not None
    done = subprocess.CompletedProcess[bytes](command, process.exitcode)
    if check:
        done.check_returncode()
    return done


def _main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    sys.exit(app.main(arguments))
