"""The scheduler's benchmark measures what it says: full steps of running rows."""

import sys

import bench_scheduler
import pytest


def test_both_phases_are_measured_with_all_rows_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[int] = []
    sound = bench_scheduler.Scheduler.update

    def update(self, output) -> None:
        sizes.append(self._in_flight.steps[0].plan.num_rows)
        sound(self, output)

    monkeypatch.setattr(bench_scheduler.Scheduler, "update", update)
    options = ["--rows", "24", "--shared-tokens", "40", "--own-tokens", "5", "--new-tokens", "40"]
    monkeypatch.setattr(sys, "argv", ["bench_scheduler.py", *options])
    bench_scheduler.main()
    steady, turnover = capsys.readouterr().out.splitlines()[1:]
    assert steady.startswith("all rows decode") and " 10 steps: median " in steady
    assert turnover.startswith("rows end and others start") and " 40 steps: median " in turnover
    # Ten steps of nothing but decoding rows, all of them.
    assert sizes[-60:].count(24) > 40
