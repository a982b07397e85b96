"""How long a prompt may be, and how to see cheaply that a text is far beyond it."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.errors import RowError, RowErrorType
from batchgen.prompts.tokenizer import Tokenizer

IdArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model can take.

    Attributes:
        max_model_len: tokens of a prompt and its output together.
        vocab_size: rows of the model's embedding; ids are below it.
    """

    max_model_len: int
    vocab_size: int

    def fits(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens leaves room for one token of output."""
        return num_tokens < self.max_model_len

    def check(self, ids: npt.NDArray[np.integer[Any]]) -> IdArray | RowError:
        """Return a prompt's ids ``[L]`` as int32, or what is wrong with them.

        Errors: ``empty_prompt``, ``invalid_token_ids`` or ``prompt_too_long``.
        """
        if len(ids) == 0:
            return RowError(RowErrorType.EMPTY_PROMPT, "the prompt has no tokens")
        outside = (ids < 0) | (ids >= self.vocab_size)
        if outside.any():
            at = int(outside.argmax())
            return RowError(
                RowErrorType.INVALID_TOKEN_IDS,
                f"token {at} is {ids[at]}, outside the model's vocabulary of {self.vocab_size}",
            )
        if not self.fits(len(ids)):
            return too_long(f"the prompt has {len(ids)} tokens", self.max_model_len)
        return ids.astype(np.int32)


def too_long(what: str, max_model_len: int) -> RowError:
    """Build the error of a prompt that is too long."""
    return RowError(
        RowErrorType.PROMPT_TOO_LONG,
        f"{what}, but model.max_model_len={max_model_len} leaves room for at most "
        f"{max_model_len - 1}; shorten the prompt, or raise model.max_model_len where the "
        "model allows it",
    )


class TextBound:
    """A lower bound on a text's tokens from its bytes alone.

    No token stands for more bytes than the longest of the vocabulary, provided that the
    tokenizer loses nothing on the way: no unknown token that swallows a word, no
    normaliser or splitter that removes characters. Where that cannot be read off the
    tokenizer the bound is 0.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        added = tokenizer.added_tokens_decoder.values()
        self._bytes_per_token = 0
        # A token that strips its surroundings stands for any number of blanks.
        if backend is None or any(token.lstrip or token.rstrip for token in added):
            return
        shrinking = _normalizer_shrinking(component_description(backend.normalizer))
        if (
            shrinking
            and _keeps_text(component_description(backend.pre_tokenizer))
            and _keeps_bytes(backend)
        ):
            longest = max(len(token.encode()) for token in backend.get_vocab())
            self._bytes_per_token = shrinking * longest

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that the text surely has."""
        if not self._bytes_per_token:
            return 0
        return -(-len(text.encode(errors="replace")) // self._bytes_per_token)


def component_description(part: Any) -> dict[str, Any] | None:
    """Describe a tokenizer's normaliser or pre-tokenizer; None where there is none."""
    if part is None:
        return None
    try:
        described: dict[str, Any] = json.loads(part.__getstate__())
    except Exception:  # a component written in Python cannot be described
        return {"type": "custom"}
    return described


def _normalizer_shrinking(part: dict[str, Any] | None) -> int:
    """Return by how much a normaliser may divide a text's bytes at most; 0 if unknown."""
    if part is None:
        return 1
    match part["type"]:
        case "Prepend" | "NFD":
            return 1
        case "NFC":
            return 4  # three jamo of three bytes become one syllable of three
        case "Replace":
            old = part["pattern"].get("String")
            return int(old is not None and len(part["content"].encode()) >= len(old.encode()))
        case "Sequence":
            shrinking = 1
            for each in part["normalizers"]:
                shrinking *= _normalizer_shrinking(each)
            return shrinking
    return 0


def _keeps_text(part: dict[str, Any] | None) -> bool:
    if part is None:
        return True
    match part["type"]:
        case "ByteLevel" | "Digits" | "Metaspace":
            return True
        case "Split" | "Punctuation":
            return bool(part["behavior"] != "Removed")
        case "Sequence":
            return all(_keeps_text(each) for each in part["pretokenizers"])
    return False


def _keeps_bytes(backend: Any) -> bool:
    """Whether every character has a token of its own, at worst byte by byte."""
    if backend.model.__class__.__name__ not in ("BPE", "Unigram"):
        return False
    byte_level = "ByteLevel" in json.dumps(component_description(backend.pre_tokenizer))
    return byte_level or backend.token_to_id("<0x00>") is not None
