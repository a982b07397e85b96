"""Input from a real S3 API on loopback: the same rows as from a disk, over a bad line too."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.input.reader import check_ids, read_original_rows, read_rows
from batchgen.data.input.source import discover
from batchgen.data.stores import bucket as bucket_module
from batchgen.data.stores import faults as faults_module
from batchgen.errors import UsageError
from tests.support.notes import Note
from tests.support.s3_loopback import S3, Fault, Proxy


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "CLIENT_ATTEMPTS", 1)
    monkeypatch.setattr(faults_module, "PAUSES_S", (0.01,) * 8)


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=2)
    return sink.getvalue()


def names(path: str) -> list[str]:
    return [file.name for file in discover(path).files]


def rows(path: str, *columns: str) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for batch in read_rows(discover(path), columns, id_column=None, limit=None):
        lists = [batch.ids.to_pylist(), *(batch.table.column(name).to_pylist() for name in columns)]
        found += zip(*lists, strict=True)
    return found


def test_a_prefix_is_read_as_a_directory_is(s3: S3, tmp_path: Path) -> None:
    for key, first in (("part-10", 4), ("part-2", 2), ("sub/part-1", 6), ("_errors/x", 8)):
        content = parquet(id=[first, first + 1], prompt=[f"p{first}", "q"])
        s3.put(f"in/{key}.parquet", content)
        path = tmp_path / f"{key}.parquet"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    s3.put("in/notes.txt", b"not ours")
    s3.put("in/.hidden.parquet", b"not ours")
    s3.put("input-of-others/part-1.parquet", parquet(id=[99]))
    s3.put("in/empty/", b"")
    assert names(s3.uri("in")) == names(str(tmp_path))
    assert rows(s3.uri("in/"), "prompt") == rows(str(tmp_path), "prompt")
    source = discover(s3.uri("in"))
    assert source.num_rows == 6
    assert source.files[0].size_bytes == len(s3.get("in/part-2.parquet"))
    found = [batch.to_pylist() for _, batch in read_original_rows(source, np.array([1, 2]))]
    assert found == [[{"id": 3, "prompt": "q"}], [{"id": 4, "prompt": "p4"}]]


def test_one_object_and_made_ids(s3: S3) -> None:
    s3.put("in/a b%20c.parquet", parquet(prompt=["x", "y", "z"]))
    path = s3.uri("in/a b%20c.parquet")
    assert rows(path, "prompt") == [(f"a b%20c.parquet:{n}", text) for n, text in enumerate("xyz")]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("in/*.parquet", ["a-1.parquet", "a-2.parquet"]),
        ("in/a-?.parquet", ["a-1.parquet", "a-2.parquet"]),
        ("in/a-[2-9].parquet", ["a-2.parquet"]),
        ("in/**", ["2024/07/c.parquet", "2024/b.parquet", "a-1.parquet", "a-2.parquet"]),
        ("in/**/*.parquet", ["2024/07/c.parquet", "2024/b.parquet", "a-1.parquet", "a-2.parquet"]),
        ("in/*/b.parquet", ["2024/b.parquet"]),
        ("i*/2024/*.parquet", ["in/2024/b.parquet"]),
        ("in/**/07/*", ["2024/07/c.parquet"]),
    ],
)
def test_a_glob_finds_what_it_finds_among_local_files(
    s3: S3, tmp_path: Path, pattern: str, expected: list[str]
) -> None:
    for key in ("a-1", "a-2", "2024/b", "2024/07/c", "_x/d"):
        s3.put(f"in/{key}.parquet", parquet(id=[1]))
        path = tmp_path / f"in/{key}.parquet"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(parquet(id=[1]))
    assert names(s3.uri(pattern)) == expected
    assert names(f"{tmp_path}/{pattern}") == expected


def test_the_identity_follows_the_content(s3: S3) -> None:
    s3.put("in/a.parquet", parquet(id=[1, 2]))
    before = discover(s3.uri("in")).identity()
    assert before == discover(s3.uri("in/")).identity()
    assert before[0]["rows"] == 2
    s3.put("in/a.parquet", parquet(id=[1, 3]))
    after = discover(s3.uri("in")).identity()
    assert after[0]["size_bytes"] == before[0]["size_bytes"]
    assert after != before


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("none/", "has no .*parquet file below it"),
        ("none.parquet", "has no .*parquet file below it"),
        ("none/*.parquet", "matches no"),
    ],
)
def test_nothing_found_is_said_with_the_address(s3: S3, key: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"input.path=s3://bucket/none.*{message}"):
        discover(s3.uri(key))


def test_an_object_that_is_cut_or_no_parquet_is_named(s3: S3) -> None:
    s3.put("in/a.parquet", parquet(id=[1, 2])[:-3])
    with pytest.raises(UsageError, match=r"s3://bucket/in/a.parquet is not a complete"):
        discover(s3.uri("in"))


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET .*a.parquet", answer_bytes=700, times=3),
        Fault("GET .*a.parquet", status=503, times=7),
        Fault("GET .*a.parquet", status=500, times=4),
        Fault("HEAD .*a.parquet", status=500, times=4),
        Fault("GET .*list-type", status=503, times=4),
        Fault("GET .*a.parquet", after_bytes=10, times=2),
    ],
    ids=lambda fault: f"{fault.request}-{fault.status or 'cut'}",
)
def test_a_bad_line_changes_no_row(s3: S3, fault: Fault, note: Note) -> None:
    text = ["some long text that does not compress away " + str(n) * 50 for n in range(80)]
    s3.put("in/a.parquet", parquet(id=list(range(80)), prompt=text))
    with Proxy(s3.address, [fault]) as proxy:
        found = rows(s3.uri("in", proxy.address), "prompt")
    assert found == list(enumerate(text))
    assert fault.happened == fault.times
    note(f"{fault.happened} requests failed ({fault.request}), 80 rows of 80 read")


def test_a_storage_that_fails_for_good_is_named_with_object_and_endpoint(s3: S3) -> None:
    s3.put("in/a.parquet", parquet(id=[1]))
    fault = Fault("GET .*a.parquet", status=503, times=1000)
    with Proxy(s3.address, [fault]) as proxy:
        with pytest.raises(UsageError) as caught:
            discover(s3.uri("in", proxy.address))
        assert f"reading s3://bucket/in/a.parquet at the endpoint {proxy.address}" in str(
            caught.value
        )
        assert "try again later" in str(caught.value)
        # Three times ours, three times pyarrow's each.
        assert fault.happened == 9


def test_an_endpoint_that_is_not_there_is_named_with_what_to_do(s3: S3) -> None:
    with pytest.raises(UsageError, match=r"endpoint 127.0.0.1:1 failed.*AWS_ENDPOINT_URL"):
        discover("s3://bucket/in?endpoint_override=127.0.0.1:1&scheme=http")


def test_refused_credentials_are_not_tried_again(s3: S3) -> None:
    fault = Fault("(GET|HEAD)", status=403, times=1000)
    with Proxy(s3.address, [fault]) as proxy, pytest.raises(UsageError, match="AWS_PROFILE"):
        discover(s3.uri("in", proxy.address))
    assert fault.happened == 1


def test_the_endpoint_may_come_from_the_environment(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("in/a.parquet", parquet(id=[1, 2]))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{s3.address}")
    assert rows("s3://bucket/in") == [(1,), (2,)]
    assert check_ids(discover("s3://bucket/in"), id_column=None, limit=None)
