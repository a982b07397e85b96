"""A run whose standard output and error nobody reads ends as any other, and can be stopped."""

import os
import pty
import signal
import termios
import time
from collections.abc import Callable

import pytest

from batchgen.runtime.executor import ModelExecutor
from tests.job.harness import Job

ROWS = [{"id": n, "prompt": f"The quick brown fox {n}"} for n in range(12)]


@pytest.fixture
def small(job: Job) -> Job:
    job.write(ROWS)
    job.given |= {"engine.max_num_seqs": "4", "output.rows_per_part": "3", "log.every_s": "0.001"}
    job.given |= {"pool.prefix_caching": "false", "sampling.ignore_eos": "true"}
    return job


def full_pipe() -> None:
    """Let standard output and error be a pipe that is full and stays so."""
    _, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x")
    except BlockingIOError:
        os.set_blocking(writing, True)
    _say_to(writing)


def stopped_terminal() -> None:
    """Let them be a terminal on which somebody has pressed Ctrl-S."""
    _, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    _say_to(terminal)


def full_disk() -> None:
    """Let them be a log on a full disk."""
    _say_to(os.open("/dev/full", os.O_WRONLY))


def _say_to(descriptor: int) -> None:
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def full_pipe_and_a_step_that_hangs() -> None:
    """Let the eleventh step hang, too."""
    full_pipe()
    real = ModelExecutor.execute

    def execute(self, plan):  # type: ignore[no-untyped-def]
        if plan.step == 10:
            time.sleep(60)
        return real(self, plan)

    ModelExecutor.execute = execute  # type: ignore[method-assign]


@pytest.mark.parametrize("nowhere", [full_pipe, stopped_terminal, full_disk])
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_t8_a_run_that_nobody_reads_is_done_all_the_same(
    small: Job, nowhere: Callable[[], None], log_format: str
) -> None:
    child = small.start(f"log.format={log_format}", before=nowhere)
    assert child.wait() == 0
    assert len(small.rows()) == 12
    assert (small.out / "_SUCCESS").exists()


def test_t8_it_is_stopped_by_a_signal(small: Job) -> None:
    child = small.start("sampling.max_tokens=400", before=full_pipe)
    child.wait_until(lambda: bool(small.parts))
    child.send(signal.SIGTERM)
    assert child.wait() == 75
    assert 0 < len(small.rows()) < 12


def test_t8_it_is_ended_by_the_watchdog(small: Job) -> None:
    child = small.start("engine.stall_s=1", before=full_pipe_and_a_step_that_hangs)
    assert child.wait() == 4
    assert len(small.rows()) == 4
