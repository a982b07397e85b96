"""The metrics file holds whole lines, at most one for each interval."""

import json
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
