"""``prompt.normalize``: the frame is spelt in one way, content is left as it is."""

import unicodedata
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.errors import UsageError
from batchgen.prompts.normalize import NormalizeSpec, TextRules
from batchgen.prompts.render import Chat, Renderer, Text
from batchgen.prompts.source import PromptSpec
from tests.support.tiny_tokenizers import make

templated = partial(Text, is_marked=True)

CAFE = "cafe\u0301"
ALL = NormalizeSpec("nfc", True, True, True, True, True)
ANY_TEXT = st.text(st.sampled_from("ab \t\u00a0\r\n\u2028e\u0301\u00e9\ufeff"))


def rendered(spec: PromptSpec, rows: list[dict[str, Any]]) -> tuple[list[Any], Renderer]:
    table = pa.RecordBatch.from_pylist(rows)
    tokenizer = make(chat=False)
    renderer = Renderer(spec, table.schema, tokenizer)
    return renderer.render(table), renderer


def spec(**values: Any) -> PromptSpec:
    return PromptSpec(**{"format": "plain", **values})


def test_the_jobs_own_texts_change_and_a_columns_content_does_not():
    content = f"{CAFE} \r\n x \t"
    job = spec(
        template=f"\ufeff{CAFE}:  \r\n{{{{ text }}}}  \nend {CAFE} \t",
        system=f"{CAFE}  is\r\n\r\n\r\n\r\n a  place ",
        separator=" \n",
        normalize=ALL,
    )
    (prompt,), renderer = rendered(job, [{"text": content}])
    assert prompt == templated(f"café is\n\n a place\ncafé:\n{content}\nend café")
    changes = renderer.normalizer.changes
    assert set(changes.parts) >= {"unicode", "trailing_space", "system_text"}
    assert not changes.rows
    assert "0 rows" in (changes.describe() or "")


def test_without_a_rule_every_byte_is_kept_and_nothing_is_counted():
    text = f"{CAFE} \u2028 {{{{ text }}}} \t"
    (prompt,), renderer = rendered(spec(template=text), [{"text": CAFE}])
    assert prompt == templated(f"{CAFE} \u2028 {CAFE} \t")
    assert renderer.normalizer.changes.describe() is None


def test_a_blank_before_a_column_is_no_trailing_space():
    rule = NormalizeSpec(trailing_space=True)
    job = spec(template="Review: {{ text }} \nLabel: ", normalize=rule)
    assert rendered(job, [{"text": "x"}])[0] == [templated("Review: x\nLabel:")]


def test_shots_are_sorted_by_their_text_only_where_that_is_asked():
    shots = [{"text": "b", "answer": "2"}, {"text": "a", "answer": "1"}]
    for is_sorted, head in ((False, "b 2|a 1|"), (True, "a 1|b 2|")):
        rule = NormalizeSpec(shots_order=is_sorted)
        job = spec(template="{{ text }}", shots=shots, separator="|", normalize=rule)
        (prompt,), renderer = rendered(job, [{"text": "z"}])
        assert prompt == templated(f"{head}z")
        assert renderer.normalizer.changes.parts["shots_order"] == is_sorted


def test_a_named_column_of_shots_is_put_in_order_and_counted_by_row():
    shots = [{"q": "b", "a": "2 "}, {"q": "a", "a": f"{CAFE}"}]
    rows = [{"shots": shots, "text": "t "}, {"shots": shots[::-1], "text": "u "}]
    job = spec(
        template="{% for s in shots %}{{ s.q }}={{ s.a }};{% endfor %}{{ text }}",
        normalize=NormalizeSpec("nfc", trailing_space=True, shots_order=True, columns=("shots",)),
    )
    prompts, renderer = rendered(job, rows)
    assert prompts == [templated("b=2;a=café;t "), templated("b=2;a=café;u ")]
    assert renderer.normalizer.changes.rows == {"unicode": 2, "trailing_space": 2, "shots_order": 1}


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def messages_of(rows: list[list[dict[str, str]]], rule: NormalizeSpec) -> list[Any]:
    tokenizer = make()
    table = pa.RecordBatch.from_pylist([{"messages": row} for row in rows])
    return Renderer(PromptSpec(normalize=rule), table.schema, tokenizer).render(table)


def test_rows_of_messages_that_differ_in_spelling_and_order_come_to_share_their_frame():
    rule = NormalizeSpec("nfc", True, True, True, True, True, columns=("messages",))
    first = chat(("system", "Be  kind. \r\n"), ("user", "a"), ("assistant", "1"),
                 ("user", "b "), ("assistant", "2"), ("user", f" ask {CAFE} \r\n"))  # fmt: skip
    second = chat(("user", "b"), ("assistant", "2\t"), ("user", "a"), ("assistant", "1"),
                  ("system", "Be kind."), ("user", "other"))  # fmt: skip
    second = [second[4], *second[:4], second[5]]
    one, two = messages_of([first, second], rule)
    assert isinstance(one, Chat)
    assert one.messages[:-1] == two.messages[:-1]
    assert one.messages[-1]["content"] == f" ask {CAFE} \r\n"
    assert [each["content"] for each in one.messages[1:-1]] == ["a", "1", "b", "2"]


def test_a_frame_that_is_no_list_of_pairs_keeps_its_order():
    rule = NormalizeSpec(shots_order=True, columns=("messages",))
    talk = chat(("user", "b"), ("user", "a"), ("assistant", "1"), ("user", "ask"))
    assert messages_of([talk], rule) == [Chat(talk)]


def test_a_system_message_in_the_middle_comes_first_and_the_rest_keeps_its_order():
    rule = NormalizeSpec(message_parts=True, columns=("messages",))
    talk = chat(("user", "hi"), ("system", "s"), ("assistant", "yes"), ("user", "ask"))
    (prompt,) = messages_of([talk], rule)
    assert [each["content"] for each in prompt.messages] == ["s", "hi", "yes", "ask"]


@pytest.mark.parametrize(
    ("job", "rows", "words"),
    [
        (spec(column="text", normalize=ALL), [{"text": "x"}], r"columns=\[text\]"),
        (
            spec(template="{{ text }}", normalize=NormalizeSpec("nfc", columns=("txt",))),
            [{"text": "x"}],
            "did you mean text",
        ),
        (spec(normalize=ALL), [{"prompt_token_ids": [1]}], "token ids"),
    ],
)
def test_rules_that_could_change_nothing_are_refused(job, rows, words):
    with pytest.raises(UsageError, match=words):
        rendered(job, rows)


@given(ANY_TEXT)
def test_rules_applied_twice_change_nothing_more_and_keep_every_letter(text):
    rules = TextRules(ALL)
    once = rules.system(rules.text(text, set()), set())
    changed: set[str] = set()
    assert rules.system(once, changed) == once
    assert not changed

    def letters(value: str) -> str:
        return "".join(unicodedata.normalize("NFC", value.replace("\ufeff", "")).split())

    assert letters(once) == letters(text)


@given(ANY_TEXT)
def test_line_ends_agree_with_pythons_own_lines(text):
    result = TextRules(NormalizeSpec(line_ends=True)).text(text, set())
    # A last line of one letter, so that Python counts an empty one as well.
    assert f"{result}|".split("\n") == f"{text}|".splitlines()
