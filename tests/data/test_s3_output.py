"""The output directory on a real S3 API: nothing lost, nothing twice, and nothing renamed."""

import io
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data import failpoints
from batchgen.data.input.source import discover
from batchgen.data.output.directory import OutputDir
from batchgen.data.output.files import OutputError
from batchgen.data.output.glance import Glance
from batchgen.data.stores import bucket as bucket_module
from batchgen.data.stores import faults as faults_module
from batchgen.data.stores import lease as lease_module
from batchgen.data.stores import objects as objects_module
from batchgen.data.stores.bucket import Bucket, ObjectFile
from batchgen.data.stores.lease import Lease
from batchgen.data.stores.store import place_of
from batchgen.errors import BatchgenError, UsageError
from batchgen.s3_uri import S3Uri
from tests.data.crash import INT, Crash, begin, failed, ok, run, write
from tests.support.notes import Note
from tests.support.s3_loopback import S3, Fault, Proxy

ROWS = (ok(5), failed(1), ok(3), failed(0), ok(2), ok(4))
EVERYTHING = {(n, 0) for n in range(6)}
IDLE = (".begin", ".written", ".leaves", ".dealt", ".staged", ".durable", ".done")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bucket_module, "CLIENT_ATTEMPTS", 1)
    monkeypatch.setattr(faults_module, "PAUSES_S", (0.01,) * 14)
    monkeypatch.setattr(lease_module, "SETTLE_S", 0.3)
    monkeypatch.setattr(lease_module, "BEAT_S", 0.3)
    monkeypatch.setattr(lease_module, "EXPIRES_S", 1.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def seen(s3: S3, prefix: str = "out/") -> list[tuple[int, int]]:
    """What a reader that knows nothing of batchgen reads there."""
    found: list[tuple[int, int]] = []
    for key in sorted(s3.keys(prefix)):
        if key.endswith(".parquet") and not key.startswith("_"):
            table = pq.read_table(io.BytesIO(s3.get(prefix + key)))
            found += zip(*(table[name].to_pylist() for name in COLUMNS), strict=True)
    return found


COLUMNS = ("row_index", "sample_index")


def lists(s3: S3) -> list[str]:
    return sorted(key for key in s3.keys("out/") if key.startswith("_parts-"))


def counted(s3: S3) -> set[str]:
    return set(json.loads(s3.get(f"out/{lists(s3)[-1]}"))["parts"])


def parts(s3: S3) -> set[str]:
    return {key for key in s3.keys("out/") if key.startswith("part-")}


def names(s3: S3) -> set[str]:
    """Names in the directory but those of the lists of parts."""
    found = {key.split("/")[0] for key in s3.keys("out/") if key and not key.endswith("/")}
    return found - set(lists(s3))


def test_rows_stand_in_parts_that_the_list_names(s3: S3) -> None:
    run(s3.uri("out"), *ROWS)
    assert set(seen(s3)) == EVERYTHING
    assert len(seen(s3)) == 6
    assert counted(s3) == parts(s3)
    assert names(s3) == {*parts(s3), "_manifest.json"}
    with OutputDir(s3.uri("out")) as out:
        assert begin(out)
        assert out.finished_rows(INT).num_rows == 6
        with pytest.raises(UsageError, match="these differ:\n  model"):
            begin(out, model="b")


def test_a_part_that_was_not_entered_is_set_aside_and_its_rows_are_run_again(s3: S3) -> None:
    with (
        OutputDir(s3.uri("out")) as out,
        pytest.MonkeyPatch.context() as patch,
    ):
        begin(out)
        write(out.path, ok(0), ok(1))
        patch.setattr(failpoints, "reached", _crash_at("part.uploaded"))
        with pytest.raises(OutputError):
            write(out.path, ok(2), ok(3))
    assert len(seen(s3)) == 4
    with OutputDir(s3.uri("out")) as out:
        assert sorted(out.finished_rows(INT).row_index.tolist()) == [0, 1]
        assert seen(s3) == [(0, 0), (1, 0)]
        assert len(s3.keys("out/_quarantine/")) == 1
        write(out.path, ok(2), ok(3))
    assert sorted(seen(s3)) == [(n, 0) for n in range(4)]


def _crash_at(point: str) -> Callable[[str], None]:
    def reached(name: str) -> None:
        if name == point:
            raise RuntimeError(name)

    return reached


def test_a_directory_that_was_copied_into_the_bucket_goes_on_there(s3: S3, tmp_path: Path) -> None:
    run(tmp_path / "local", *ROWS)
    for path in (tmp_path / "local").iterdir():
        s3.put(f"out/{path.name}", path.read_bytes())
    with OutputDir(s3.uri("out")) as out:
        assert begin(out)
        assert out.finished_rows(INT).num_rows == 6
        write(out.path, ok(6))
    assert set(seen(s3)) == EVERYTHING | {(6, 0)}
    assert counted(s3) == parts(s3)
    assert len(lists(s3)) == 1


def test_a_list_that_cannot_be_read_is_named_and_nothing_is_touched(s3: S3) -> None:
    run(s3.uri("out"), *ROWS)
    (name,) = lists(s3)
    s3.put(f"out/{name}", b"")
    before = s3.keys("out/")
    with pytest.raises(UsageError, match=f"{name} is no list of parts .* remove it"):
        OutputDir(s3.uri("out")).__enter__()
    assert s3.keys("out/") == before
    s3.client.delete_object(Bucket=s3.bucket, Key=f"out/{name}")
    with OutputDir(s3.uri("out")) as out:
        assert out.finished_rows(INT).num_rows == 6


def test_an_object_that_is_replaced_while_it_is_read_comes_whole(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [json.dumps({"parts": ["x" * size]}).encode() for size in (10, 5000, 3)]
    s3.put("out/list", contents[0])
    pending, read = contents[1:], ObjectFile.read

    def late(file: ObjectFile, size: int | None = -1) -> bytes:
        # Between the question for the length and that for the bytes.
        if pending:
            s3.put("out/list", pending.pop(0))
        return read(file, size)

    monkeypatch.setattr(ObjectFile, "read", late)
    bucket = Bucket(S3Uri.parse("output.dir", s3.uri("out")))
    assert bucket.read("out/list") == contents[-1]
    assert not pending


@pytest.mark.parametrize("answer_bytes", [40, 120, 180])
def test_an_answer_that_is_cut_in_its_head_is_not_taken_for_an_empty_one(
    s3: S3, answer_bytes: int
) -> None:
    run(s3.uri("out"), *ROWS)
    requests = ("GET .*list-type", "HEAD .*part-", "GET .*part-", "GET .*_parts", "HEAD .*_parts")
    for request in requests:
        with Proxy(s3.address, [Fault(request, answer_bytes=answer_bytes)]) as proxy:
            glance = Glance.take(place_of("output.dir", s3.uri("out", proxy.address)))
            assert proxy.faults[0].happened == 1
        assert glance.finished is not None
        assert glance.finished.num_rows == 6
        assert glance.damaged == ()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run wait for others to claim the directory."""

    def claim(lease: Lease) -> bool:
        lease._renew()
        return True

    monkeypatch.setattr(Lease, "_try", claim)


def crashes(
    s3: S3, act: Callable[[OutputDir], object], *, steps: int, overwrite: bool = False
) -> Iterator[None]:
    """Let an action die at its last step of each kind, in a directory of ``ROWS``."""
    run(s3.uri("out"), *ROWS, rows_per_part=3)
    before = {f"out/{key}": s3.get(f"out/{key}") for key in s3.keys("out/")}
    met: list[str] = []
    dying = ""

    def reached(name: str) -> None:
        met.append(name)
        if met.count(name) == counts[dying] and name == dying:
            raise Crash(name)

    counts = Counter[str]()
    pending = [""]
    while pending:
        dying = pending.pop()
        s3.clear()
        for key, content in before.items():
            s3.put(key, content)
        with (
            OutputDir(s3.uri("out"), overwrite=overwrite) as out,
            pytest.MonkeyPatch.context() as patch,
        ):
            met.clear()
            patch.setattr(failpoints, "reached", reached)
            with suppress(Crash):
                act(out)
        if not dying:
            counts = Counter(met)
            # At the others nothing stands between them and the next that changes the storage.
            pending = [name for name in counts if not name.endswith(IDLE)]
            assert len(pending) >= steps
        yield


@pytest.mark.usefixtures("alone")
def test_a_crash_at_any_kind_of_step_of_sorting_loses_and_doubles_nothing(s3: S3) -> None:
    for _ in crashes(s3, lambda out: out.sort_by_input(rows_per_part=6), steps=5):
        with OutputDir(s3.uri("out")) as out:
            assert len(seen(s3)) == 6
            assert set(seen(s3)) == EVERYTHING
            out.sort_by_input(rows_per_part=6)
        assert seen(s3) == sorted(EVERYTHING)
        assert not {"_staged", "_switch.json", "_quarantine"} & names(s3)


@pytest.mark.usefixtures("alone")
def test_a_crash_at_any_kind_of_step_of_overwriting_leaves_what_a_run_can_begin_on(s3: S3) -> None:
    def act(out: OutputDir) -> None:
        begin(out, model="b")

    for _ in crashes(s3, act, steps=2, overwrite=True):
        if parts(s3):
            assert json.loads(s3.get("out/_manifest.json"))["fingerprint"] == {"model": "a"}
        with OutputDir(s3.uri("out"), overwrite=True) as out:
            begin(out, model="b")
            write(out.path, ok(7))
        assert seen(s3) == [(7, 0)]


def test_failed_rows_are_an_input_again(s3: S3) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"id": range(6), "prompt": list("abcdef")}), content)
    s3.put("in/a.parquet", content.getvalue())
    source = discover(s3.uri("in"))
    run(s3.uri("out"), *ROWS)
    with OutputDir(s3.uri("out")) as out:
        for rows in ([0, 1], [1]):
            out.write_errors(source, np.array(rows))
            again = discover(s3.uri("out/_errors"))
            assert again.num_rows == len(rows)
        assert pq.read_table(io.BytesIO(s3.get("out/_errors/rows-00000.parquet"))).to_pylist() == [
            {"id": 1, "prompt": "b"}
        ]
        out.write_errors(source, np.array([], np.int64))
        out.mark_success()
    assert names(s3) == {*parts(s3), "_manifest.json", "_SUCCESS"}


def test_damage_is_told_from_a_storage_that_fails(s3: S3) -> None:
    run(s3.uri("out"), *ROWS)
    first = sorted(parts(s3))[0]
    fault = Fault(f"GET .*{first}", status=500, times=1000)
    with Proxy(s3.address, [fault]) as proxy, pytest.raises(OutputError, match=proxy.address):
        OutputDir(s3.uri("out", proxy.address)).__enter__()
    assert first in parts(s3)
    s3.put(f"out/{first}", s3.get(f"out/{first}")[:-9])
    with OutputDir(s3.uri("out")) as out:
        assert out.finished_rows(INT).num_rows == 4
    assert s3.keys("out/_quarantine/") == [first]


# A bad line


@pytest.mark.parametrize("size", [0, 1000, 12 << 20])
def test_an_upload_that_is_cut_again_and_again_arrives_whole(s3: S3, size: int, note: Note) -> None:
    content = random.Random(size).randbytes(size)
    points = random.Random(1).sample(range(max(1, size // 3)), k=min(4, max(1, size)))
    cuts = [Fault("PUT .*/big", after_bytes=point + 1) for point in points]
    refused = [Fault("PUT .*/big", status=status, times=2) for status in (503, 500)]
    lost = [Fault("PUT .*/big", answer_bytes=1)]
    with Proxy(s3.address, [*cuts, *refused, *lost]) as proxy:
        bucket = Bucket(S3Uri.parse("output.dir", s3.uri("out", proxy.address)))
        bucket.write("out/big", content)
        happened = sum(fault.happened for fault in proxy.faults)
    assert s3.get("out/big") == content
    assert happened >= 1 + len(points)
    note(f"{size:,} bytes arrived over a line that failed {happened} times")


def test_an_upload_that_never_comes_through_leaves_what_was_there(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults_module, "PAUSES_S", (0.01,))
    s3.put("out/big", b"old")
    with Proxy(s3.address, [Fault("PUT .*partNumber=2", after_bytes=99, times=10**6)]) as proxy:
        bucket = Bucket(S3Uri.parse("output.dir", s3.uri("out", proxy.address)))
        said = f"writing s3://bucket/out/big at the endpoint {proxy.address}"
        with pytest.raises(OSError, match=said):
            bucket.write("out/big", bytes(12 << 20))
        assert proxy.faults[0].happened == 2
    assert s3.get("out/big") == b"old"


# Two runs


def test_h09_a_second_run_is_refused_with_the_owner(s3: S3) -> None:
    with OutputDir(s3.uri("out")) as out:
        begin(out)
        with pytest.raises(UsageError, match="out is in use by process"):
            OutputDir(s3.uri("out")).__enter__()
        glance = Glance.take(place_of("output.dir", s3.uri("out")))
        assert glance.is_held
        assert glance.owner is not None
        assert glance.num_parts == 0
        write(out.path, ok(1))
    assert not Glance.take(place_of("output.dir", s3.uri("out"))).is_held
    assert "_lock" not in names(s3)


def test_h09_of_runs_that_start_at_once_one_works(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads of one process wait for each other; what they wait must not count as silence.
    monkeypatch.setattr(lease_module, "SETTLE_S", 2.0)
    monkeypatch.setattr(lease_module, "EXPIRES_S", 20.0)
    outcomes: list[str] = []
    ended = threading.Barrier(3)

    def enter() -> None:
        try:
            with OutputDir(s3.uri("out")):
                outcomes.append("works")
                ended.wait(30)
        except UsageError:
            outcomes.append("refused")
            ended.wait(30)

    threads = [threading.Thread(target=enter) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused", "refused", "works"]


def test_h09_the_lease_of_a_dead_process_here_is_taken_at_once_and_others_are_watched(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OutputDir(s3.uri("out")):
        claim = json.loads(s3.get("out/_lock"))
    claim["owner"]["pid"] = 2**22 + 1
    claim["token"] = "another"
    s3.put("out/_lock", json.dumps(claim).encode())
    monkeypatch.setattr(lease_module, "EXPIRES_S", 10**6)
    with OutputDir(s3.uri("out")):
        pass
    monkeypatch.setattr(lease_module, "EXPIRES_S", 0.3)
    s3.put("out/_lock", json.dumps(claim | {"machine": "elsewhere"}).encode())
    with OutputDir(s3.uri("out")):
        pass
    s3.put("out/_lock", b"no JSON")
    with OutputDir(s3.uri("out")):
        pass
    assert "_lock" not in names(s3)


def test_h09_a_run_that_slept_past_its_lease_adds_nothing(
    s3: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sleeper, other = OutputDir(s3.uri("out")), OutputDir(s3.uri("out"))
    monkeypatch.setattr(lease_module, "BEAT_S", 3.0)
    sleeper.__enter__()
    begin(sleeper)
    write(sleeper.path, ok(0), ok(1))
    with other:
        assert begin(other)
        write(other.path, ok(2))
        with pytest.raises(BatchgenError, match="was taken over by another run"):
            write(sleeper.path, ok(2), ok(3))
        with pytest.raises(BatchgenError, match="was taken over by another run"):
            sleeper.discard_ids(pa.array([0]))
        assert len(seen(s3)) == 3
        assert other.finished_rows(INT).num_rows == 3
        write(other.path, ok(3))
        s3.put("out/part-00009-0123abcd.parquet", s3.get(f"out/{sorted(parts(s3))[0]}"))
        with caplog.at_level(logging.WARNING):
            other.mark_success()
        assert "does not count" in caplog.text
        assert sorted(seen(s3)) == [(n, 0) for n in range(4)]
        sleeper.__exit__(None, None, None)
        assert "_lock" in names(s3)
    assert "_lock" not in names(s3)


def test_h09_what_a_run_writes_before_it_finds_its_lease_gone_counts_for_nobody(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper, other = OutputDir(s3.uri("out")), OutputDir(s3.uri("out"))
    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "BEAT_S", 60.0)
        sleeper.__enter__()
        begin(sleeper)
    write(sleeper.path, ok(0), ok(1))
    with other, monkeypatch.context() as patch:
        # It looked just before the other took over.
        patch.setattr(Lease, "confirm", lambda lease: None)
        write(sleeper.path, ok(2), ok(3))
        assert begin(other)
        assert other.finished_rows(INT).num_rows == 2
        write(other.path, ok(2), ok(3))
        with pytest.raises(faults_module.StoreError, match="was taken over by another run"):
            write(sleeper.path, ok(4))
        with pytest.raises(OutputError, match="was taken over by another run"):
            sleeper.mark_success()
        assert len(seen(s3)) == 6
        glance = Glance.take(place_of("output.dir", s3.uri("out")))
        assert glance.finished is not None
        assert glance.finished.num_rows == 4
        other.mark_success()
        sleeper.__exit__(None, None, None)
    assert sorted(seen(s3)) == [(n, 0) for n in range(4)]


def test_an_output_that_cannot_be_reached_is_refused_before_anything_starts(s3: S3) -> None:
    with pytest.raises(UsageError, match=r"output.dir=s3://nowhere/out cannot be used.*nowhere"):
        OutputDir(s3.uri("out").replace("bucket", "nowhere")).__enter__()
    with pytest.raises(UsageError, match=r"endpoint 127.0.0.1:1 failed.*AWS_ENDPOINT_URL"):
        OutputDir("s3://bucket/out?endpoint_override=127.0.0.1:1&scheme=http").__enter__()


def test_foreign_data_is_refused(s3: S3) -> None:
    s3.put("out/data.parquet", b"somebody's")
    with pytest.raises(UsageError, match=r"holds data.parquet"):
        OutputDir(s3.uri("out")).__enter__()
    s3.clear()
    s3.put("out/notes.txt", b"somebody's")
    with pytest.raises(UsageError, match=r"is not empty and not an output of batchgen"):
        OutputDir(s3.uri("out")).__enter__()
    assert s3.get("out/notes.txt") == b"somebody's"


def test_figures_are_appended_here_and_stand_there_in_the_end(s3: S3, tmp_path: Path) -> None:
    def append(line: str) -> None:
        with OutputDir(s3.uri("out")) as out, out.appended("_metrics.jsonl") as path:
            assert path.is_relative_to(tmp_path)
            with path.open("a") as file:
                file.write(line)

    append('{"rows": 1}\n')
    append('{"rows": 2}\n')
    assert s3.get("out/_metrics.jsonl") == b'{"rows": 1}\n{"rows": 2}\n'
    with OutputDir(s3.uri("out")) as out:
        out.mark_success()
        assert not out.scratch.exists()
    append('{"rows": 3}\n')
    assert s3.get("out/_metrics.jsonl").count(b"\n") == 3


def test_figures_can_be_read_there_while_a_run_goes_on(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "PUBLISH_S", 0.05)

    def wait_for(content: bytes) -> None:
        deadline = time.monotonic() + 30
        while "_metrics.jsonl" not in names(s3) or s3.get("out/_metrics.jsonl") != content:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with OutputDir(s3.uri("out")) as out, out.appended("_metrics.jsonl") as path:
        path.write_text('{"rows": 1}\n{"ro')
        wait_for(b'{"rows": 1}\n')
        # A storage that fails meanwhile ends nothing.
        with monkeypatch.context() as patch:
            patch.setattr(Lease, "confirm", _fail)
            time.sleep(0.2)
        path.write_text('{"rows": 1}\n{"rows": 2}\n')
        wait_for(b'{"rows": 1}\n{"rows": 2}\n')
        path.write_text("the end")
    assert s3.get("out/_metrics.jsonl") == b"the end"


def _fail(_: Lease) -> None:
    raise faults_module.StoreError("no answer")
