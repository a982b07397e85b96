"""Whole jobs from S3 to S3, over a real S3 API on loopback: killed, cut off and refused."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stress.torture import report
from tests.stress.torture_s3 import StoredTorture, stage
from tests.support.command_server import CommandServer, Run
from tests.support.killed_job import Results
from tests.support.notes import Note
from tests.support.s3_loopback import ENVIRONMENT, S3, Fault


@pytest.fixture(scope="module")
def stored(
    tmp_path_factory: pytest.TempPathFactory,
    torture_model: Path,
    s3_server: S3,
    command_server: CommandServer,
) -> Iterator[tuple[StoredTorture, Results]]:
    """A job in a bucket of its own, and what it gives on a disk and gave there once."""
    folder = tmp_path_factory.mktemp("job")
    with stage(
        folder, torture_model, s3_server.beside("stored"), command_server, seed=5
    ) as torture:
        results, *_ = torture.undisturbed()
        yield torture, results


@pytest.fixture
def torture(stored: tuple[StoredTorture, Results]) -> StoredTorture:
    stored[0].proxy.faults.clear()
    return stored[0]


@pytest.fixture
def expected(stored: tuple[StoredTorture, Results]) -> Results:
    return stored[1]


def run(torture: StoredTorture, **more: str) -> Run:
    given = torture.job.given | {name.replace("__", "."): value for name, value in more.items()}
    started = torture.command_server.start(given, torture.job.log, torture.job.environment)
    assert started.wait() is not None
    return started


def objects(torture: StoredTorture) -> dict[str, bytes]:
    s3 = torture.job.s3
    return {key: s3.get(f"out/{key}") for key in s3.keys("out/")}


def finish(torture: StoredTorture, expected: Results) -> None:
    last = torture.start(None)
    assert last.wait() == 0, last.said
    torture.job.check_finished(expected)


def test_a_finished_job_is_left_alone_and_its_status_is_told(
    torture: StoredTorture, expected: Results
) -> None:
    there = objects(torture)
    assert {"_manifest.json", "_summary.json", "_plan.json", "_report.html"} <= there.keys()
    assert there["_metrics.jsonl"].endswith(b"}\n")
    again = run(torture)
    assert again.wait() == 0, again.said
    assert f"all {len(expected)} rows are in s3://stored/out already" in again.said
    status = run(torture, mode="status")
    assert "the job is complete" in status.said
    assert "12 of 12 done (100.0%), 0 left" in status.said
    assert objects(torture) == there
    # Nothing of the secret anywhere, and nothing of the work left on this machine.
    secret = ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]
    assert secret not in again.said + status.said
    assert all(secret.encode() not in content for content in there.values())
    scratch = Path(torture.job.environment["TMPDIR"])
    assert not [path for path in scratch.rglob("*") if path.is_file()]


def test_failed_rows_are_retried_and_an_output_is_begun_anew(
    torture: StoredTorture, expected: Results
) -> None:
    retried = run(torture, output__retry_errors="true")
    assert retried.wait() == 0, retried.said
    torture.job.check_finished(expected)
    other = run(torture, sampling__max_tokens="2")
    assert other.wait() == 2
    assert "sampling.max_tokens: 3 then, 2 now" in other.said
    anew = run(torture, sampling__max_tokens="2", output__overwrite="true")
    assert anew.wait() == 0, anew.said
    there = objects(torture)
    assert json.loads(there["_summary.json"])["rows"] == len(expected)
    plan = run(torture, mode="plan")
    assert plan.wait() == 0, plan.said
    assert objects(torture)["_plan.svg"].startswith(b"<svg")


def test_h09_a_second_run_is_refused_while_the_first_uploads(
    torture: StoredTorture, expected: Results
) -> None:
    torture.check_second_is_refused(expected)


def test_t11_a_storage_that_keeps_checksums_as_content_is_refused_with_the_setting_that_helps(
    torture: StoredTorture, expected: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    torture.job.clear()
    monkeypatch.setattr(torture.proxy, "keeps_checksums", True)
    refused = run(torture)
    assert refused.wait() == 2
    assert "_lock" in refused.said
    assert "set AWS_REQUEST_CHECKSUM_CALCULATION=when_required in the environment" in refused.said
    assert not [key for key in torture.job.s3.keys("out/") if key.startswith("part-")]
    monkeypatch.setitem(
        torture.job.environment, "AWS_REQUEST_CHECKSUM_CALCULATION", "when_required"
    )
    finish(torture, expected)


def test_kills_lose_and_double_nothing(
    torture: StoredTorture, expected: Results, note: Note
) -> None:
    killed, torture.resumed = Counter[str](), 0
    torture.job.clear()
    for point in ("part.uploaded:kill:2", "replace.removed:kill", "move.copied:kill",
                  "success.uploaded:kill"):  # fmt: skip
        killed[point] += torture.start(point).wait() == -9
        torture.resumed += torture.job.check_kept(expected) > 0
    finish(torture, expected)
    torture.job.clear()
    for request in ("PUT .*_manifest", "PUT .*part-", "PUT .*_parts", "PUT .*_switch", "DELETE"):
        killed[request] += torture.kill_within(request).wait() == -9
        torture.resumed += torture.job.check_kept(expected) > 0
    finish(torture, expected)
    assert set(killed.values()) == {1}, killed
    assert torture.resumed >= 5
    note(f"{len(killed)} kills: {', '.join(killed)}")


def test_random_kills_lose_and_double_nothing(torture: StoredTorture, note: Note) -> None:
    torture.kills.clear()
    torture.resumed = torture.ended = 0
    torture.run(4)
    note(report(torture))


def test_a_line_that_is_cut_and_a_server_that_refuses_lose_nothing(
    torture: StoredTorture, expected: Results, note: Note
) -> None:
    faults = [
        *(Fault("PUT .*part-", after_bytes=number) for number in (1, 700, 3000, 10**6)),
        Fault("PUT .*part-", status=503, times=3),
        Fault("PUT .*_parts", status=500, times=4),
        Fault("PUT .*_lock", status=503, times=2),
        Fault("GET .*part-", answer_bytes=300, times=2),
        Fault("DELETE", status=500, times=3),
        Fault("PUT .*_SUCCESS", answer_bytes=5, times=2),
    ]
    torture.run_over_bad_line(expected, faults)
    assert torture.failures == sum(fault.times for fault in faults)
    note(f"{torture.failures} requests failed, nothing was lost")


def test_a_storage_that_fails_for_good_ends_the_run_and_the_same_command_goes_on(
    torture: StoredTorture, expected: Results
) -> None:
    torture.job.clear()
    fault = Fault("PUT .*part-00002", status=503, times=10**6)
    torture.proxy.faults[:] = [fault]
    failed = torture.start(None)
    assert failed.wait() == 1
    said = "writing s3://stored/out/part-00002"
    assert said in failed.said
    assert f"at the endpoint {torture.proxy.address} failed" in failed.said
    assert "the same command resumes" in failed.said
    assert "Traceback" not in failed.said
    assert fault.happened <= 5 * 3
    assert torture.job.check_kept(expected) == 8
    torture.proxy.faults.clear()
    finish(torture, expected)
