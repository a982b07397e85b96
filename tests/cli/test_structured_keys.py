"""The keys of structured outputs: one structure, files found beside the job, a space missed."""

import pytest

from batchgen.cli.settle import settle
from batchgen.config import PromptFormat
from batchgen.errors import UsageError

pytestmark = pytest.mark.usefixtures("caller")


def test_two_structures_are_refused_by_their_names(nested):
    with pytest.raises(UsageError, match=r"structured\.choice and structured\.json_file are both"):
        settle(nested(**{"structured.choice": ["a"], "structured.json_file": "in.parquet"}))


def test_the_schemas_file_is_the_callers_and_must_be_there(nested, caller):
    (caller / "schema.json").write_text("{}")
    settled = settle(nested(**{"structured.json_file": "schema.json"}))
    assert settled.config.structured.json_file == str(caller / "schema.json")
    with pytest.raises(UsageError, match=r"structured\.json_file=.*none\.json is not a file"):
        settle(nested(**{"structured.json_file": "none.json"}))


def test_choices_come_as_text_from_the_command_line(command, recorder):
    assert command('structured.choice=[yes, no, 1, " off"]') == 0
    assert recorder.configs[0].structured.choice == ["yes", "no", "1", " off"]


@pytest.mark.parametrize("key", ["structured.choice", "sampling.score_choices"])
@pytest.mark.parametrize(
    ("choices", "changes", "warns"),
    [
        (["yes", " no"], {}, True),
        ([" yes", " no"], {}, False),
        (["yes", "no"], {"prompt.answer_prefix": ""}, False),
        (["yes", "no"], {"prompt.format": PromptFormat.chat}, False),
        (["yes", "no"], {"prompt.shots_file": None, "prompt.system": "Label."}, False),
    ],
)
def test_a_choice_without_the_space_of_the_shots_answers_is_warned_about(
    nested, caller, key, choices, changes, warns
):
    (caller / "shots.jsonl").write_text("{}")
    values = {
        "prompt.template": "{{ text }}",
        "prompt.shots_file": "shots.jsonl",
        "prompt.format": PromptFormat.plain,
        key: choices,
    }
    warnings = settle(nested(**(values | changes))).warnings
    assert bool(warnings) == warns
    assert all("' yes'" in warning for warning in warnings)


def test_an_empty_choice_gets_no_advice_on_its_space(nested, caller):
    (caller / "shots.jsonl").write_text("{}")
    values = {
        "prompt.template": "{{ text }}",
        "prompt.shots_file": "shots.jsonl",
        "prompt.format": PromptFormat.plain,
    }
    assert not settle(nested(**values, **{"structured.choice": ["", " no"]})).warnings
