"""Storages that keep the checksums which a client appends to an upload as content."""

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.input.source import discover
from batchgen.data.output.directory import OutputDir
from batchgen.data.stores import faults as faults_module
from batchgen.data.stores import lease as lease_module
from batchgen.data.stores.bucket import Bucket
from batchgen.data.stores.faults import StoreError
from batchgen.errors import UsageError
from batchgen.s3_uri import S3Uri
from tests.data.crash import INT, begin, ok, write
from tests.support.s3_loopback import S3, Proxy

REMEDY = "AWS_REQUEST_CHECKSUM_CALCULATION"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Repeating what no repetition mends would run past the test's time.
    monkeypatch.setattr(faults_module, "PAUSES_S", (600.0,))
    monkeypatch.setattr(lease_module, "SETTLE_S", 0.3)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(REMEDY, raising=False)


@pytest.fixture
def old_storage(s3: S3) -> Iterator[str]:
    """Address of a storage that does what s3rver 3.7.1 does."""
    with Proxy(s3.address, keeps_checksums=True) as proxy:
        yield proxy.address


def test_t11_a_lease_that_comes_back_longer_is_no_busy_one(
    s3: S3, old_storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = s3.uri("out", old_storage)
    with pytest.raises(UsageError, match=f"_lock .* more bytes .* set {REMEDY}=when_required"):
        OutputDir(address).__enter__()
    # What it left there is in nobody's way.
    monkeypatch.setenv(REMEDY, "when_required")
    with OutputDir(address) as out:
        begin(out)
        write(out.path, ok(0), ok(1))
    with OutputDir(address) as out:
        assert out.finished_rows(INT).num_rows == 2


@pytest.mark.parametrize("size", [500, 200_000, 12_000_000])
def test_t11_an_object_that_grows_on_its_way_is_refused_at_once(
    s3: S3, old_storage: str, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    uri = S3Uri.parse("output.dir", s3.uri("part", old_storage))
    with pytest.raises(StoreError, match=f"bucket/part .*more bytes.*{size}.*{REMEDY}"):
        Bucket(uri).write_measured("part", b"x" * size)
    monkeypatch.setenv(REMEDY, "when_required")
    Bucket(uri).write_measured("part", b"x" * size)
    assert s3.get("part") == b"x" * size


def test_t11_an_input_that_was_uploaded_so_is_named(s3: S3, old_storage: str) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2]}), sink)
    bucket = Bucket(S3Uri.parse("output.dir", s3.uri("in", old_storage)))
    bucket.write("in/a.parquet", sink.getvalue())
    with pytest.raises(UsageError, match=rf"in/a.parquet .*kept .*checksums.* with {REMEDY}"):
        discover(s3.uri("in"))
