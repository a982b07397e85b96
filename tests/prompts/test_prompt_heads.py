"""A head that is tokenised once gives the ids of every whole text."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from batchgen.errors import RowErrorType
from batchgen.prompts import heads
from batchgen.prompts.encoder import PromptEncoder
from batchgen.prompts.heads import can_be_cut, head_length
from batchgen.prompts.limits import Limits
from batchgen.prompts.render import Chat, Renderer, Text
from batchgen.prompts.source import PromptSpec
from tests.support.tiny_tokenizers import make

LIMITS = Limits(max_model_len=10_000, vocab_size=100_000)
BLANKS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITTERS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    **{
        f"pattern {number}": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), BLANKS]
        )
        for number, pattern in enumerate(sorted(heads._PATTERNS))
    },
}
# Pieces that tokenizers treat in ways of their own, to meet at every border.
WORDS = ["the", "fox", "ing", "A", "7", "123", ".", ":", "'", "'s", "'S", "<s>", "<|im_end|>"]
BLANKS = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2028"]
MARKS = ["e\u0301", "\u00e9", "\u0301", "\u4e2d"]
PIECES = st.sampled_from([*WORDS, *BLANKS, *MARKS])
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def encoder_of(column, tokenizer):
    renderer = Renderer(PromptSpec(), pa.schema([(column, pa.string())]), tokenizer)
    return PromptEncoder(renderer, tokenizer, LIMITS)


def splitting_like(name, *, kind="bytes", adds_bos=False):
    tokenizer = make(kind, adds_bos=adds_bos)
    tokenizer.backend_tokenizer.pre_tokenizer = SPLITTERS[name]
    return tokenizer


TOKENIZERS = {
    (name, kind, adds_bos): splitting_like(name, kind=kind, adds_bos=adds_bos)
    for name in SPLITTERS
    for kind in ("bytes", "nfc")
    for adds_bos in (False, True)
}


@given(st.sampled_from(sorted(TOKENIZERS)), TEXTS, TEXTS, TEXTS)
def test_both_sides_of_a_cut_alone_give_the_ids_of_the_whole(which, left, right, tail):
    tokenizer = TOKENIZERS[which]
    assert can_be_cut(tokenizer)
    head = "The end. " * 8 + left + "x" + right
    texts = [head + tail, head + "the", head + "!"]
    cut = head_length(texts)
    assert cut >= heads.MIN_HEAD_CHARS
    first = tokenizer(texts[0][:cut], add_special_tokens=False)["input_ids"]
    second = tokenizer(texts[0][cut:], add_special_tokens=False)["input_ids"]
    assert first + second == tokenizer(texts[0], add_special_tokens=False)["input_ids"]


@given(st.sampled_from(sorted(TOKENIZERS)), st.booleans(), TEXTS, st.lists(TEXTS, min_size=2))
def test_a_batch_with_a_common_head_has_the_ids_of_its_texts_one_by_one(
    which, begins_with_bos, middle, tails
):
    tokenizer = TOKENIZERS[which]
    head = "<s>" * begins_with_bos + "The quick brown fox jumps over the lazy dog. " * 2 + middle
    encoder = encoder_of("prompt", tokenizer)
    together = encoder.encode([Text(head + tail) for tail in tails])
    alone = [encoder.encode([Text(head + tail)])[0] for tail in tails]
    assert [ids.tolist() for ids in together] == [ids.tolist() for ids in alone]


@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(TEXTS, min_size=2))
def test_chats_with_a_common_head_have_the_ids_of_the_chat_template(which, contents):
    tokenizer = TOKENIZERS[which]
    system = {"role": "system", "content": "The answer is in the end of the story. " * 3}
    chats = [[system, {"role": "user", "content": content}] for content in contents]
    encoder = encoder_of("messages", tokenizer)
    together = encoder.encode([Chat(chat) for chat in chats])
    alone = [encoder.encode([Chat(chat)])[0] for chat in chats]
    assert [ids.tolist() for ids in together] == [ids.tolist() for ids in alone]


def test_the_head_is_read_once_for_all_batches(tokenizer, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "batchgen.prompts.encoder.encode",
        lambda tokenizer, texts, **options: (
            seen.extend(texts) or heads.encode(tokenizer, texts, **options)
        ),
    )
    head = "the quick brown fox jumps over the lazy dog " * 3
    encoder = encoder_of("prompt", tokenizer)
    for batch in range(3):
        encoder.encode([Text(f"{head}{batch}.{row}") for row in range(4)])
    assert sum(text.startswith(head.rstrip()) for text in seen) == 1
    assert len(seen) == 1 + 3 * 4


def test_one_text_that_the_tokenizer_refuses_leaves_the_others(tokenizer):
    head = "the quick brown fox jumps over the lazy dog " * 3
    encoder = encoder_of("prompt", tokenizer)
    good, bad, last = encoder.encode([Text(head + tail) for tail in ("x", "\ud800", "y")])
    assert bad.type is RowErrorType.INVALID_MESSAGES
    assert tokenizer.decode(good) == head + "x"
    assert tokenizer.decode(last) == head + "y"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(True)),
        lambda t: setattr(
            t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\w+"), "isolated")
        ),
        lambda t: setattr(
            t.backend_tokenizer,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(False)]),
        ),
        lambda t: setattr(t.backend_tokenizer.model, "dropout", 0.1),
        lambda t: t.add_tokens([AddedToken("of the", normalized=False)]),
        lambda t: t.add_tokens([AddedToken("<x>", lstrip=True)]),
        lambda t: t.add_tokens([AddedToken("word", single_word=True)]),
        lambda t: setattr(
            t.backend_tokenizer,
            "post_processor",
            TemplateProcessing(
                single="$A <|im_end|>",
                special_tokens=[("<|im_end|>", t.convert_tokens_to_ids("<|im_end|>"))],
            ),
        ),
    ],
)
def test_tokenizers_that_may_see_across_a_cut_are_not_cut(make_tokenizer, change):
    tokenizer = make_tokenizer()
    assert can_be_cut(tokenizer)
    change(tokenizer)
    assert not can_be_cut(tokenizer)


def test_other_kinds_of_tokenizers_are_not_cut(make_tokenizer):
    assert not can_be_cut(make_tokenizer("metaspace"))
    assert not can_be_cut(make_tokenizer(rstrip=True))
    assert not can_be_cut(object())


def test_a_head_ends_behind_a_letter_or_digit_and_short_ones_do_not_count():
    words = "word " * 20
    assert head_length([words + "a", words + "b"]) == len(words) - 1
    assert head_length([words + "\n", words + "."]) == len(words) - 1
    assert head_length([words + "7\na", words + "7\nb"]) == len(words) + 1
    assert head_length([words]) == head_length([]) == 0
    assert head_length(["word a", "word b"]) == 0
    assert head_length(["." * 100 + "a", "." * 100 + "b"]) == 0
