"""The long run drives the whole command, checks its output and watches what it holds."""

import json

import pyarrow.parquet as pq
import pytest

from tests.stress.long_run import Sample, Watch, check_output, describe, draw, moments, run


def sample(rows: int, anonymous: int, handles: int, phase: str = "generate") -> Sample:
    return Sample(float(rows), phase, rows, 2 * anonymous, anonymous, handles, 9)


def test_a_small_run_is_watched_to_its_end(tmp_path) -> None:
    watch = Watch()
    assert run(tmp_path, 600, watch, ["log.every_s=0.001", "output.rows_per_part=100"]) == 0
    check_output(tmp_path, 600)
    assert watch.phase == "write"
    assert watch.rows == 600
    assert all(each.handles > 2 and each.anonymous_bytes > 1 << 20 for each in watch.samples)
    summary = json.loads((tmp_path / "out" / "_summary.json").read_text())
    assert (summary["ok"], summary["generated_tokens"]) == (600, 2400)


def test_an_output_with_a_row_too_few_or_twice_is_told(tmp_path) -> None:
    watch = Watch()
    assert run(tmp_path, 40, watch, ["output.rows_per_part=10"]) == 0
    (part, *_) = sorted((tmp_path / "out").glob("part-*.parquet"))
    rows = pq.read_table(part)
    part.unlink()
    with pytest.raises(AssertionError, match="30 output rows for 40"):
        check_output(tmp_path, 40)
    pq.write_table(rows.slice(0, 9), part)
    pq.write_table(rows.slice(0, 1), part.with_name("part-00009-00000000.parquet"))
    with pytest.raises(AssertionError, match="twice"):
        check_output(tmp_path, 40)


def test_the_moments_are_medians_of_the_generate_phase(tmp_path) -> None:
    samples = [sample(0, 5, 3, "plan"), *(sample(n, 100 + n, 9) for n in range(1, 101))]
    samples += [sample(100, 1, 3, "write")]
    found = moments(samples, 100)
    assert list(found) == ["start", "middle", "end"]
    assert [each.anonymous_bytes for each in found.values()] == [110, 150, 195]
    assert "9 handles" in describe("end", found["end"])
    draw(samples, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    with pytest.raises(AssertionError, match="too short"):
        moments(samples[:1], 100)
