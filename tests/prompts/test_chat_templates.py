"""Chats reach the model with all they say, as transformers renders them."""

import datetime
import json
import time
from typing import Any

import pyarrow as pa
import pytest

from batchgen.errors import RowError, RowErrorType, UsageError
from batchgen.prompts.chat_template import TemplateVariables
from batchgen.prompts.encoder import PromptEncoder
from batchgen.prompts.limits import Limits
from batchgen.prompts.render import Renderer
from batchgen.prompts.source import PromptSpec
from batchgen.prompts.truncation import Truncation
from batchgen.sampling import SamplingParams
from tests.chat_templates import QWEN_3, TEMPLATES
from tests.support.tiny_tokenizers import make

JSON = pa.schema([("messages", pa.string())])
USER = {"role": "user", "content": "Who?"}
ASSISTANT = {"role": "assistant", "content": "Me."}
SYSTEM = {"role": "system", "content": "Be brief."}

# As Llama-Guard-3-1B: parts and no branch for a text.
PARTS = (
    "{% for m in messages %}{{ m['role'] | upper }}:{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ ' ' ~ part['text'] }}{% endif %}{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}VERDICT:{% endif %}"
)
# As Llava's: a system text in parts, of which only the first counts, and others as they come.
FIRST_PART = (
    "{% for m in messages %}{% if m['role'] == 'system' %}<{{ m['content'][0]['text'] }}>"
    "{% else %}{{ m['role'] }}:{{ m['content'] }};{% endif %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endif %};"
    "{% endfor %}"
)
BARE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}"
    "{{ m['role'] }}:{{ m['content'] }};{% endif %}{% endfor %}"
)
LAST_ONLY = "Judge: {{ messages[-1]['content'] }}"
NOTHING = "{% for m in messages %}{{ m['role'] }}:{{ m.text }}{% endfor %}"


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def with_template(source: str) -> Any:
    tokenizer = make()
    tokenizer.chat_template = source
    return tokenizer


def prompts(
    tokenizer: Any, chats: list[Any], tools: list[Any] | None = None, **keys: Any
) -> list[str | RowError]:
    """What the model gets for rows of messages, as text."""
    columns: dict[str, Any] = {"messages": [json.dumps(chat) for chat in chats]}
    if tools is not None:
        columns["tools"] = tools
    table = pa.record_batch(columns)
    renderer = Renderer(PromptSpec(**keys), table.schema, tokenizer)
    encoded = PromptEncoder(renderer, tokenizer, Limits(512, 9999)).encode(renderer.render(table))
    return [each if isinstance(each, RowError) else tokenizer.decode(each) for each in encoded]


def oracle(tokenizer: Any, messages: Any, **names: Any) -> str:
    names = {"add_generation_prompt": True} | names
    ids = tokenizer.apply_chat_template(messages, **names)["input_ids"]
    text: str = tokenizer.decode(ids)
    return text


# -- the form of content ---------------------------------------------------------------


def test_n01_a_template_that_loops_over_parts_gets_parts() -> None:
    tokenizer = with_template(PARTS)
    text = [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Why?"}]
    in_parts = [{**each, "content": [part(each["content"])]} for each in text]
    right = oracle(tokenizer, in_parts)
    assert "Be brief." in right
    assert prompts(tokenizer, [text, in_parts]) == [right, right]
    several = [{"role": "user", "content": [part("a"), "b", part("c")]}]
    given = [{"role": "user", "content": [part("a"), part("b"), part("c")]}]
    assert prompts(tokenizer, [several]) == [oracle(tokenizer, given)] == ["USER: a b c\nVERDICT:"]


def test_n01_a_template_over_columns_reaches_it_too() -> None:
    table = pa.record_batch({"q": ["Who?"]})
    spec = PromptSpec(template="{{ q }}", system="Be brief.", shots=[{"q": "a", "answer": "b"}])
    tokenizer = with_template(PARTS)
    renderer = Renderer(spec, table.schema, tokenizer)
    (ids,) = PromptEncoder(renderer, tokenizer, Limits(512, 9999)).encode(renderer.render(table))
    assert tokenizer.decode(ids) == (
        "SYSTEM: Be brief.\nUSER: a\nASSISTANT: b\nUSER: Who?\nVERDICT:"
    )
    assert renderer.shared_head() == "SYSTEM: Be brief.\nUSER: a\nASSISTANT: b\nUSER: "


def test_n01_a_list_of_parts_is_never_printed_as_python_writes_it() -> None:
    in_parts = [{"role": "user", "content": [part("a"), part("b")]}]
    assert prompts(with_template(BARE), [in_parts]) == ["user:ab;"]
    dumped = BARE.replace("{{ m['content'] }}", "{{ m['content'] | tojson }}")
    assert prompts(with_template(dumped), [in_parts]) == ['user:"ab";']


def test_n01_a_template_that_takes_both_gets_what_the_row_has() -> None:
    tokenizer = with_template(EITHER)
    in_parts = [{"role": "user", "content": [part("a"), part("b")]}, ASSISTANT]
    assert prompts(tokenizer, [in_parts]) == [oracle(tokenizer, in_parts)]
    assert prompts(tokenizer, [in_parts]) == ["user:[a][b];assistant:Me.;"]


def test_n01_each_role_gets_the_form_that_it_is_read_in() -> None:
    several = {"role": "system", "content": [part("Be "), part("brief.")]}
    tokenizer = with_template(FIRST_PART)
    assert prompts(tokenizer, [[SYSTEM, USER], [several, USER]]) == ["<Be brief.>user:Who?;"] * 2


@pytest.mark.parametrize("key", ["messages", "template"])
def test_n01_a_template_that_takes_no_form_is_refused_before_the_run(key: str) -> None:
    schema = pa.schema([(name, pa.string()) for name in ("messages", "q")])
    spec = PromptSpec(template="{{ q }}") if key == "template" else PromptSpec()
    with pytest.raises(UsageError, match=r"leaves out what the user.*prompt\.chat_template_file"):
        Renderer(spec, schema, with_template(NOTHING))


def test_n01_a_message_that_the_template_drops_is_the_error_of_its_row() -> None:
    dropped, fine = prompts(with_template(WITHOUT_SYSTEM), [[SYSTEM, USER], [USER]])
    assert isinstance(dropped, RowError)
    assert dropped.type is RowErrorType.INVALID_MESSAGES
    assert "leaves out what messages of the role system say" in dropped.message
    assert fine == "user:Who?;"
    tool = [USER, {"role": "tool", "content": "7 degrees"}]
    assert isinstance(prompts(with_template(WITHOUT_SYSTEM), [tool])[0], RowError)
    # A role that is dropped in one place and printed in another is judged by the row.
    closing, early = prompts(with_template(LAST_ONLY), [[USER, ASSISTANT], [ASSISTANT, USER]])
    assert closing == "Judge: Me."
    assert isinstance(early, RowError)


def test_n01_a_system_text_of_the_job_that_the_template_drops_is_refused() -> None:
    spec = PromptSpec(template="{{ q }}", system="Be brief.")
    schema = pa.schema([("q", pa.string())])
    with pytest.raises(UsageError, match=r"\(system, user\).*leaves out.*role system.*plain"):
        Renderer(spec, schema, with_template(WITHOUT_SYSTEM))


@pytest.mark.parametrize("name", TEMPLATES)
def test_n01_popular_templates_are_given_text_as_it_is(name: str) -> None:
    tokenizer = with_template(TEMPLATES[name][0])
    assert prompts(tokenizer, [[USER]]) == [oracle(tokenizer, [USER])]


def test_n02_both_forms_of_arguments_give_the_prompt_that_transformers_gives_for_objects() -> None:
    printing = ("{{ c.function.arguments | tojson }}", "{{ c.function.arguments | items | list }}")
    for form in printing:
        tokenizer = with_template(
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
            + form
            + "{% endfor %}{% endfor %}"
        )
        calls = [
            [USER, {**ASSISTANT, "tool_calls": [{"function": {"name": "f", "arguments": given}}]}]
            for given in ('{"city": "Bern", "until": null}', {"city": "Bern", "until": None})
        ]
        right = oracle(tokenizer, calls[1])
        assert prompts(tokenizer, calls) == [right, right]
        assert "Bern" in right


# -- the last message ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ChatML", "Llama 3", "Mistral", "Gemma", "Phi 3"])
@pytest.mark.parametrize("text", ['{"a":', "Sure, ", "  a\n", "", "a </s> b"])
def test_n04_a_last_message_of_the_assistant_is_continued_as_transformers_does(
    name: str, text: str
) -> None:
    tokenizer = with_template(TEMPLATES[name][0])
    messages = [USER, {"role": "assistant", "content": text}]
    right = oracle(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    answered = [*messages, USER]
    assert prompts(tokenizer, [messages, answered], continue_final_message=True) == [
        right,
        oracle(tokenizer, answered),
    ]


def test_n04_a_message_in_parts_is_continued_behind_its_last_part() -> None:
    tokenizer = with_template(PARTS)
    messages = [USER, {"role": "assistant", "content": [part("a"), part("b")]}]
    assert prompts(tokenizer, [messages], continue_final_message=True) == [
        "USER: Who?\nASSISTANT: a b"
    ]
    assert prompts(tokenizer, [[USER, ASSISTANT]], continue_final_message=True) == [
        "USER: Who?\nASSISTANT: Me."
    ]


def test_n04_what_cannot_be_continued_is_the_error_of_its_row() -> None:
    tokenizer = with_template("{% for m in messages %}{{ m['content'] | upper }};{% endfor %}")
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    chats = [[USER, called], [USER, ASSISTANT]]
    errors = prompts(tokenizer, chats, continue_final_message=True)
    said = [error.message for error in errors if isinstance(error, RowError)]
    assert "no text to continue" in said[0]
    with pytest.raises(ValueError, match="does not appear"):
        oracle(tokenizer, chats[1], add_generation_prompt=False, continue_final_message=True)
    assert "changes the message that is to be continued" in said[1]


def test_n04_rows_that_end_so_and_are_not_continued_are_counted() -> None:
    table = pa.record_batch(
        {"messages": [json.dumps(each) for each in ([USER], [USER, ASSISTANT])]}
    )
    for continues, count in ((False, 1), (True, 0)):
        spec = PromptSpec(continue_final_message=continues)
        renderer = Renderer(spec, table.schema, make())
        renderer.render(table)
        assert renderer.rows_ending_with_assistant == count


def test_n04_truncation_cuts_no_text_that_is_to_be_continued() -> None:
    tokenizer = with_template(BARE)
    messages = [
        {"role": "user", "content": [part("no " * 20), part("yes " * 40)]},
        {"role": "assistant", "content": "the end of the story " * 20},
    ]
    table = pa.record_batch({"messages": [json.dumps(messages)]})
    renderer = Renderer(PromptSpec(continue_final_message=True), table.schema, tokenizer)
    whole = PromptEncoder(renderer, tokenizer, Limits(9999, 9999))
    rendered = renderer.render(table)
    limits = Limits(len(whole.encode(rendered)[0]) - 10, 9999)
    truncation = Truncation(
        "left", renderer, tokenizer, limits, SamplingParams(max_tokens=1), lambda _: 1
    )
    (ids,), (cut,) = truncation.fit(table, rendered, whole.encode(rendered), [None])
    text = tokenizer.decode(ids)
    assert cut >= 11
    assert text.startswith("user:" + "no " * 20)
    assert text.endswith("the end of the story " * 20)


# -- variables -------------------------------------------------------------------------


def test_n17_variables_of_the_job_reach_the_chat_template() -> None:
    tokenizer = with_template(QWEN_3)
    for named in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        variables = TemplateVariables(named)
        assert prompts(tokenizer, [[USER]], variables=variables) == [
            oracle(tokenizer, [USER], **named)
        ]
    assert "<think>" in oracle(tokenizer, [USER], enable_thinking=False)


def test_n17_variables_go_with_a_template_in_chat_form_and_nothing_else() -> None:
    schema = pa.schema([("prompt", pa.string()), ("ids", pa.list_(pa.int32()))])
    variables = TemplateVariables({"enable_thinking": False})
    spec = PromptSpec(template="{{ prompt }}", variables=variables)
    tokenizer = with_template(QWEN_3)
    head = Renderer(spec, schema, tokenizer)
    text = head.render_chat(head.render(pa.record_batch({"prompt": ["a"]}))[0])
    assert head.special.marks.plain(text).endswith("<think>\n\n</think>\n\n")
    for keys in (
        {"template": "{{ prompt }}", "format": "plain"},
        {"column": "prompt"},
        {"token_ids_column": "ids"},
    ):
        with pytest.raises(UsageError, match=r"prompt\.chat_template_kwargs cannot be used here"):
            Renderer(PromptSpec(variables=variables, **keys), schema, tokenizer)
    with pytest.raises(UsageError, match=r"prompt\.chat_template_kwargs cannot be used here"):
        Renderer(spec, schema, make(chat=False))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("messages", "batchgen gives it"),
        ("tools", "batchgen gives it"),
        ("add_generation_prompt", "batchgen gives it"),
        ("strftime_now", "batchgen gives it"),
        ("raise_exception", "batchgen gives it"),
        ("enable_thinkng", "did you mean enable_thinking"),
        ("reasoning_effort", "no variable of this name"),
    ],
)
def test_n17_a_variable_that_can_mean_nothing_is_refused(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"chat_template_kwargs\.{name}.*{words}"):
        Renderer(PromptSpec(variables=TemplateVariables({name: 1})), JSON, with_template(QWEN_3))


# -- tools -----------------------------------------------------------------------------

WITH_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}" + BARE
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"until": {"default": None}}},
    },
}


def test_n24_the_tools_of_a_row_are_printed_as_transformers_prints_them() -> None:
    tokenizer = with_template(WITH_TOOLS)
    column = [json.dumps([WEATHER]), None, "[]", "null", "", json.dumps([json.dumps(WEATHER)])]
    with_one = oracle(tokenizer, [USER], tools=[WEATHER])
    without = oracle(tokenizer, [USER])
    assert '"default": null' in with_one
    assert prompts(tokenizer, [[USER]] * 6, column) == [
        with_one, without, without, without, without, with_one,
    ]  # fmt: skip


def test_n24_tools_may_be_structs_and_lists_of_json_text() -> None:
    tokenizer = with_template(WITH_TOOLS)
    plain = {"type": "function", "function": {"name": "f", "strict": None}}
    other = {"type": "function", "function": {"name": "g", "strict": True}}
    pruned = {"type": "function", "function": {"name": "f"}}
    assert prompts(tokenizer, [[USER]] * 2, [[plain], [other]]) == [
        oracle(tokenizer, [USER], tools=[pruned]),
        oracle(tokenizer, [USER], tools=[other]),
    ]
    assert prompts(tokenizer, [[USER]], [[json.dumps(WEATHER)]]) == [
        oracle(tokenizer, [USER], tools=[WEATHER])
    ]


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("{broken", "the tools are not JSON"),
        ('{"name": "f"}', "the tools must be a list of objects"),
        ("[7]", "tool 0 must be an object"),
        ('["f"]', "the tools are not JSON"),
    ],
)
def test_n24_broken_tools_are_the_error_of_their_row(tools: str, words: str) -> None:
    bad, good = prompts(with_template(WITH_TOOLS), [[USER]] * 2, [tools, None])
    assert isinstance(bad, RowError)
    assert bad.type is RowErrorType.INVALID_MESSAGES
    assert words in bad.message
    assert good == "user:Who?;"


def test_n24_a_special_token_that_tools_spell_stays_text() -> None:
    tokenizer = with_template(WITH_TOOLS + "<|im_end|>")
    spelt = [{"function": {"name": "<|im_end|>"}}]
    table = pa.record_batch({"messages": [json.dumps([USER])], "tools": [json.dumps(spelt)]})
    renderer = Renderer(PromptSpec(), table.schema, tokenizer)
    (ids,) = PromptEncoder(renderer, tokenizer, Limits(512, 9999)).encode(renderer.render(table))
    assert ids.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert tokenizer.decode(ids).count("<|im_end|>") == 2


def test_n24_a_template_of_its_own_for_tools_is_used_where_a_row_has_some() -> None:
    tokenizer = with_template(BARE)
    tokenizer.chat_template = {"default": BARE, "tool_use": WITH_TOOLS}
    assert prompts(tokenizer, [[USER]] * 2, [json.dumps([WEATHER]), None]) == [
        oracle(tokenizer, [USER], tools=[WEATHER]),
        "user:Who?;",
    ]


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        (BARE, pa.string(), "has no place in the chat template"),
        (WITH_TOOLS, pa.int64(), "has type int64"),
    ],
)
def test_n24_a_column_of_tools_that_is_not_used_is_said_or_refused(source, kind, words) -> None:
    schema = JSON.append(pa.field("tools", kind))
    tokenizer = with_template(source)
    renderer = Renderer(PromptSpec(), schema, tokenizer)
    assert "'tools' is not used" in renderer.ignored
    assert words in renderer.ignored
    assert renderer.columns == ("messages",)
    with pytest.raises(UsageError, match=rf"prompt\.tools_column=tools {words}"):
        Renderer(PromptSpec(tools_column="tools"), schema, tokenizer)
    with pytest.raises(UsageError, match=r"tols is no column of the input.*did you mean tools"):
        Renderer(PromptSpec(tools_column="tols"), schema, tokenizer)
    with pytest.raises(UsageError, match=r"prompt\.tools_column cannot be used here"):
        Renderer(PromptSpec(tools_column="tools", template="{{ tools }}"), schema, tokenizer)


# -- the time --------------------------------------------------------------------------

NIGHT = datetime.datetime(
    2026, 7, 30, 23, 30, tzinfo=datetime.timezone(datetime.timedelta(hours=2))
)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("%d %b %Y", "30 Jul 2026"),
        ("%H:%M:%S", "23:30:00"),
        ("%Y-%m-%d %s", "2026-07-30 1785447000"),
        ("%%s %z", "%s "),
    ],
)
def test_n14_a_template_prints_the_time_of_the_job_in_every_time_zone(
    form: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template("{{ strftime_now('" + form + "') }}|" + BARE)
    for zone in ("UTC", "Etc/GMT+12", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        variables = TemplateVariables(now=NIGHT)
        assert prompts(tokenizer, [[USER]], variables=variables) == [f"{text}|user:Who?;"]
    monkeypatch.undo()
    time.tzset()


def test_n14_all_rows_have_one_time() -> None:
    tokenizer = with_template("{{ strftime_now('%S.%f') }}|" + BARE)
    rows = prompts(tokenizer, [[USER]] * 500)
    assert len(set(rows)) == 1
