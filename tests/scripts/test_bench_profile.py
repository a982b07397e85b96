"""The profile counts each second once, and knows the functions it times."""

import sys

import profile_step
import pytest
from profile_step import LINEAR, MODEL, SCOPES, VOCABULARY, MissingError, Timer

from tests.scripts.bench_job import make_job


@pytest.mark.parametrize("place", [place for places in SCOPES.values() for place in places])
def test_every_timed_function_is_there(place):
    holder, name = profile_step._find(place)
    assert callable(getattr(holder, name))


def test_a_function_that_is_gone_is_named():
    with pytest.raises(MissingError, match=r"engine\.scheduler:Scheduler\.gone"):
        profile_step._find("batchgen.engine.scheduler:Scheduler.gone")


def test_time_inside_another_label_is_not_counted_twice(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(profile_step.time, "perf_counter", lambda: now[0])
    timer = Timer(lambda: None, vocab_size=199)

    def inner():
        now[0] += 5

    def outer():
        now[0] += 1
        timer.wrap("inner", inner)()
        now[0] += 2

    timer.wrap("outer", outer)()
    now[0] += 100
    timer.wrap("inner", inner)()
    assert timer.seconds == {"outer": 3.0, "inner": 10.0}
    assert timer.calls == {"outer": 1, "inner": 2}


def test_a_generator_is_timed_as_it_is_used_up():
    timer = Timer(lambda: None, vocab_size=199)
    seen = []

    def numbers():
        seen.append(timer.innermost())
        yield from (1, 2)

    assert list(timer.wrap("numbers", numbers)()) == [1, 2]
    assert seen == ["numbers"]


def test_a_profile_of_a_job_names_all_parts_and_leaves_the_functions_as_they_were(tmp_path):
    places = [profile_step._find(place) for places in SCOPES.values() for place in places]
    before = [getattr(*place) for place in places]
    said = profile_step.profile(make_job(tmp_path))
    assert [getattr(*place) for place in places] == before
    for label in (LINEAR, VOCABULARY, MODEL, "attention: kernel", "scheduler", "sampling"):
        assert f"\n{label}  " in said
    steps = int(said.split(" steps in")[0].split()[-1])
    (linear,) = [line.split() for line in said.splitlines() if line.startswith(f"{LINEAR}  ")]
    # Query, key and value together, what follows attention, gate and up together, down: of
    # three layers.
    assert int(linear[5]) == 4 * 3 * steps


def test_the_command_profiles_a_workload(smollm2_dir, monkeypatch, capsys):
    arguments = ["--workload", "table", "--rows", "2", "--max-tokens", "2", "pool.num_blocks=200"]
    monkeypatch.setattr(sys, "argv", ["profile_step.py", *arguments])
    assert profile_step.main() == 0
    said = capsys.readouterr().out
    assert "2 rows" in said
    assert "GFLOP/s" in said
