import re
import shlex

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from batchgen.cli.escapes import as_hydra, quoted_form
from batchgen.cli.overrides import read_command_line
from batchgen.cli.resources import conf_dir
from batchgen.errors import UsageError


def read(*arguments: str) -> tuple[str, ...]:
    return read_command_line(arguments, conf_dir()).arguments


def value_of(argument: str):
    (line,) = read(argument)
    return OverridesParser.create().parse_override(line).value()


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_g07_a_misspelt_key_is_refused_in_all_three_forms(sign):
    with pytest.raises(UsageError, match=re.escape("Did you mean sampling.temperature?")):
        read(f"{sign}sampling.temprature=0.5")


def test_g07_a_key_without_its_group_is_refused_with_the_full_name():
    with pytest.raises(UsageError, match=re.escape("pool.block_size")):
        read("block_size=8")


def test_a_key_cannot_be_removed():
    with pytest.raises(UsageError, match="cannot be removed"):
        read("~sampling.seed")


def test_a_group_is_not_a_key():
    with pytest.raises(UsageError, match=re.escape("model.path")):
        read("model=org/name")


@pytest.mark.parametrize("argument", ["mode", "=x", "some words"])
def test_what_is_no_override_is_refused(argument):
    with pytest.raises(UsageError, match="key=value"):
        read(argument)


def test_g03_double_quotes_mean_what_they_mean_in_yaml():
    assert value_of(r'sampling.stop=["\n\n"]') == ["\n\n"]
    assert value_of(r'prompt.separator="\n"') == "\n"
    assert value_of(r'prompt.separator="a\tb\"c\\d\u00e9"') == 'a\tb"c\\dé'
    assert value_of('prompt.template="two\nlines"') == "two\nlines"


def test_g03_single_quotes_stay_literal():
    assert value_of(r"sampling.stop=['\n']") == [r"\n"]


def test_an_escape_that_yaml_does_not_have_is_refused():
    with pytest.raises(UsageError, match=re.escape(r"no escape \d")):
        read(r'prompt.template="\d"')


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_g03_any_text_written_as_a_yaml_string_arrives_as_it_is(text):
    written = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=10**9)
    rewritten = as_hydra(written.strip(), is_text=True)
    override = OverridesParser.create().parse_override(f"prompt.system={rewritten}")
    assert override.value() == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_g02_the_quoted_form_that_messages_show_brings_the_value_through(text):
    (typed,) = shlex.split(quoted_form("prompt.system", text, is_list=False))
    assert value_of(typed) == text


@pytest.mark.parametrize("text", ["1e5", "123", "007", "1_000", "true", "inf", "0.50"])
def test_g02_text_keys_keep_what_was_typed(text):
    assert value_of(f"model.path={text}") == text
    assert value_of(f"sampling.stop=[x, {text},y]") == ["x", text, "y"]


def test_numbers_stay_numbers_for_number_keys():
    assert value_of("sampling.temperature=1e-1") == pytest.approx(0.1)
    assert value_of("sampling.stop_token_ids=[1,2]") == [1, 2]


@pytest.mark.parametrize(
    ("argument", "shown", "file_key"),
    [
        ("sampling.stop=[</s>,<|im_end|>]", '["</s>","<|im_end|>"]', "sampling.stop_file"),
        ("prompt.template=Review: {{ text }}", '"Review: {{ text }}"', "prompt.template_file"),
        ("prompt.template={a}", '"{a}"', "prompt.template_file"),
        ("prompt.system=a=b", '"a=b"', "prompt.system_file"),
        ("model.path=#1", '"#1"', None),
        ("input.path=[a]", '"[a]"', None),
    ],
)
def test_g02_what_the_lexer_stumbles_over_is_shown_in_quotes(argument, shown, file_key):
    with pytest.raises(UsageError) as refused:
        read(argument)
    message = str(refused.value)
    (typed,) = shlex.split(message.splitlines()[2])
    assert typed.endswith(f"={shown}")
    read(typed)
    assert (file_key or "") in message
    assert "_file" not in message or file_key


def test_g02_a_comma_without_a_sweep_is_shown_in_quotes():
    with pytest.raises(UsageError, match="needs -m") as refused:
        read("input.path=a,b.parquet")
    assert """'input.path="a,b.parquet"'""" in str(refused.value)
    with pytest.raises(UsageError, match="needs -m"):
        read("pool.block_size=8,16")
    read("-m", "pool.block_size=8,16")


def test_percent_and_at_need_no_quotes():
    assert value_of("prompt.system=50% @home") == "50% @home"


def test_interpolations_are_left_to_hydra():
    assert read("output.dir=out/${pool.block_size}") == ("output.dir=out/${pool.block_size}",)


@pytest.mark.parametrize("argument", ["job=", "job=null", 'job=""'])
def test_an_empty_job_is_refused(argument):
    with pytest.raises(UsageError, match="mode=jobs"):
        read(argument)


def test_a_job_folder_may_end_with_a_slash():
    assert read("job=./mine/") == ('job="./mine"',)
