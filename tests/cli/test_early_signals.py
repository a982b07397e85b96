"""A signal while the command imports and composes ends it with 75 and nothing started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Sends a signal to the process when a module is first looked for, where an exception raised by a
# handler would be swallowed or turned into another one.
SITECUSTOMIZE = """
import os, sys

class Sender:
    sent = 0

    def find_spec(self, name, path=None, target=None):
        if name == os.environ["SEND_AT"] and not Sender.sent:
            Sender.sent = 1
            for number in os.environ["SEND"].split(","):
                os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Sender())
"""
PLACES = {
    "the command": "batchgen.cli",
    "Hydra": "hydra",
    "composing": "hydra._internal.hydra",
    "the job": "batchgen.run",
    "torch": "torch",
}


def start(
    folder: Path, place: str, *numbers: signal.Signals, arguments: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (folder / "in.parquet").touch()
    (folder / "config.json").write_text("{}")
    job = [f"model.path={folder}", f"input.path={folder}/in.parquet", f"output.dir={folder}/out"]
    sent = ",".join(str(int(number)) for number in numbers)
    return subprocess.run(
        [sys.executable, "-m", "batchgen", *(arguments or job)],
        env=os.environ
        | {
            "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "SEND_AT": place,
            "SEND": sent,
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("place", PLACES)
def test_t9_a_signal_during_imports_or_composing_ends_with_75_and_starts_nothing(
    tmp_path: Path, place: str
) -> None:
    done = start(tmp_path, PLACES[place], signal.SIGTERM)
    assert done.returncode == 75, done.stderr
    assert "batchgen: stopped by SIGTERM; run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_t9_ctrl_c_and_a_lost_terminal_do_the_same(tmp_path: Path, number: signal.Signals) -> None:
    done = start(tmp_path, "hydra", number)
    assert done.returncode == 75, done.stderr
    assert f"stopped by {number.name}" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("mode=jobs",), ("-m", "mode=plan", "input.limit=1,2"), ("--hydra-help",)],
)
def test_t9_so_do_the_help_a_sweep_and_what_runs_no_job(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = start(tmp_path, "hydra", signal.SIGTERM, arguments=arguments)
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr


def test_t9_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    done = start(tmp_path, "hydra", signal.SIGTERM, signal.SIGTERM)
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "")


def test_t9_an_ignored_sighup_stays_ignored_as_nohup_wants_it(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = start(tmp_path, "hydra", signal.SIGHUP, arguments=("--version",))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.returncode == 0, done.stderr
