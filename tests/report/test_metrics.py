"""The metrics file holds whole lines, at most one for each interval."""

import json
from itertools import pairwise
from pathlib import Path

from batchgen.report.metrics import MetricsLog


def test_samples_are_lines_a_second_apart_and_taken_only_when_written(tmp_path: Path) -> None:
    now = [0.0]
    taken: list[float] = []

    def take() -> dict[str, float]:
        taken.append(now[0])
        return {"pool": now[0]}

    with MetricsLog(tmp_path / "m.jsonl", clock=lambda: now[0]) as log:
        for tick in range(30):
            now[0] = tick / 10
            log.sample(take)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["pool"] for line in lines] == taken == [0.0, 1.0, 2.0]


def test_a_torn_line_of_a_killed_run_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"pool": 1}\n{"po')
    with MetricsLog(path) as log:
        log.sample(lambda: {"pool": 2})
    assert json.loads(path.read_text().splitlines()[-1])["pool"] == 2


def test_a_long_run_keeps_a_series_over_all_of_it_in_a_bounded_file(tmp_path: Path) -> None:
    path, now = tmp_path / "m.jsonl", [0.0]
    with MetricsLog(path, most_lines=64, clock=lambda: now[0]) as log:
        for second in range(5000):
            now[0] = float(second)
            log.sample(lambda: {"at": now[0]})
            assert path.read_bytes().count(b"\n") <= 64
    at = [json.loads(line)["at"] for line in path.read_text().splitlines()]
    assert at == sorted(set(at))
    assert len(at) > 32
    assert at[0] < 200
    assert at[-1] > 4800
    gaps = [after - before for before, after in pairwise(at)]
    assert max(gaps) <= 256
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_runs_that_go_on_share_the_bound(tmp_path: Path) -> None:
    path, now = tmp_path / "m.jsonl", [0.0]
    for run in range(20):
        with MetricsLog(path, most_lines=32, clock=lambda: now[0]) as log:
            for _ in range(10):
                now[0] += 1.0
                log.sample(lambda run=run: {"run": run})
    runs = [json.loads(line)["run"] for line in path.read_text().splitlines()]
    assert len(runs) <= 32
    assert runs == sorted(runs)
    assert runs[-1] == 19
