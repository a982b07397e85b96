"""Text and stop strings under every kind of decoder, against the tokenizer's own decode."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from batchgen.runtime.detokenize import Detokenizer, StopStringMatcher
from tests.support import tiny_tokenizers

_SPACED = ("\u2581yes", "\u2581no", "yes", "\u2581", ",", "\u2581a", "b", "\ufffd")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_SPECIALS = ("<s>", "<|end|>")


def _metaspace(scheme: str) -> decoders.Decoder:
    return decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])


def _llama() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip


# What each decoder is made with, and the tokens of its vocabulary that are no bytes.
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "metaspace always": (lambda: _metaspace("always"), _SPACED),
    "metaspace first": (lambda: _metaspace("first"), _SPACED),
    "metaspace never": (lambda: _metaspace("never"), _SPACED),
    "llama": (_llama, _SPACED),
    "wordpiece": (decoders.WordPiece, ("yes", "no", "##s", ",", ".", "'", "##a", "n't")),
    "wordpiece as it is": (lambda: decoders.WordPiece(cleanup=False), ("a", "##b", ",", "c")),
    "bpe": (lambda: decoders.BPEDecoder(suffix="</w>"), ("yes</w>", "no</w>", "y", "a</w>")),
}


@cache
def _tokenizer(kind: str) -> tuple[Any, list[int], list[int]]:
    """A tokenizer with the ids of its words and of its bytes."""
    if kind == "bytes":
        tokenizer = tiny_tokenizers.make()
        words = tokenizer(" yes no, a fine end.", add_special_tokens=False)["input_ids"]
        alphabet = [tokenizer("\u20ac\u00e9\U0001f336a")["input_ids"]][0]
        return tokenizer, words, alphabet
    decoder, words = KINDS[kind]
    spelled = [*words, *_BYTES]
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(spelled)}, merges=[]))
    inner.decoder = decoder()
    inner.add_special_tokens([AddedToken(each, special=True) for each in _SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    data = "\u20ac\u00e9\U0001f336a ".encode()
    has_bytes = "metaspace" in kind or kind == "llama"
    return tokenizer, list(range(len(words))), [len(words) + b for b in data] if has_bytes else []


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _expected(tokenizer: Any, prompt: list[int], output: list[int]) -> str:
    """What the tokenizer's own decode adds to the prompt."""
    before = _decoded(tokenizer, prompt)
    whole = _decoded(tokenizer, prompt + output)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
@given(data=st.data())
def test_n06_text_and_stops_are_those_of_the_tokenizers_own_decode(kind: str, data: Any) -> None:
    tokenizer, words, alphabet = _tokenizer(kind)
    specials = tokenizer.convert_tokens_to_ids(["<s>"])
    prompt = data.draw(st.lists(st.sampled_from(words + specials), max_size=9))
    tokens = st.lists(st.sampled_from(words + alphabet), min_size=1, max_size=45)
    output = data.draw(tokens)
    texts = [_expected(tokenizer, prompt, output[:end]) for end in range(len(output) + 1)]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.text(prompt, output, skip_special_tokens=True) == texts[-1]

    text = texts[-1]
    begin = data.draw(st.integers(0, max(0, len(text) - 1)))
    stops = [text[begin : begin + data.draw(st.integers(1, 5))] or "x", "yes no", " "]
    stops = stops[: data.draw(st.integers(1, 3))]
    matcher = StopStringMatcher(detokenizer, prompt, stops, skip_special_tokens=True)
    for end, token in enumerate(output, start=1):
        places = [(texts[end].find(stop), stop) for stop in stops if stop in texts[end]]
        found = matcher.push(token)
        if not places:
            assert found is None
            continue
        assert (matcher.place, found) == min(places)
        break


def _llama_ids(text: str) -> list[int]:
    tokenizer, _, _ = _tokenizer("llama")
    return tokenizer.convert_tokens_to_ids(
        [text] if text in _SPACED else [f"<0x{byte:02X}>" for byte in text.encode()]
    )


def test_n06_a_stop_string_that_begins_with_the_first_tokens_space_ends_the_output() -> None:
    tokenizer, _, _ = _tokenizer("llama")
    prompt = _llama_ids("\u2581a")
    matcher = StopStringMatcher(Detokenizer(tokenizer), prompt, [" yes"], skip_special_tokens=True)
    assert matcher.push(_llama_ids("\u2581yes")[0]) == " yes"
    assert matcher.place == 0


def test_bytes_of_the_output_join_no_character_of_the_prompt_and_spoil_none() -> None:
    tokenizer, _, _ = _tokenizer("llama")
    detokenizer = Detokenizer(tokenizer)

    def text(prompt: list[int], output: list[int]) -> str:
        return detokenizer.text(prompt, output, skip_special_tokens=True)

    prompt = _llama_ids("\u2581a") + _llama_ids("\u65e5\u672c\u8a9e")
    assert text(prompt, _llama_ids("\u20ac")) == "\u20ac"
    assert text(prompt, _llama_ids("\u20ac")[:2]) == "\ufffd\ufffd"
    assert text(prompt, _llama_ids("\u2581yes")) == " yes"
    cut = prompt[:-1]
    assert text(cut, [prompt[-1], *_llama_ids("\u2581yes")]) == "\ufffd yes"
    # A special token between two bytes of a character is no part of the text.
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    first, *others = _llama_ids("\u20ac")
    assert text(prompt, [first, end, *others]) == "\u20ac"


def test_n21_an_id_behind_the_tokenizers_last_one_gives_no_text_and_stops_nothing() -> None:
    tokenizer, _, _ = _tokenizer("llama")
    unknown = len(tokenizer) + 50
    yes, no = _llama_ids("\u2581yes") + _llama_ids("\u2581no")
    prompt, output = _llama_ids("\u2581a"), [yes, unknown, no, unknown]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.text(prompt, output, skip_special_tokens=True) == " yes no"
    matcher = StopStringMatcher(detokenizer, prompt, ["s n"], skip_special_tokens=True)
    assert [matcher.push(token) for token in output[:3]] == [None, None, "s n"]
