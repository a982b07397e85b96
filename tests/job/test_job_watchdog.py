"""A run that hangs ends by itself with its state told, and the same command goes on."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.core import EngineCore
from batchgen.errors import EngineError
from batchgen.job import generate as generate_module
from batchgen.job.stops.watchdog import Watchdog
from batchgen.runtime.executor import ModelExecutor
from tests.job.harness import Job

ROWS = [{"id": n, "prompt": f"The quick brown fox {n}"} for n in range(12)]


@pytest.fixture
def small(job: Job) -> Job:
    job.write(ROWS)
    job.given |= {
        "engine.max_num_seqs": "4",
        "output.rows_per_part": "3",
        "pool.prefix_caching": "false",
        "sampling.ignore_eos": "true",
    }
    return job


def hang_at(patch: pytest.MonkeyPatch, step: int, hang: Callable[[], object]) -> None:
    real = ModelExecutor.execute

    def execute(self: ModelExecutor, plan: Any) -> Any:
        if plan.step == step:
            hang()
        return real(self, plan)

    patch.setattr(ModelExecutor, "execute", execute)


def check_told(said: str, stall_s: float) -> None:
    assert f"no token was computed for engine.stall_s={stall_s:g} s" in said
    assert "4 running, 0 swapped, 4 waiting" in said
    assert "pool of 512 blocks of 16" in said
    # The oldest of the rows that run, by their ids.
    assert "sample 0: running, " in said
    assert "of 8 generated" in said
    assert "writer: 1 rows wait for their part, 1 parts are written" in said


def test_a_step_that_hangs_ends_the_run_with_4_and_the_same_command_goes_on(
    small: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        hang_at(patch, 10, lambda: time.sleep(60))
        assert small("engine.stall_s=1") == 4
    assert time.monotonic() - begun < 20
    check_told(capsys.readouterr().err, 1)
    assert len(small.rows()) == 4
    assert small() == 0
    assert small.summary["engine_figures_cover"] == {"rows": 8, "of_rows": 12}


def test_steps_that_compute_nothing_for_ever_end_the_run_too(
    small: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: EngineCore, requests: Any) -> Any:
        self.scheduler.add(next(iter(requests)))
        while True:
            time.sleep(0.01)
            yield []

    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "run", run)
        assert small("engine.stall_s=2") == 4
    assert "0 running, 0 swapped, 1 waiting" in capsys.readouterr().err
    assert small() == 0


def hang_beyond_python() -> None:
    """Let the child's main thread sleep in C, out of the reach of signals."""
    generate_module.Watchdog = lambda *given, **named: Watchdog(  # type: ignore[misc, assignment]
        *given, **named, grace_s=0.3
    )

    def sleep() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.CDLL(None).sleep(60)

    hang_at(pytest.MonkeyPatch(), 10, sleep)


def test_a_main_thread_out_of_reach_is_ended_and_its_finished_rows_are_kept(small: Job) -> None:
    child = small.start("engine.stall_s=1", before=hang_beyond_python)
    assert child.wait() == 4, child.said
    check_told(child.said, 1)
    assert "the main thread does not answer" in child.said
    assert len(small.rows()) == 4
    assert small() == 0
    assert len(small.rows()) == 12


def test_time_in_which_the_process_stood_still_is_no_stall(small: Job) -> None:
    child = small.start(
        "engine.stall_s=1", environment={"BATCHGEN_FAILPOINT": "engine.step:stop:9"}
    )
    child.wait_until(lambda: "failpoint engine.step: stop" in child.said)
    time.sleep(2.5)
    child.send(signal.SIGCONT)
    assert child.wait() == 0, child.said
    assert len(small.rows()) == 12


def test_sigusr1_tells_the_state_and_stops_nothing(
    small: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        hang_at(patch, 10, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        assert small() == 0
    said = capsys.readouterr().err
    assert "state after 11 steps: 4 running, 0 swapped, 4 waiting" in said
    assert said.count("sample 0: running") == 4
    assert len(small.rows()) == 12


def test_sigusr1_outside_the_engine_tells_where_the_process_is(
    small: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import batchgen.run

    real = batchgen.run.load_job_model

    def load_with_a_signal(config: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return real(config)

    monkeypatch.setattr("batchgen.run.load_job_model", load_with_a_signal)
    assert small() == 0
    said = capsys.readouterr().err
    assert "state: the engine does not run; the process is at" in said
    assert "in load_with_a_signal" in said


class Alarm:
    """Takes what a watchdog does."""

    def __init__(self) -> None:
        self.tokens = 0
        self.said: list[str] = []
        self.failures: list[Exception] = []
        self.rescued = threading.Event()
        self.codes: list[int] = []
        self.ended = threading.Event()

    def watch(
        self, describe: Callable[[], str] = lambda: "the state", *, stall_s: float = 0.2
    ) -> Watchdog:
        def end(code: int) -> None:
            self.codes.append(code)
            self.ended.set()

        return Watchdog(
            stall_s,
            progress=lambda: self.tokens,
            describe=describe,
            say=self.said.append,
            give_up=self.failures.append,
            rescue=self.rescued.set,
            grace_s=0.2,
            end=end,
        )


def test_a_run_that_computes_is_left_alone() -> None:
    alarm = Alarm()
    # Long before the time is over there is another token, on a busy machine too.
    with alarm.watch(stall_s=1.5):
        for _ in range(20):
            time.sleep(0.1)
            alarm.tokens += 1
    assert (alarm.said, alarm.failures, alarm.codes) == ([], [], [])


def test_a_main_thread_that_answers_is_not_ended() -> None:
    alarm = Alarm()
    with alarm.watch():
        while not alarm.failures:
            time.sleep(0.01)
    assert isinstance(alarm.failures[0], EngineError)
    assert "the state" in alarm.said[0]
    assert not alarm.ended.wait(0.5)
    assert alarm.codes == []


def test_one_that_does_not_is_ended_after_the_rescue_even_if_the_state_cannot_be_read() -> None:
    alarm = Alarm()

    def broken() -> str:
        raise RuntimeError("changed while it was read")

    with alarm.watch(broken):
        assert alarm.ended.wait(10)
    assert alarm.rescued.is_set()
    assert alarm.codes == [4]
    assert "its state cannot be read" in alarm.said[0]
