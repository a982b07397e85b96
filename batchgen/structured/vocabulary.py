"""The model's tokens as the grammar library sees them."""

import json
from collections.abc import Set
from copy import copy
from typing import Any

from llguidance import LLTokenizer

# Tokens whose bytes are compared with what the tokenizer itself decodes.
_CHECKED_TOKENS = 256
# What the library reads where a tokenizer says only "Metaspace": a mark that stands for a
# space, and tokens that stand for single bytes.
_METASPACE = (
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
)
_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})


class VocabularyError(Exception):
    """Outputs of this model cannot be constrained; the message says why."""


def load_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: Set[int]) -> LLTokenizer:
    """Make the vocabulary; it takes about a second for 100,000 tokens.

    Args:
        tokenizer: a transformers tokenizer, or None if the model has none.
        vocab_size: ids of the model's logits; those that the tokenizer does not know are
            never allowed.
        eos_token_ids: ids that end an output; all of them are allowed where it may end.

    Raises:
        VocabularyError: there is no tokenizer, or none whose tokens have known bytes.
    """
    if tokenizer is None:
        raise VocabularyError("the model has no tokenizer; name one with model.tokenizer")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise VocabularyError(
            "the model's tokenizer is written in Python and does not say what bytes its tokens "
            "stand for; name one that has a tokenizer.json with model.tokenizer"
        )
    known = max(tokenizer.get_vocab().values()) + 1
    ends = sorted(eos_token_ids) or [tokenizer.eos_token_id]
    try:
        vocabulary = LLTokenizer(
            _description(backend), n_vocab=max(known, vocab_size), eos_token=ends
        )
    except (ValueError, TypeError) as error:
        raise VocabularyError(f"the model's tokenizer cannot be used: {error}") from error
    _check(vocabulary, tokenizer, known)
    return vocabulary


def _description(backend: Any) -> str:
    """Write a tokenizer as JSON, in the words that the library knows.

    An output is what its tokens say: it is brought to no unicode form.
    """
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    description = json.loads(backend.to_str())
    normalizer = description["normalizer"] or {}
    steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    kept = [step for step in steps if step and step["type"] not in _UNICODE_FORMS]
    description["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    decoder = description["decoder"] or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    if any(step.get("type") == "Metaspace" for step in steps):
        others = [step for step in steps if step["type"] not in ("Metaspace", "ByteFallback")]
        description["decoder"] = {"type": "Sequence", "decoders": [*_METASPACE, *others]}
    return json.dumps(description)


def _check(vocabulary: LLTokenizer, tokenizer: Any, known: int) -> None:
    """Compare some tokens' bytes with the tokenizer's own text.

    A mask over wrong bytes would let wrong outputs through without a word.
    """
    special = set(tokenizer.added_tokens_decoder)
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"]
    before = tokenizer.decode(anchor)
    for token in range(0, known, max(1, known // _CHECKED_TOKENS)):
        theirs = tokenizer.decode([*anchor, token])[len(before) :]
        ours = vocabulary.decode_bytes([token]).decode(errors="replace")
        if token not in special and "\ufffd" not in theirs + ours and ours != theirs:
            raise VocabularyError(
                f"the model's tokenizer decodes token {token} to {theirs!r}, the grammar library "
                f"to {ours!r}"
            )
