import json
import time
import unicodedata

import pyarrow as pa
import pytest
from tokenizers import normalizers

from batchgen.errors import RowErrorType
from batchgen.prompts.limits import Limits, TextBound
from batchgen.prompts.render import Renderer
from batchgen.prompts.source import PromptSpec
from batchgen.prompts.store import store_schema
from batchgen.prompts.tokenize import tokenize_batches
from batchgen.sampling import SamplingParams

LIMITS = Limits(max_model_len=512, vocab_size=100_000)
TALK = [{"role": "user", "content": "the quick fox"}, {"role": "assistant", "content": "no"}]


BY_COLUMNS = PromptSpec()


def tokenized(batch, tokenizer, spec=BY_COLUMNS, limits=LIMITS):
    renderer = Renderer(spec, batch.table.schema, tokenizer)
    (out,) = tokenize_batches([batch], renderer, tokenizer, limits, SamplingParams())
    return out


def ids_of(batch, tokenizer, **options):
    return tokenized(batch, tokenizer, **options).column("token_ids").to_pylist()


def test_e01_exactly_one_bos_from_messages_rendered_text_and_plain_text(bos_tokenizer, batch_of):
    bos = bos_tokenizer.bos_token_id
    expected = bos_tokenizer.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
    assert expected.count(bos) == 1
    (chat,) = ids_of(batch_of([{"messages": json.dumps(TALK)}]), bos_tokenizer)
    assert chat == expected
    text = bos_tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    again, plain, two = ids_of(
        batch_of([{"prompt": text}, {"prompt": "the fox"}, {"prompt": "<s><s>x"}]), bos_tokenizer
    )
    assert again == expected
    assert plain == bos_tokenizer("the fox")["input_ids"]
    assert plain.count(bos) == 1
    assert two == bos_tokenizer("<s><s>x", add_special_tokens=False)["input_ids"]


def test_a_tokenizer_that_adds_no_bos_gets_none_added(tokenizer, batch_of):
    batch = batch_of([{"prompt": "the fox"}, {"prompt": "<s>the fox"}])
    plain, rendered = ids_of(batch, tokenizer)
    assert rendered == [tokenizer.bos_token_id, *plain]


def test_template_chats_equal_transformers_own_chat_ids(tokenizer, batch_of):
    spec = PromptSpec(
        template="{{ q }}?", system="Be brief.", shots=[{"q": "fox", "answer": "yes"}]
    )
    questions = ["dog", " lazy ", "caf\u00e9\n\nend", "a" * 50]
    got = ids_of(batch_of([{"q": q} for q in questions]), tokenizer, spec=spec)
    for question, ids in zip(questions, got, strict=True):
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "fox?"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": f"{question}?"},
        ]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert ids == expected["input_ids"]


def test_e08_a_prompt_is_tokenised_as_one_text_wherever_its_parts_meet(base_tokenizer, batch_of):
    for head, tail in (("Answer: ", "yes"), ("Answer:", " yes"), ("the an", "swer")):
        spec = PromptSpec(template="{{ x }}", system=head, separator="", format="plain")
        (ids,) = ids_of(batch_of([{"x": tail}]), base_tokenizer, spec=spec)
        assert ids == base_tokenizer(head + tail)["input_ids"]


def test_e09_nothing_is_normalised_but_by_the_tokenizer(make_tokenizer, tokenizer, batch_of):
    apart, joined = "e\u0301 fox", "\u00e9 fox"
    batch = batch_of([{"prompt": apart}, {"prompt": joined}])
    first, second = ids_of(batch, tokenizer)
    assert first != second
    assert tokenizer.decode(first) == apart
    assert tokenizer.decode(second) == joined
    nfc = make_tokenizer("nfc")
    first, second = ids_of(batch, nfc)
    assert first == second == nfc(unicodedata.normalize("NFC", apart))["input_ids"]


@pytest.mark.parametrize("piece", ["a", "a b ", "\u00e9"])
def test_e06_very_long_texts_are_rejected_cheaply_and_block_nobody(piece, tokenizer, batch_of):
    texts = [piece * n for n in (10_000, 20_000, 40_000)]
    batch = batch_of([{"prompt": text} for text in [*texts, "the fox"]])
    started = time.process_time()
    out = tokenized(batch, tokenizer)
    assert time.process_time() - started < 2
    assert out.column("error_type").to_pylist() == ["prompt_too_long"] * 3 + [None]


def test_the_cheap_bound_never_exceeds_the_true_count(make_tokenizer):
    texts = [
        "The quick brown fox",
        " " * 300,
        "e\u0301" * 90,
        "<|im_end|>" * 30,
        "\U0001f336" * 9,
        "a",
    ]
    for kind in ("bytes", "nfc", "metaspace"):
        tokenizer = make_tokenizer(kind)
        bound = TextBound(tokenizer)
        for text in texts:
            count = len(tokenizer(text)["input_ids"])
            assert 0 < bound.min_tokens(text) <= count


def test_there_is_no_cheap_bound_where_a_tokenizer_may_drop_text(make_tokenizer):
    strips = make_tokenizer(rstrip=True)
    assert TextBound(strips).min_tokens("x" * 10_000) == 0
    lowers = make_tokenizer()
    lowers.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Strip()]
    )
    assert TextBound(lowers).min_tokens(" " * 10_000) == 0


def test_a_prompt_that_leaves_no_room_for_a_token_says_both_numbers(batch_of):
    batch = batch_of([{"prompt_token_ids": [1] * length} for length in (7, 8, 9)])
    out = tokenized(batch, None, limits=Limits(8, 10))
    assert out.column("error_type").to_pylist() == [None, "prompt_too_long", "prompt_too_long"]
    message = out.column("error_message")[2].as_py()
    assert "9 tokens" in message
    assert "max_model_len=8" in message


def test_the_token_counted_limit_holds_for_text_too(tokenizer, batch_of):
    count = len(tokenizer("the lazy dog")["input_ids"])
    batch = batch_of([{"prompt": "the lazy dog"}])
    for room, kind in ((count + 1, None), (count, "prompt_too_long")):
        out = tokenized(batch, tokenizer, limits=Limits(room, 100_000))
        assert out.column("error_type").to_pylist() == [kind]


def test_ids_outside_the_vocabulary_are_row_errors(batch_of):
    schema = pa.schema([("prompt_token_ids", pa.list_(pa.uint64()))])
    rows = [[0, 9], [10], [2**64 - 1]]
    batch = batch_of([{"prompt_token_ids": row} for row in rows], schema)
    out = tokenized(batch, None, limits=Limits(8, 10))
    assert out.column("error_type").to_pylist() == [None, *["invalid_token_ids"] * 2]
    assert "18446744073709551615" in out.column("error_message")[2].as_py()
    batch = batch_of([{"prompt_token_ids": [3, -1]}])
    assert "token 1 is -1" in tokenized(batch, None).column("error_message")[0].as_py()


def test_a_text_with_an_id_beyond_the_models_vocabulary_is_a_row_error(tokenizer, batch_of):
    batch = batch_of([{"prompt": "<|im_end|>"}])
    out = tokenized(batch, tokenizer, limits=Limits(512, tokenizer.eos_token_id))
    assert out.column("error_type").to_pylist() == ["invalid_token_ids"]


def test_errors_of_a_row_leave_its_neighbours_alone(tokenizer, batch_of):
    rows = ["fox", None, "", "dog"]
    batch = batch_of([{"prompt": text} for text in rows], first=100)
    out = tokenized(batch, tokenizer)
    assert out.schema == store_schema(pa.string())
    assert out.column("row_index").to_pylist() == [100, 101, 102, 103]
    assert out.column("id").to_pylist() == ["r100", "r101", "r102", "r103"]
    assert out.column("error_type").to_pylist() == [None, "null_prompt", "empty_prompt", None]
    ids = out.column("token_ids").to_pylist()
    assert ids == [tokenizer("fox")["input_ids"], None, None, tokenizer("dog")["input_ids"]]


def test_a_chat_template_that_raises_is_an_invalid_messages_row(tokenizer, batch_of):
    talk = [{"role": "tool", "content": "x"}]
    batch = batch_of([{"messages": json.dumps(talk)}, {"messages": json.dumps(TALK)}])
    out = tokenized(batch, tokenizer)
    assert out.column("error_type").to_pylist() == ["invalid_messages", None]
    assert "no tools here" in out.column("error_message")[0].as_py()


def test_a_lone_surrogate_spoils_only_its_own_row(tokenizer, batch_of):
    bad = '[{"role": "user", "content": "\\ud83c"}]'
    batch = batch_of([{"messages": json.dumps(TALK)}, {"messages": bad}])
    out = tokenized(batch, tokenizer)
    assert out.column("error_type").to_pylist() == [None, "invalid_messages"]


def test_a_rows_max_tokens_wins_over_its_json_which_wins_over_the_job(tokenizer, batch_of):
    rows = [
        {"sampling_params": None, "max_tokens": None},
        {"sampling_params": '{"temperature": 1, "max_tokens": 5}', "max_tokens": None},
        {"sampling_params": '{"max_tokens": 5, "top_p": null}', "max_tokens": 300},
        {"sampling_params": '{"min_tokens": 400}', "max_tokens": 500},
        {"sampling_params": "{}", "max_tokens": None},
    ]
    schema = pa.schema(
        [
            ("prompt", pa.string()),
            ("sampling_params", pa.large_string()),
            ("max_tokens", pa.int32()),
        ]
    )
    batch = batch_of([{"prompt": "fox", **row} for row in rows], schema)
    out = tokenized(batch, tokenizer)
    assert out.column("error_type").null_count == len(rows)
    texts = out.column("sampling_params").to_pylist()
    assert [text and json.loads(text) for text in texts] == [
        None,
        {"temperature": 1, "max_tokens": 5},
        {"max_tokens": 300},
        {"min_tokens": 400, "max_tokens": 500},
        None,
    ]


@pytest.mark.parametrize(
    ("params", "max_tokens", "word"),
    [
        ("{", None, "not JSON"),
        ("[1]", None, "JSON object"),
        ('{"temprature": 1}', None, "temprature"),
        ('{"top_p": 2}', None, "top_p=2"),
        ('{"temperature": NaN}', None, "temperature"),
        (None, 0, "max_tokens=0"),
        ('{"min_tokens": 9}', 3, "min_tokens=9"),
    ],
)
def test_bad_sampling_parameters_are_row_errors(params, max_tokens, word, tokenizer, batch_of):
    schema = pa.schema(
        [("prompt", pa.string()), ("sampling_params", pa.string()), ("max_tokens", pa.int64())]
    )
    row = {"prompt": "fox", "sampling_params": params, "max_tokens": max_tokens}
    out = tokenized(batch_of([row, {"prompt": "fox"}], schema), tokenizer)
    assert out.column("error_type").to_pylist() == [
        RowErrorType.INVALID_SAMPLING_PARAMS.value,
        None,
    ]
    assert word in out.column("error_message")[0].as_py()
    assert out.column("token_ids").to_pylist()[0] is None


def test_batches_are_made_one_at_a_time_as_they_are_asked_for(tokenizer, batch_of):
    taken = []

    def rows():
        for number in range(3):
            taken.append(number)
            yield batch_of([{"prompt": "fox"}], first=number)

    schema = pa.schema([("prompt", pa.string())])
    renderer = Renderer(PromptSpec(), schema, tokenizer)
    batches = tokenize_batches(rows(), renderer, tokenizer, LIMITS, SamplingParams())
    next(batches)
    assert taken == [0]


def test_a_priority_column_is_kept_and_null_is_zero(batch_of):
    batch = batch_of([{"prompt_token_ids": [1], "rank": rank} for rank in (3, None, -2)])
    renderer = Renderer(PromptSpec(), batch.table.schema, None)
    (out,) = tokenize_batches(
        [batch], renderer, None, Limits(8, 10), SamplingParams(), priority_column="rank"
    )
    assert out.column("priority").to_pylist() == [3, 0, -2]
