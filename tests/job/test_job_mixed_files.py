"""Input files that disagree about columns, and texts that the tokenizer's library dies of."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, pre_tokenizers

from batchgen import Engine
from batchgen.prompts import tokenizer as tokenizer_module
from tests.job.harness import Job


@pytest.fixture
def mixed(job: Job) -> Callable[..., Job]:
    """A job over a folder of files with these tables."""

    def write(*tables: pa.Table) -> Job:
        folder = job.out.parent / "files"
        folder.mkdir()
        for number, table in enumerate(tables):
            pq.write_table(table, folder / f"part{number}.parquet")
        job.given["input.path"] = str(folder)
        return job

    return write


CHAT = '[{"role": "user", "content": "x"}]'
LENIENT = "{% if prompt %}{{ prompt }}{% endif %}x"
TEXTS = pa.table({"id": [1, 2], "prompt": ["one", "two"]})


@pytest.mark.parametrize(
    ("other", "keys"),
    [
        (pa.table({"id": [3], "Prompt": ["three"]}), ()),
        (pa.table({"id": [3]}), ()),
        (pa.table({"id": [3], "messages": [CHAT]}), ("prompt.column=prompt",)),
        (pa.table({"id": [3], "text": ["three"]}), (f"prompt.template='{LENIENT}'",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["run", "plan", "preview"])
def test_t26_a_file_without_the_prompts_column_is_refused_by_name(
    mixed: Callable[..., Job],
    other: pa.Table,
    keys: tuple[str, ...],
    mode: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = mixed(TEXTS, other)
    assert job(*keys, f"mode={mode}") == 2
    said = capsys.readouterr().err
    assert "part1.parquet has no column prompt, which part0.parquet has" in said


@pytest.mark.parametrize(
    "other",
    [
        pa.table({"id": [3], "prompt": pa.nulls(1)}),
        pa.table({"id": [3], "prompt": pa.array([None], pa.string())}),
        pa.table({"id": pa.array([], pa.int64())}),
    ],
)
def test_a_column_of_nulls_and_a_file_without_rows_are_no_gap(
    mixed: Callable[..., Job], other: pa.Table
) -> None:
    job = mixed(TEXTS, other)
    assert job() == 0
    assert [row["status"] for row in job.rows()] == ["ok", "ok", *["error"] * len(other)]


def test_t26_numbers_of_two_types_have_one_rendering_which_is_said(
    mixed: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = mixed(
        pa.table({"id": [1], "year": pa.array([2020], pa.int64())}),
        pa.table({"id": [2], "year": pa.array([2021.0], pa.float64())}),
        pa.table({"id": [3], "year": pa.array([2022], pa.int32())}),
    )
    assert job("prompt.template='in {{ year }}'", "mode=preview", "prompt.format=plain") == 0
    shown = capsys.readouterr()
    assert all(f"in {year}.0" in shown.out for year in (2020, 2021, 2022))
    assert "column year is int64 in part0.parquet and double in part1.parquet" in shown.err


def _panicking(model_dir: Any) -> Any:
    """A tokenizer whose pattern takes time without end: the library panics on some texts."""
    loaded = tokenizer_module.load_tokenizer(str(model_dir), revision=None, trust_remote_code=False)
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    own = loaded.backend_tokenizer.pre_tokenizer
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, own] if own is not None else [split]
    )
    return loaded


def test_t21_a_text_that_the_tokenizer_panics_on_is_its_rows_error(
    job: Job, model_dir: Any, tmp_path: Any
) -> None:
    folder = tmp_path / "tokenizer"
    _panicking(model_dir).save_pretrained(folder)
    bad = "a" * 40 + "b"
    job.write([{"id": n, "prompt": bad if n == 1 else f"row {n}"} for n in range(4)])
    assert job(f"model.tokenizer={folder}") == 0
    rows = {row["id"]: row for row in job.rows()}
    assert [rows[n]["status"] for n in range(4)] == ["ok", "error", "ok", "ok"]
    assert rows[1]["error_type"] == "invalid_messages"
    assert "the tokenizer's library panicked" in rows[1]["error_message"]
    with Engine(str(model_dir), tokenizer=str(folder), num_blocks=64) as engine:
        answers = engine.generate(["row", bad, "another"], {"max_tokens": 2})
        assert [answer["status"] for answer in answers] == ["ok", "error", "ok"]
