"""Rows and files that no reader expects: what is said of them, and what they cannot do."""

import json
from typing import Any

import pyarrow as pa
import pytest

from batchgen.api import Engine
from batchgen.errors import ExitCode, UsageError
from tests.job.harness import Job

ESCAPES = "\x1b]0;x\x07\r\nFAKE done: 9 rows\u202e\u2028"
DEEP = "[" * 200_000
DIGITS = "9" * 5000
HALF = r"\ud800"


def _assert_harmless(said: str) -> None:
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert "\r" not in said
    assert not any(line.startswith("FAKE") for line in said.splitlines())


@pytest.mark.parametrize("log", ["text", "json"])
@pytest.mark.parametrize("mode", ["run", "plan", "preview"])
def test_t12_ids_prompts_and_row_errors_move_no_cursor(
    mode: str, log: str, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(
        [
            {"id": ESCAPES, "prompt": None, "sampling_params": None},
            {"id": "b", "prompt": f"a {ESCAPES}", "sampling_params": None},
            {"id": "c", "prompt": "a", "sampling_params": json.dumps({ESCAPES: 1})},
            {"id": "d", "prompt": f"a {ESCAPES} b", "sampling_params": None},
        ]
    )
    job(f"mode={mode}", f"log.format={log}")
    shown = capsys.readouterr()
    said = shown.out + shown.err
    if mode == "preview":
        # A prompt is shown with its own line breaks.
        said = said.replace("\nFAKE", "")
    assert "FAKE" in said
    _assert_harmless(said)


def test_t12_columns_files_and_templates_move_no_cursor(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(pa.table({"id": ["a"], f"col{ESCAPES}": ["x"], "text": ["x"]}))
    hostile = str(job.input.rename(job.folder / f"in{ESCAPES}.parquet"))
    for wrong in (
        "prompt.column=nothing",
        "prompt.template='{{ nothing }}'",
        "input.id_column=nothing",
        r'prompt.template="{{ \e]0;x }} FAKE"',
    ):
        assert job(f"input.path={json.dumps(hostile)}", "mode=preview", wrong) == ExitCode.USAGE
        said = capsys.readouterr().err
        assert "\\x1b" in said
        _assert_harmless(said)


def test_t13_hostile_json_of_a_row_is_the_rows_own_error(job: Job) -> None:
    def chat(extra: str) -> str:
        return f'[{{"role": "user", "content": "a", "x": {extra}}}]'

    messages = [DEEP, chat(DIGITS), chat('["a",' * 5000), chat(f'"{HALF}"'), chat("1")]
    job.write([{"id": str(at), "messages": each} for at, each in enumerate(messages)])
    assert job("errors.max_rate=1") == 0
    rows = job.rows()
    assert [row["error_type"] for row in rows] == [*["invalid_messages"] * 4, None]
    assert "half of a character" in rows[3]["error_message"]


def test_t28_hostile_sampling_parameters_are_the_rows_own_error(job: Job) -> None:
    params = [
        DEEP,
        f'{{"max_tokens": {DIGITS}}}',
        f'{{"temperature": {"9" * 400}}}',
        f'{{"bad_words": ["{HALF}"]}}',
        f'{{"structured": {{"json": {{"const": "{HALF}"}}}}}}',
        '{"structured": {"json": ' + '{"not": ' * 900 + "{}" + "}" * 902,
        '{"score_choices": [["a"], "b"]}',
        None,
    ]
    job.write([{"id": str(at), "prompt": "a", "sampling_params": p} for at, p in enumerate(params)])
    assert job("errors.max_rate=1") == 0
    kinds = [row["error_type"] for row in job.rows()]
    assert kinds == [*["invalid_sampling_params"] * 7, None]


def test_t28_half_a_character_from_python_is_refused_by_its_place(model_dir: Any) -> None:
    with Engine(str(model_dir), num_blocks=64) as engine:
        for given, words in (
            ((["a", "\ud800"],), r"prompts\[1\]"),
            ((["a"], {"bad_words": ["\ud800"]}), r"bad_words holds \\ud800"),
            ((["a"], {"stop": ["\ud800"]}), r"stop holds \\ud800"),
            ((["a"], {"structured": {"json": {"const": "\ud800"}}}), r"holds \\ud800"),
        ):
            with pytest.raises(UsageError, match=words):
                engine.generate(*given)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("prompt.shots_file", DEEP, "line 1 is nested too deeply"),
        ("prompt.shots_file", f'{{"text": {DIGITS}}}', "line 1: Exceeds the limit"),
        ("prompt.shots_file", f'{{"text": "{HALF}"}}', r"line 1: a text holds \ud800"),
        ("structured.json_file", DEEP, "structured.json cannot be read as JSON"),
        (
            "structured.json_file",
            f'{{"const": {DIGITS}}}',
            "structured.json cannot be read as JSON",
        ),
        ("structured.json_file", f'{{"const": "{HALF}"}}', r"structured.json holds \ud800"),
        ("structured.json_file", '{"not": ' * 900 + "{}" + "}" * 900, "recursion limit exceeded"),
    ],
)
def test_t13_a_hostile_json_file_is_refused_by_file_and_key(
    key: str, text: str, words: str, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write([{"id": "a", "text": "x"}])
    (job.folder / "f.json").write_text(text)
    given = ("prompt.template='{{ text }}'", f"{key}={job.folder / 'f.json'}", "mode=preview")
    assert job(*given) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert f"{key}={job.folder / 'f.json'}" in said
    assert words in said
