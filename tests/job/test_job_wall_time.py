"""A run with `budget.wall_time_s` ends in time, with whole rows, and is gone on with."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from batchgen.job.stops.drain import Drain
from batchgen.job.stops.wall_time import WallTime
from batchgen.runtime.executor import ModelExecutor
from batchgen.sampling import SamplingParams
from tests.job.harness import Job
from tests.support.drive import make_engine_over_fake, make_requests, make_scheduler

ROWS = [{"id": n, "prompt": f"The quick brown fox {n % 9} jumps {n}"} for n in range(40)]


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let every step take some seconds of a clock that nothing else moves."""

    def arm(seconds: float) -> None:
        clock, real = Clock(), ModelExecutor.execute

        def execute(self: ModelExecutor, plan: Any) -> Any:
            clock.now += seconds
            return real(self, plan)

        monkeypatch.setattr(ModelExecutor, "execute", execute)
        monkeypatch.setattr("batchgen.run.WallTime", partial(WallTime, clock=clock))

    return arm


def test_rows_that_run_are_brought_to_their_end_and_the_others_are_left(
    job: Job, slow_steps: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(ROWS)
    job.given |= {"pool.prefix_caching": "false", "sampling.ignore_eos": "true"}
    assert job("output.dir=" + str(job.folder / "whole")) == 0
    slow_steps(12)
    capsys.readouterr()
    assert job("budget.wall_time_s=600", "engine.max_num_seqs=4") == 75
    said = capsys.readouterr().err
    assert "budget.wall_time_s=600 is near: no row starts any more, 4 that run" in said
    kept = len(job.rows())
    assert f"stopped by budget.wall_time_s=600; {40 - kept} of 40 rows are left" in said
    # Four at a time: no row that had begun was given up.
    assert kept % 4 == 0
    assert 0 < kept < 40
    assert not (job.out / "_SUCCESS").exists()
    slow_steps(0)
    assert job() == 0
    assert job.summary["engine_figures_cover"] == {"rows": 40 - kept, "of_rows": 40}
    resumed = job.results()
    job.out = job.folder / "whole"
    assert resumed == job.results()


def test_rows_that_would_take_too_long_are_given_up_in_time(
    job: Job, slow_steps: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(ROWS[:3])
    job.given |= {"sampling.max_tokens": "200", "sampling.ignore_eos": "true"}
    slow_steps(12)
    assert job("budget.wall_time_s=600") == 75
    assert "3 of 3 rows are left" in capsys.readouterr().err
    assert job.parts == []


def test_time_that_is_over_before_the_engine_starts_ends_the_run_there(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(ROWS)
    monkeypatch.setattr("batchgen.run.load_job_model", lambda config: time.sleep(60))
    begun = time.monotonic()
    assert job("budget.wall_time_s=1") == 75
    assert time.monotonic() - begun < 50
    said = capsys.readouterr().err
    assert "stopped by budget.wall_time_s=1; no row was finished: " in said
    assert "the phase load took 0." in said
    assert "would end here again: set budget.wall_time_s=60 or more" in said
    monkeypatch.undo()
    assert job("budget.wall_time_s=600") == 0


def test_time_that_is_over_when_every_row_has_ended_stops_nothing(job: Job) -> None:
    job.write(ROWS[:4])
    # So much is kept back for the last part that no row may start once one has ended.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WallTime, "should_drain", lambda self, write_s: True)
        assert job("budget.wall_time_s=600", "pool.prefix_caching=false") == 0
    assert len(job.rows()) == 4


def test_the_time_to_drain_is_what_a_usual_row_takes() -> None:
    clock = Clock()
    wall_time = WallTime(100, clock)
    wall_time.begin_steps()
    for _ in range(10):
        clock.now += 0.5
        wall_time.note_step()
    assert not wall_time.should_drain(0)
    for _ in range(20):
        wall_time.note_output(60)
    # 5 s are kept back; 60 tokens are 60 steps of half a second.
    clock.now = 100 + 95 - 31
    assert not wall_time.should_drain(0)
    clock.now = 100 + 95 - 29
    assert wall_time.should_drain(0)
    assert not wall_time.is_over(0)
    assert wall_time.is_over(28.8)
    clock.now = 100 + 95 - 0.4
    assert wall_time.is_over(0)


@pytest.mark.parametrize(("limit_s", "kept_back_s"), [(10, 0.5), (3600, 10), (36_000, 10)])
def test_some_of_the_time_is_kept_back_for_the_end(limit_s: float, kept_back_s: float) -> None:
    clock = Clock()
    assert WallTime(limit_s, clock).stop_after_s == pytest.approx(limit_s - kept_back_s)


def test_without_a_limit_it_is_never_time() -> None:
    clock = Clock()
    wall_time = WallTime(None, clock)
    wall_time.note_output(1_000_000)
    clock.now += 1e9
    wall_time.note_step()
    assert wall_time.stop_after_s is None
    assert not wall_time.should_drain(1e9)
    assert not wall_time.is_over(1e9)


@pytest.mark.parametrize("at", range(0, 14, 3))
def test_a_drained_engine_ends_all_that_began_and_begins_nothing(at: int) -> None:
    # Two blocks for two rows of which one must make room for the other.
    scheduler = make_scheduler(6, 4, max_num_seqs=3, prefix_caching=False)
    engine, _ = make_engine_over_fake(scheduler)
    requests = make_requests([[n, n + 1, n + 2] for n in range(9)], SamplingParams(max_tokens=9))
    drain = Drain(iter(requests))
    ended: list[int] = []
    begun: set[int] = set()
    for number, finished in enumerate(engine.run(drain.requests())):
        ended += [request.request_id for request in finished]
        if number == at:
            drain.close(scheduler)
            begun = {r.request_id for r in requests if r.timeline.admitted is not None}
            assert scheduler.num_unfinished == len(begun) - len(ended)
    assert set(ended) == begun
    assert len(ended) == len(begun) < 9
    assert scheduler.blocks.pool.num_owned == 0
