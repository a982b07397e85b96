"""Stop strings and text, with a byte-level tokenizer built by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from batchgen.runtime.detokenize import Detokenizer, StopStringMatcher

_SPECIAL = "<|im_end|>"


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(extra)) for b in range(256)]


def _spell(text: str) -> str:
    alphabet = _byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens, then a few longer ones, then a special one."""
    words = [_spell(word) for word in ("foo", " EN", "D.", "bar", "hello")]
    vocab = {token: i for i, token in enumerate(_byte_alphabet() + words)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(_SPECIAL, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def _ids(tokenizer: PreTrainedTokenizerFast, *pieces: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(p if p == _SPECIAL else _spell(p)) for p in pieces]


def _matcher(tokenizer: Any, stop: list[str], *, skips: bool = True) -> StopStringMatcher:
    return StopStringMatcher(Detokenizer(tokenizer), [], stop, skip_special_tokens=skips)


def _push_all(tokenizer: Any, stop: list[str], ids: list[int]) -> list:
    matcher = _matcher(tokenizer, stop)
    return [matcher.push(token) for token in ids]


def _text(tokenizer: Any, prompt: list[int], output: list[int]) -> str:
    return Detokenizer(tokenizer).text(prompt, output, skip_special_tokens=True)


def _cut(tokenizer: Any, ids: list[int], stop: str) -> str:
    """The text in front of the stop string that the last token completes."""
    matcher = _matcher(tokenizer, [stop])
    assert [matcher.push(token) for token in ids][-1] == stop
    return _text(tokenizer, [], ids)[: matcher.place]


def test_c06_a_stop_string_is_found_across_and_inside_tokens(tokenizer) -> None:
    ids = _ids(tokenizer, "foo", " EN", "D.")
    assert _push_all(tokenizer, ["END"], ids) == [None, None, "END"]
    assert _cut(tokenizer, ids, "END") == "foo "


def test_a_stop_string_that_min_tokens_let_pass_does_not_cut(tokenizer) -> None:
    ids = _ids(tokenizer, " EN", "D.", "bar", " EN", "D.")
    assert _cut(tokenizer, ids, "END") == " END.bar "


def test_c08_a_special_token_can_be_a_stop_string(tokenizer) -> None:
    ids = _ids(tokenizer, "foo", _SPECIAL)
    assert _push_all(tokenizer, [_SPECIAL], ids) == [None, _SPECIAL]
    assert _cut(tokenizer, ids, _SPECIAL) == "foo"
    assert _cut(tokenizer, ids, "o" + _SPECIAL) == "fo"
    # Text behind it, in the token that completes the stop string, is no part of it.
    behind = _ids(tokenizer, "foo", _SPECIAL, "bar")
    assert _cut(tokenizer, behind, "o" + _SPECIAL + "b") == "fo"
    assert _cut(tokenizer, behind, "end|>b") == "foo"


def test_c08_a_special_token_is_a_stop_string_where_the_text_spells_it_too(tokenizer) -> None:
    matcher = _matcher(tokenizer, [_SPECIAL], skips=False)
    assert [matcher.push(token) for token in _ids(tokenizer, "foo", _SPECIAL)] == [None, _SPECIAL]
    assert matcher.place == 3


def test_c07_what_stands_in_the_prompt_is_never_matched(tokenizer) -> None:
    ids = _ids(tokenizer, ":", "b", "a", "r")
    assert _push_all(tokenizer, ["\nQ:"], ids) == [None] * 4


def test_the_earliest_of_two_stop_strings_is_the_reason(tokenizer) -> None:
    assert _push_all(tokenizer, ["oo", "fo"], _ids(tokenizer, "foo")) == ["fo"]


def test_e02_a_character_split_over_tokens_is_joined(tokenizer) -> None:
    pepper = list("\U0001f336".encode())
    whole = [*pepper, ord("a")]
    text = _text(tokenizer, [], whole)
    assert text == "\U0001f336a"
    cut = _text(tokenizer, [], pepper[:3])
    assert set(cut) == {"\ufffd"}
    lone = _text(tokenizer, [], [0xFF])
    assert lone == "\ufffd"
    assert _push_all(tokenizer, ["\U0001f336"], whole)[3] == "\U0001f336"


def test_e03_a_prompt_that_ends_inside_a_character_stays_out_of_the_text(tokenizer) -> None:
    euro = list("€".encode())
    prompt = [*b"price: ", *euro[:2]]
    text = _text(tokenizer, prompt, [euro[2], ord("x")])
    assert text == "\ufffdx"


@given(
    text=st.text(alphabet="abEND €\U0001f336", max_size=24),
    stop=st.lists(st.text(alphabet="abEND €\U0001f336", min_size=1, max_size=4), min_size=1),
)
def test_a_stop_string_is_found_at_the_byte_that_completes_it(tokenizer, text, stop) -> None:
    data = text.encode()
    ends = [i for i in range(1, len(data) + 1) if _has_stop(data[:i], stop)]
    matches = _push_all(tokenizer, stop, list(data))
    first = next((i for i, match in enumerate(matches) if match), None)
    assert first == (ends[0] - 1 if ends else None)


def _has_stop(data: bytes, stop: list[str]) -> bool:
    return any(s.encode() in data for s in stop)
