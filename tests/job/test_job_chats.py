"""Chat templates in whole jobs: what plan, preview and run say and refuse, and what resumes."""

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchgen.job import template_time
from tests.job.harness import Job

USER = {"role": "user", "content": "Who?"}
BODY = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
DATED = "Today is {{ strftime_now('%d %b %Y %H:%M') }}. " + BODY
MODES = ("mode=plan", "mode=preview", "mode=run")


def write(job: Job, chats: list[Any], template: str = BODY, **columns: list[Any]) -> None:
    """Write rows of messages, and the chat template that the job uses."""
    texts = [json.dumps(chat) for chat in chats]
    job.write(pa.table({"id": range(len(chats)), "messages": texts, **columns}))
    path = job.folder / "chat.jinja"
    path.write_text(template)
    job.given["prompt.chat_template_file"] = str(path)


def numbered(count: int) -> list[Any]:
    return [[{"role": "user", "content": f"Who is number {n}?"}] for n in range(count)]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the machine's clock and its zone."""

    def set_clock(text: str) -> None:
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return cls.fromisoformat(text)

            def astimezone(self, tz: Any = None) -> Any:
                return self

        monkeypatch.setattr(template_time, "datetime", Clock)

    return set_clock


def test_n14_a_resume_on_another_day_and_in_another_zone_asks_the_same(
    job: Job, at: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write(job, numbered(12), DATED)
    at("2026-07-30T23:50:00+02:00")
    assert job("output.rows_per_part=4") == 0
    assert "the chat template prints the time: for all rows" in capsys.readouterr().err
    before = job.rows("id, output_token_ids, prompt_tokens")
    made = job.json("_manifest.json")["fingerprint"]["prompt"]
    assert made["chat_template_time"] == "2026-07-30T23:50:00+02:00"
    at("2026-08-01T04:05:06-12:00")
    job.parts[1].unlink()
    assert job("mode=status") == 0
    assert "differ" not in capsys.readouterr().out
    assert job("output.rows_per_part=4") == 0
    assert job.rows("id, output_token_ids, prompt_tokens") == before
    # The prompts of the day on which it was asked, in every mode; a new output has a new day.
    for mode in ("mode=preview", "mode=plan"):
        assert job(mode) == 0
        assert "2026-07-30T23:50:00+02:00" in capsys.readouterr().err
    assert job("mode=preview") == 0
    assert "Today is 30 Jul 2026 23:50." in capsys.readouterr().out
    assert job("mode=preview", f"output.dir={job.folder / 'other'}") == 0
    assert "Today is 01 Aug 2026 04:05." in capsys.readouterr().out
    assert job("output.overwrite=true") == 0
    made = job.json("_manifest.json")["fingerprint"]["prompt"]
    assert made["chat_template_time"] == "2026-08-01T04:05:06-12:00"


def test_n14_a_run_that_is_interrupted_before_its_first_part_takes_a_new_time(
    job: Job, at: Any
) -> None:
    write(job, numbered(4), DATED)
    at("2026-07-30T12:00:00+00:00")
    assert job() == 0
    for part in job.parts:
        part.unlink()
    at("2026-07-31T12:00:00+00:00")
    assert job() == 0
    made = job.json("_manifest.json")["fingerprint"]["prompt"]
    assert made["chat_template_time"] == "2026-07-31T12:00:00+00:00"


def test_n14_a_template_without_the_time_stores_none_and_says_none(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    write(job, numbered(3))
    assert job() == 0
    assert "prints the time" not in capsys.readouterr().err
    assert job.json("_manifest.json")["fingerprint"]["prompt"]["chat_template_time"] is None


@pytest.mark.parametrize("mode", MODES)
def test_n01_a_template_that_leaves_out_the_text_is_refused_in_every_mode(
    job: Job, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(job, numbered(3), "{% for m in messages %}{{ m['role'] }}: {{ m.text }}{% endfor %}")
    assert job(mode) == 2
    assert "leaves out what the user's messages say" in capsys.readouterr().err


def test_n01_a_message_that_the_template_drops_fails_alone(job: Job) -> None:
    write(job, [[USER], [{"role": "system", "content": "x"}, USER]], BODY.replace(
        "{{ m['role'] }}: {{ m['content'] }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}"
    ))  # fmt: skip
    assert job() == 0
    assert [row["error_type"] for row in job.rows()] == [None, "invalid_messages"]


@pytest.mark.parametrize("mode", MODES)
def test_n04_every_mode_says_how_many_rows_end_with_the_assistant(
    job: Job, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = {"role": "assistant", "content": "It is"}
    write(job, [[USER], [USER, prefill], [{**USER, "content": "Where?"}, prefill]])
    assert job(mode) == 0
    said = capsys.readouterr()
    assert "in 2 rows the last message is the assistant's" in said.out + said.err
    assert job(mode, "prompt.continue_final_message=true", f"output.dir={job.folder}/b") == 0
    said = capsys.readouterr()
    assert "last message is the assistant's" not in said.out + said.err
    if mode == "mode=plan":
        assert job.json("_plan.json")["rows_ending_with_assistant"] == 2
    if mode == "mode=preview":
        assert "assistant: It is\ntoken ids" in said.out


@pytest.mark.parametrize("mode", MODES)
def test_n24_every_mode_says_that_a_column_of_tools_is_not_used(
    job: Job, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "weather"}}])
    write(job, [[USER]], tools=[tools])
    assert job(mode) == 0
    assert "the column 'tools' is not used" in capsys.readouterr().err
    write(job, [[USER]], "{{ tools | tojson }}" + BODY, tools=[tools])
    assert job(mode, f"output.dir={job.folder}/b") == 0
    said = capsys.readouterr()
    assert "is not used" not in said.err
    if mode == "mode=preview":
        assert '[{"type": "function", "function": {"name": "weather"}}]' in said.out


def test_n17_the_template_and_its_variables_belong_to_what_an_output_was_made_of(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    write(job, numbered(4), BODY + "{% if not enable_thinking %}<think></think>{% endif %}")
    key = "prompt.chat_template_kwargs"
    job.given[key] = "{enable_thinking: false}"
    assert job() == 0
    job.parts[0].unlink()
    assert job() == 0
    assert job(key + "={enable_thinking: true}") == 2
    assert "chat_template_kwargs.enable_thinking: false then, true now" in capsys.readouterr().err
    path = Path(job.given["prompt.chat_template_file"])
    moved = path.rename(path.with_name("moved.jinja"))
    assert job(f"prompt.chat_template_file={moved}") == 0
    moved.write_text(moved.read_text() + "!")
    capsys.readouterr()
    assert job(f"prompt.chat_template_file={moved}") == 2
    assert "prompt.chat_template" in capsys.readouterr().err
