"""Columns as other writers make them: JSON, bytes, maps, extension types, written by them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.job.harness import Job

CHAT = [{"role": "user", "content": "Bern?"}]


@pytest.fixture
def by_duckdb(job: Job, tmp_path: Path) -> Callable[[str], Job]:
    """A job over a file that DuckDB wrote from a query."""

    def write(query: str) -> Job:
        path = tmp_path / "duckdb.parquet"
        duckdb.sql(f"COPY ({query}) TO '{path}' (FORMAT parquet)")
        job.given["input.path"] = str(path)
        return job

    return write


def preview(job: Job, capsys: pytest.CaptureFixture[str], *keys: str) -> str:
    assert job("mode=preview", *keys) == 0
    return capsys.readouterr().out


def test_n07_columns_of_the_json_type_are_their_text(
    by_duckdb: Callable[[str], Job], capsys: pytest.CaptureFixture[str]
) -> None:
    messages, params = json.dumps(CHAT), json.dumps({"max_tokens": 3})
    job = by_duckdb(
        f"SELECT 1 AS id, '{messages}'::JSON AS messages, '{params}'::JSON AS sampling_params, "
        "'{\"a\": 1}'::JSON AS note"
    )
    kinds = {field.name: field.type for field in pq.read_schema(job.given["input.path"])}
    assert isinstance(kinds["messages"], pa.BaseExtensionType)
    keys = ("prompt.template='{{ note }} {{ messages }}'", "prompt.format=plain")
    assert '{"a": 1} [{"role": "user", "content": "Bern?"}]' in preview(job, capsys, *keys)
    assert job(*keys, "output.carry_columns=[note]") == 0
    (row,) = job.rows()
    assert row["completion_tokens"] <= 3
    assert row["note"] == '{"a": 1}'


def test_n07_a_prompt_of_the_json_type_written_by_pyarrow(job: Job) -> None:
    prompts = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"one"', '"two"']))
    job.write(pa.table({"id": ["a", "b"], "prompt": prompts}))
    assert job() == 0
    assert [row["status"] for row in job.rows()] == ["ok", "ok"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_n09_text_stored_as_bytes_is_text(
    job: Job, kind: pa.DataType, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({
        "id": pa.array([b"x", b"y", b"z"], kind),
        "prompt": pa.array(["z\u00fcrich".encode(), b"a\xffb", None], kind),
    })  # fmt: skip
    job.write(table)
    shown = preview(job, capsys)
    assert "z\u00fcrich" in shown
    assert "a\ufffdb" in shown
    assert job() == 0
    rows = {row["id"]: row for row in job.rows()}
    assert [rows[each]["error_type"] for each in "xyz"] == [None, None, "null_prompt"]


def test_n09_bytes_beside_text_in_another_file(job: Job, tmp_path: Path) -> None:
    """A neighbour that no list names: dictionary-encoded bytes, and files that disagree."""
    folder = tmp_path / "files"
    folder.mkdir()
    coded = pa.array([b"one", b"one"], pa.binary()).dictionary_encode()
    pq.write_table(pa.table({"id": [1, 2], "prompt": coded}), folder / "a.parquet")
    pq.write_table(pa.table({"id": [3], "prompt": ["two"]}), folder / "b.parquet")
    job.given["input.path"] = str(folder)
    assert job() == 0
    assert [row["status"] for row in job.rows()] == ["ok"] * 3


def test_n10_messages_as_a_list_of_maps(
    by_duckdb: Callable[[str], Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = by_duckdb("SELECT 1 AS id, [MAP {'role': 'user', 'content': 'Bern?'}] AS messages")
    kind = pq.read_schema(job.given["input.path"]).field("messages").type
    assert pa.types.is_map(kind.value_type)
    shown = preview(job, capsys)
    job.write([{"id": 1, "messages": CHAT}])
    assert "Bern?" in shown
    assert preview(job, capsys) == shown


def test_n23_a_column_is_the_one_that_is_called_so(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(
        [{"meta.id": "dotted", "meta": {"id": "inner"}, "a.text": "top", "a": {"text": "in"}}]
    )
    keys: tuple[Any, ...] = ("prompt.column=a.text", "input.id_column=meta.id")
    assert "top" in preview(job, capsys, *keys)
    assert job(*keys, "output.carry_columns=[a]") == 0
    (row,) = job.rows()
    assert (row["id"], row["a"]) == ("dotted", {"text": "in"})


def test_n20_a_carried_column_that_cannot_be_read_is_named(
    by_duckdb: Callable[[str], Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = by_duckdb(
        "SELECT id, 'one' AS prompt, CASE WHEN id = 2 THEN NULL ELSE [1, 2, 3]::INT[3] END AS nums "
        "FROM range(4) AS ids(id)"
    )
    assert job() == 0
    code = job("output.carry_columns=[nums]", "output.overwrite=true")
    said = capsys.readouterr().err
    readable = True
    try:
        pq.read_table(job.given["input.path"])
    except (pa.ArrowException, OSError):
        readable = False
    assert (code == 0) == readable
    assert readable or "column nums" in said
