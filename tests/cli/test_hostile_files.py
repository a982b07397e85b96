"""Users' files that no reader expects: an error with file and key, exit code 2, no traceback."""

from pathlib import Path

import pytest

from batchgen.errors import ExitCode

DEEP = "[" * 5000 + "]" * 5000
DIGITS = "9" * 5000
HALF = r"holds \\ud800, half of a character"

JOBS = {
    "lists": (f"sampling: {{stop: {DEEP}}}", "job.yaml: it is nested too deeply"),
    "mappings": ("sampling: " + "{a: " * 3000 + "1" + "}" * 3000, "job.yaml: it is nested too"),
    "a list of itself": ("sampling: {stop: &a [*a]}", "job.yaml: it is nested too deeply"),
    "a mapping of itself": ("sampling: {logit_bias: &a {1: *a}}", "line 1: sampling.logit_bias: "),
    "a list in a list": (
        "sampling: {score_choices: [[a], b]}",
        "line 1: sampling.score_choices must be a list of text",
    ),
    "a mapping in a list": ("structured: {choice: [{a: 1}]}", "structured.choice must be a list"),
    "a date in a list": ("sampling: {stop_token_ids: [2020-01-01]}", "must be a list of integers"),
    "a list in a mapping": ("sampling: {logit_bias: {1: [2]}}", "must be numbers for integers"),
    "digits": (f"sampling: {{max_tokens: {DIGITS}}}", "line 1: sampling.max_tokens: Exceeds"),
    "more bits": ("sampling: {seed: 0x" + "f" * 6000 + "}", "sampling.seed holds a number that"),
    "no date": ("sampling: {max_tokens: 2020-13-45}", "sampling.max_tokens: month must be in"),
    "a list as a key": ("? [a, b]\n: 1\n", "line 1: a key must be a word"),
    "half a character": (r'sampling: {bad_words: ["\ud800"]}', rf"sampling.bad_words {HALF}"),
    "half a template": (r'prompt: {template: "\ud800"}', f"prompt.template {HALF}"),
}


@pytest.mark.parametrize("name", JOBS)
def test_t13_a_hostile_job_file_is_refused_by_file_and_key(name, command, recorder, caller, capsys):
    text, words = JOBS[name]
    (caller / "mine").mkdir()
    (caller / "mine" / "job.yaml").write_text(text)
    assert command("job=./mine") == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "job.yaml" in said
    assert words.replace("\\\\", "\\") in said
    assert not recorder.configs


@pytest.mark.parametrize(
    "key", ["sampling.stop_file", "sampling.score_choices_file", "structured.choice_file"]
)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DEEP, "is nested too deeply"),
        (f"[{DIGITS}]", "cannot be read: Exceeds the limit"),
        ("[2020-13-45]", "cannot be read: month must be in 1..12"),
        (r'["a\ud800"]', r"it holds \ud800, half of a character"),
    ],
)
def test_t28_a_hostile_list_file_is_refused_by_file_and_key(
    key, text, words, command, caller: Path, capsys
):
    (caller / "list.yaml").write_text(text)
    assert command(f"{key}=list.yaml") == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert f"{key}=" in said
    assert "list.yaml" in said
    assert words in said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sampling.stop=" + "[" * 3000 + "]" * 3000, "Cannot read sampling.stop="),
        (f"sampling.max_tokens={DIGITS}", "Exceeds the limit (4300 digits)"),
        ("sampling.score_choices=[[a],b]", "sampling.score_choices must be a list of text"),
        (r'sampling.bad_words=["\ud800"]', r"sampling.bad_words holds \ud800"),
        ("prompt.system=\udc80", r"prompt.system=\udc80"),
    ],
)
def test_t13_a_hostile_override_is_refused_by_its_key(override, words, command, capsys):
    assert command(override) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert words in said


def test_t13_a_preset_that_is_nested_too_deeply_is_refused(command, caller, capsys):
    (caller / "own" / "pool").mkdir(parents=True)
    (caller / "own" / "pool" / "mine.yaml").write_text(f"num_blocks: {DEEP}")
    assert command("--config-dir", str(caller / "own"), "pool=mine") == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "nested too deeply" in said
