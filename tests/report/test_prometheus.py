"""The file of metrics, as prometheus_client reads it."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchgen.report.progress import Progress
from batchgen.report.prometheus import METRICS, PrometheusFile
from tests.support import snapshot

SNAPSHOT = replace(snapshot.SNAPSHOT, eta_s=12.5)


def read(path: Path) -> dict[str, float]:
    """Values by name, with the labels beyond the output behind it."""
    found = {}
    for family in text_string_to_metric_families(path.read_text()):
        assert family.documentation == METRICS[family.name][1]
        assert family.type == METRICS[family.name][0]
        for sample in family.samples:
            more = [value for name, value in sample.labels.items() if name != "output"]
            assert "output" in sample.labels
            found[" ".join([sample.name, *more])] = sample.value
    return found


def test_a_run_is_followed_from_its_start_to_its_exit_code(tmp_path: Path) -> None:
    path, now = tmp_path / "job.prom", [1000.0]
    display = PrometheusFile(path, "/out/a", 10.0, clock=lambda: now[0])
    first = read(path)
    assert first["batchgen_up"] == 1
    assert "batchgen_exit_code" not in first
    progress = Progress([display], clock=lambda: now[0])
    with progress.phase("generate"):
        progress.update(lambda: SNAPSHOT)
        now[0] = 1030.0
    found = read(path)
    assert found["batchgen_rows_done"] == 3
    assert found["batchgen_requests waiting"] == 4
    assert found["batchgen_eta_seconds"] == 12.5
    assert found["batchgen_phase_seconds generate"] == 30
    assert found["batchgen_start_timestamp_seconds"] == 1000
    assert found["batchgen_resident_memory_bytes"] > 1e6
    progress.close(0)
    last = read(path)
    assert (last["batchgen_up"], last["batchgen_exit_code"]) == (0, 0)
    assert last["batchgen_last_success_timestamp_seconds"] == 1030
    assert "batchgen_eta_seconds" not in last
    assert set(METRICS) - {name.split()[0] for name in last} == {"batchgen_eta_seconds"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.prom"]


def test_the_last_success_outlives_runs_that_fail(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    for at, code in ((1000.25, 0), (2000.0, 4), (3000.0, 75)):
        PrometheusFile(path, "/out", 10.0, clock=lambda at=at: at).close(code)
    found = read(path)
    assert found["batchgen_exit_code"] == 75
    assert found["batchgen_last_success_timestamp_seconds"] == 1000.25


@pytest.mark.parametrize("output", ['/o"ut\\x', "/out\nline", "/\u00e9 {a}=b,", "/bad\udc80"])
def test_any_path_is_a_label(tmp_path: Path, output: str) -> None:
    path = tmp_path / "job.prom"
    PrometheusFile(path, output, 10.0).close(0)
    # A path that is given again must find its own last success.
    PrometheusFile(path, output, 10.0).close(1)
    assert read(path)["batchgen_last_success_timestamp_seconds"] > 0
    (family,) = (
        each
        for each in text_string_to_metric_families(path.read_text())
        if each.name == "batchgen_up"
    )
    assert family.samples[0].labels["output"] == output.encode("utf-8", "replace").decode()


@pytest.mark.parametrize("before", ["", "garbage {", "\x00\xff", "batchgen_last_success"])
def test_a_file_of_something_else_is_replaced(tmp_path: Path, before: str) -> None:
    path = tmp_path / "job.prom"
    path.write_bytes(before.encode("latin-1"))
    PrometheusFile(path, "/out", 10.0)
    assert read(path)["batchgen_up"] == 1


def test_a_place_that_cannot_be_written_is_told_once(tmp_path, caplog) -> None:
    display = PrometheusFile(tmp_path / "gone" / "job.prom", "/out", 10.0)
    display.begin("plan")
    display.close(0)
    assert len(caplog.records) == 1
    assert "log.prometheus_file" in caplog.text
