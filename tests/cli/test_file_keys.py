"""Long texts that stand in files: read as they would be on the command line."""

import pytest

from batchgen.cli.settle import settle
from batchgen.errors import UsageError
from batchgen.job.inputs import job_sampling

LABELS = '- " positive"\n- " negative"\n'


def test_choices_of_a_file_are_those_that_could_have_been_typed(caller, nested):
    (caller / "labels.yaml").write_text(LABELS)
    for key in ("structured.choice", "sampling.score_choices"):
        in_file = settle(nested(**{f"{key}_file": "labels.yaml"})).config
        typed = settle(nested(**{key: [" positive", " negative"]})).config
        assert job_sampling(in_file) == job_sampling(typed)


def test_a_regex_of_a_file_loses_only_the_files_last_line_break(caller, nested):
    (caller / "answer.txt").write_text("(yes|no)\\n\n\n")
    config = settle(nested(**{"structured.regex_file": "answer.txt"})).config
    assert job_sampling(config).structured.regex == "(yes|no)\\n\n"


@pytest.mark.parametrize("key", ["structured.choice", "sampling.score_choices"])
def test_a_list_that_is_named_twice_is_refused(caller, nested, key):
    (caller / "labels.yaml").write_text(LABELS)
    with pytest.raises(UsageError, match=f"{key} and {key}_file are both named"):
        settle(nested(**{key: [" other"], f"{key}_file": "labels.yaml"}))


@pytest.mark.parametrize(
    "key",
    ["structured.choice_file", "sampling.score_choices_file", "structured.regex_file"],
)
def test_a_file_that_is_not_there_is_named_with_its_key(caller, nested, key):
    with pytest.raises(UsageError, match=key) as caught:
        settle(nested(**{key: "absent.yaml"}))
    assert str(caller / "absent.yaml") in str(caught.value)


def test_two_structures_are_refused_also_where_one_stands_in_a_file(caller, nested):
    (caller / "labels.yaml").write_text(LABELS)
    with pytest.raises(UsageError, match=r"structured\.choice and structured\.regex"):
        settle(nested(**{"structured.choice_file": "labels.yaml", "structured.regex": "a"}))
