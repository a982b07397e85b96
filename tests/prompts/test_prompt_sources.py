import json
import re
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from batchgen.errors import RowError, RowErrorType, UsageError
from batchgen.prompts.render import Chat, Renderer, Text, TokenIds
from batchgen.prompts.source import PromptSpec, Source

templated = partial(Text, is_marked=True)

TEXT = pa.schema([("prompt", pa.string())])
ALL = pa.schema(
    [
        ("prompt", pa.string()),
        ("messages", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int64())),
        ("review", pa.string()),
    ]
)


def rendered(spec, rows, schema, tokenizer):
    return Renderer(spec, schema, tokenizer).render(pa.RecordBatch.from_pylist(rows, schema=schema))


@pytest.mark.parametrize(
    ("columns", "source"),
    [
        (["prompt", "messages", "prompt_token_ids"], Source.TOKEN_IDS),
        (["prompt", "messages"], Source.MESSAGES),
        (["prompt"], Source.TEXT),
    ],
)
def test_the_first_default_column_found_is_the_source(columns, source, tokenizer):
    schema = pa.schema([ALL.field(name) for name in columns])
    assert Renderer(PromptSpec(), schema, tokenizer).source is source


def test_a_source_named_by_a_key_wins_and_only_its_columns_are_read(tokenizer):
    renderer = Renderer(PromptSpec(column="review"), ALL, tokenizer)
    assert (renderer.source, renderer.columns) == (Source.TEXT, ("review",))
    renderer = Renderer(PromptSpec(template="{{ review }}!"), ALL, tokenizer)
    assert (renderer.source, renderer.columns) == (Source.TEMPLATE, ("review",))


def test_sampling_columns_are_read_along(tokenizer):
    schema = TEXT.append(pa.field("max_tokens", pa.int32()))
    assert Renderer(PromptSpec(), schema, tokenizer).columns == ("prompt", "max_tokens")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (PromptSpec(column="prompt", template="x"), ["prompt.column", "prompt.template"]),
        (PromptSpec(column="promt"), ["prompt.column=promt", "did you mean prompt"]),
        (PromptSpec(template="{{ reviw }}"), ["reviw", "did you mean review"]),
        (PromptSpec(template="a\n{% if %}"), ["prompt.template, line 2"]),
        (PromptSpec(template="{{ review | shout }}"), ["shout"]),
        (PromptSpec(template="{% include 'x' %}"), ["includes"]),
        (PromptSpec(column="prompt", system="s"), ["prompt.system", "prompt.template"]),
        (PromptSpec(messages_column="messages", shots=[{}]), ["prompt.shots_file"]),
        (PromptSpec(column="prompt", format="chat"), ["prompt.format=chat"]),
        (PromptSpec(messages_column="messages", format="plain"), ["prompt.format=plain"]),
        (PromptSpec(token_ids_column="review"), ["'review'", "list of integers", "string"]),
        (PromptSpec(column="prompt_token_ids"), ["'prompt_token_ids'", "must be text"]),
    ],
)
def test_keys_that_cannot_work_are_refused_before_the_run(spec, words, tokenizer):
    with pytest.raises(UsageError) as caught:
        Renderer(spec, ALL, tokenizer)
    assert all(word in str(caught.value) for word in words)


def test_no_source_names_the_columns_and_what_to_do(tokenizer):
    with pytest.raises(UsageError, match=r"prompt\.column.*prompt\.template.*Columns: text, label"):
        Renderer(
            PromptSpec(), pa.schema([("text", pa.string()), ("label", pa.string())]), tokenizer
        )


def test_chat_messages_in_the_prompt_column_are_told_where_to_go(tokenizer):
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    with pytest.raises(UsageError, match=r"prompt\.messages_column=prompt"):
        Renderer(PromptSpec(), pa.schema([("prompt", kind)]), tokenizer)


def test_messages_and_chat_format_need_a_chat_template(base_tokenizer):
    for spec in (PromptSpec(), PromptSpec(template="x", format="chat")):
        schema = pa.schema([("messages", pa.string())])
        with pytest.raises(UsageError, match="chat template"):
            Renderer(spec, schema, base_tokenizer)


def test_only_token_ids_can_do_without_a_tokenizer():
    Renderer(PromptSpec(), pa.schema([("prompt_token_ids", pa.list_(pa.int32()))]), None)
    with pytest.raises(UsageError, match="tokenizer"):
        Renderer(PromptSpec(), TEXT, None)


@pytest.mark.parametrize(
    "kind",
    [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
def test_every_arrow_form_of_text_is_text(kind, tokenizer):
    table = pa.record_batch([pa.array(["a", None, ""]).cast(kind)], names=["prompt"])
    text, null, empty = Renderer(PromptSpec(), table.schema, tokenizer).render(table)
    assert text == Text("a")
    assert null.type is RowErrorType.NULL_PROMPT
    assert empty.type is RowErrorType.EMPTY_PROMPT


SHOTS = [{"review": "fine", "answer": "pos"}, {"review": "bad", "answer": 2}]


def test_the_plain_format_is_the_documented_concatenation(tokenizer):
    spec = PromptSpec(
        template="Review: {{ review }}\nLabel:", format="plain", system="Be brief.", shots=SHOTS
    )
    assert rendered(spec, [{"review": "so so"}], ALL, tokenizer) == [
        templated(
            "Be brief.\n\nReview: fine\nLabel: pos\n\nReview: bad\nLabel: 2\n\n"
            "Review: so so\nLabel:"
        )
    ]
    spec = PromptSpec(
        template="{{ review }}", format="plain", shots=SHOTS, separator="|", answer_prefix="="
    )
    assert rendered(spec, [{"review": "x"}], ALL, tokenizer) == [templated("fine=pos|bad=2|x")]


def test_the_chat_format_puts_system_and_shots_before_the_row(tokenizer):
    spec = PromptSpec(template="{{ review }}", system="Be brief.", shots=SHOTS)
    assert rendered(spec, [{"review": "so so"}], ALL, tokenizer) == [
        Chat(
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "fine"},
                {"role": "assistant", "content": "pos"},
                {"role": "user", "content": "bad"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "so so"},
            ]
        )
    ]


def test_auto_is_chat_only_where_the_tokenizer_has_a_chat_template(tokenizer, base_tokenizer):
    spec = PromptSpec(template="{{ review }}")
    assert Renderer(spec, ALL, tokenizer).format == "chat"
    assert Renderer(spec, ALL, base_tokenizer).format == "plain"


def test_a_chat_template_that_refuses_the_jobs_system_text_is_a_usage_error(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(UsageError, match="System role not supported"):
        Renderer(PromptSpec(template="{{ review }}", system="x"), ALL, tokenizer)


def test_a_row_that_breaks_the_template_names_what_it_broke_on(tokenizer):
    schema = pa.schema([("review", pa.string()), ("score", pa.int64())])
    spec = PromptSpec(template="{{ review }} {{ 10 // score }}", format="plain")
    rows = [{"review": "a", "score": 2}, {"review": None, "score": 1}, {"review": "b", "score": 0}]
    good, null, zero = rendered(spec, rows, schema, tokenizer)
    assert good == templated("a 5")
    assert null.type is zero.type is RowErrorType.TEMPLATE_ERROR
    assert "null in this row: review" in null.message
    assert "zero" in zero.message


def test_a_missing_field_inside_a_column_is_a_template_error_with_its_name(tokenizer):
    schema = pa.schema([("doc", pa.struct([("title", pa.string())]))])
    spec = PromptSpec(template="{{ doc.body }}", format="plain")
    (error,) = rendered(spec, [{"doc": {"title": "t"}}], schema, tokenizer)
    assert error.type is RowErrorType.TEMPLATE_ERROR
    assert "body" in error.message


def test_nulls_can_be_handled_in_the_template(tokenizer):
    spec = PromptSpec(
        template="{{ review or 'nothing' }}{% if prompt %}!{% endif %}", format="plain"
    )
    assert rendered(spec, [{"review": None}], ALL, tokenizer) == [templated("nothing")]


def test_a_template_drops_one_final_newline_and_keeps_all_else(tokenizer):
    spec = PromptSpec(template=" {{ review }}\n\n", format="plain")
    assert rendered(spec, [{"review": "x\n"}], ALL, tokenizer) == [templated(" x\n\n")]


def test_a_template_cannot_reach_into_python(tokenizer):
    spec = PromptSpec(template="{{ review.__class__.__mro__ }}", format="plain")
    (error,) = rendered(spec, [{"review": "x"}], ALL, tokenizer)
    assert error.type is RowErrorType.TEMPLATE_ERROR


def test_a_template_without_columns_renders_once_a_row(tokenizer):
    spec = PromptSpec(template="Tell a joke.", format="plain")
    renderer = Renderer(spec, ALL, tokenizer)
    assert renderer.columns == ()
    table = pa.RecordBatch.from_pylist([{"prompt": "a"}, {"prompt": "b"}])
    assert renderer.render(table) == [templated("Tell a joke.")] * 2


def test_an_empty_row_text_is_an_error_even_after_shots(tokenizer):
    for format in ("plain", "chat"):
        spec = PromptSpec(template="{{ review }}", shots=SHOTS, format=format)
        (error,) = rendered(spec, [{"review": ""}], ALL, tokenizer)
        assert error.type is RowErrorType.EMPTY_PROMPT


def test_shots_are_rendered_once_and_not_once_a_row(tokenizer):
    class Counted(str):
        prints = 0

        def __str__(self):
            Counted.prints += 1
            return "seen"

    shots = [{"review": Counted("seen"), "answer": "yes"}]
    spec = PromptSpec(template="{{ review }}", shots=shots, format="plain")
    results = rendered(spec, [{"review": "x"}] * 50, ALL, tokenizer)
    assert results == [templated("seen yes\n\nx")] * 50
    assert Counted.prints == 1


def test_token_ids_are_taken_as_they_are():
    schema = pa.schema([("prompt_token_ids", pa.list_(pa.int16()))])
    rows = [{"prompt_token_ids": value} for value in ([3, 1], [], None, [1, None])]
    ids, empty, null, hole = rendered(PromptSpec(), rows, schema, None)
    assert isinstance(ids, TokenIds)
    assert ids.ids.tolist() == [3, 1]
    assert [error.type for error in (empty, null, hole)] == [
        RowErrorType.EMPTY_PROMPT,
        RowErrorType.NULL_PROMPT,
        RowErrorType.INVALID_TOKEN_IDS,
    ]


@pytest.mark.parametrize(
    ("name", "kind", "word"),
    [("max_tokens", pa.float64(), "integer"), ("sampling_params", pa.int64(), "JSON")],
)
def test_sampling_columns_of_the_wrong_type_are_refused(name, kind, word, tokenizer):
    with pytest.raises(UsageError, match=f"'{name}'.*{word}"):
        Renderer(PromptSpec(), TEXT.append(pa.field(name, kind)), tokenizer)


MESSAGES = pa.list_(
    pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("tool_calls", pa.list_(pa.string())),
        ]
    )
)


def test_f14_null_keys_of_messages_are_pruned_before_the_template(tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": ["f"]}]},
        {"messages": [{"role": "user", "content": None}]},
    ]
    plain, calls, empty = rendered(
        PromptSpec(), rows, pa.schema([("messages", MESSAGES)]), tokenizer
    )
    assert plain == Chat([{"role": "user", "content": "hi"}])
    assert calls == Chat([{"role": "assistant", "tool_calls": ["f"]}])
    assert empty.type is RowErrorType.INVALID_MESSAGES
    assert "message 0 has no content" in empty.message


def test_messages_as_json_equal_messages_as_structs(tokenizer):
    schema = pa.schema([("messages", pa.string())])
    text = '[{"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": null}]'
    assert rendered(PromptSpec(), [{"messages": text}], schema, tokenizer) == [
        Chat([{"role": "user", "content": [{"type": "text", "text": each} for each in "ab"]}])
    ]


def call(arguments: Any) -> str:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return json.dumps([{"role": "assistant", "content": None, "tool_calls": calls}])


def arguments_seen(messages: list[Any], kind: pa.DataType, tokenizer: Any) -> list[Any]:
    rows = [{"messages": each} for each in messages]
    chats = rendered(PromptSpec(), rows, pa.schema([("messages", kind)]), tokenizer)
    return [chat.messages[0]["tool_calls"][0]["function"].get("arguments") for chat in chats]


def test_n02_tool_call_arguments_as_json_text_equal_those_given_as_an_object(tokenizer):
    texts = ['{"city": "Bern"}', "", " ", "null", None, '{"a": {"b": [1, null]}}']
    objects = [{"city": "Bern"}, {}, {}, {}, {}, {"a": {"b": [1, None]}}]
    seen = arguments_seen([*map(call, texts), *map(call, objects)], pa.string(), tokenizer)
    assert seen == objects + objects


def test_n02_calls_without_a_function_around_them_are_decoded_too(tokenizer):
    calls = [{"name": "weather", "arguments": '{"city": "Bern"}'}, "f", {"odd": 1}]
    text = json.dumps([{"role": "assistant", "tool_calls": calls}])
    schema = pa.schema([("messages", pa.string())])
    (chat,) = rendered(PromptSpec(), [{"messages": text}], schema, tokenizer)
    assert chat.messages[0]["tool_calls"] == [
        {"name": "weather", "arguments": {"city": "Bern"}},
        "f",
        {"odd": 1},
    ]


def test_n25_a_null_in_json_text_is_content_and_in_a_column_of_structs_padding(tokenizer):
    arguments = {"city": "Bern", "until": None, "legs": [{"to": None}]}
    assert arguments_seen([call(arguments)], pa.string(), tokenizer) == [arguments]
    # The text stays a text where only its message is a struct.
    function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    kind = pa.list_(
        pa.struct(
            [
                ("role", pa.string()),
                ("content", pa.string()),
                ("tool_calls", pa.list_(pa.struct([("function", function)]))),
            ]
        )
    )
    messages = json.loads(call(json.dumps(arguments)))
    assert arguments_seen([messages], kind, tokenizer) == [arguments]
    structs = [{"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]
    inferred = pa.array([structs]).type
    assert arguments_seen([structs], inferred, tokenizer) == [{"city": "Bern", "legs": [{}]}]


def test_n25_null_keys_of_a_message_itself_are_left_out_as_transformers_does(tokenizer):
    schema = pa.schema([("messages", pa.string())])
    text = '[{"role": "user", "content": "hi", "name": null, "tool_calls": null, "x": {"y": null}}]'
    assert rendered(PromptSpec(), [{"messages": text}], schema, tokenizer) == [
        Chat([{"role": "user", "content": "hi", "x": {"y": None}}])
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "not JSON"),
        ("[]", "at least one"),
        ('{"role": "user"}', "a list"),
        ('["hi"]', "message 0"),
        ('[{"from": "human", "value": "hi"}]', "role must be a text"),
        ('[{"role": "", "content": "x"}]', "role must be a text"),
        ('[{"role": "user", "content": 7}]', "content must be a text"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "image_url is not text"),
        ("[" * 100_000, "JSON|deeply"),
        ('[{"role": "user", "content": "x", "n": ' + "9" * 5000 + "}]", "not JSON"),
        (call("{broken"), "message 0: tool call 0: the arguments are not JSON"),
        (call("[1]"), "tool call 0: the arguments must be an object"),
    ],
)
def test_invalid_messages_are_row_errors_that_say_where(text, words, tokenizer):
    schema = pa.schema([("messages", pa.string())])
    (error,) = rendered(PromptSpec(), [{"messages": text}], schema, tokenizer)
    assert isinstance(error, RowError)
    assert error.type is RowErrorType.INVALID_MESSAGES
    assert re.search(words, error.message)
