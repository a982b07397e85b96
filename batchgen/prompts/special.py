"""Special tokens whose spelling stands inside content stay text.

A user who writes ``<|im_end|>`` in a message must not end the message. The chat template's
own special tokens must still be ids, and every other token must be what an ordinary
tokenisation gives. Two swaps of spelling make that one ordinary call: content's spellings
travel through the template as private-use characters; then the template's spellings become
private ones, content's come back, and a copy of the tokenizer that knows its special tokens
only by the private spellings encodes the whole text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from batchgen.prompts.messages import Message
from batchgen.prompts.tokenizer import Tokenizer

_OPEN, _CLOSE = "\U0010fffc", "\U0010fffd"
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFF0


class ContentGuard:
    """Finds special tokens' spellings in messages and encodes such messages safely.

    Special are the tokenizer's added tokens flagged so, and those it lists as
    ``chat_control_tokens``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        controls = set(getattr(tokenizer, "chat_control_tokens", None) or ())
        self._ids = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content and (token.special or token.content in controls)
        }
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def is_spelled_in(self, messages: Sequence[Message]) -> bool:
        """Whether any text of the messages spells a special token."""
        return any(self._spelling.search(text) for text in _texts(list(messages)))

    def encode(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
    ) -> list[int]:
        """Render and tokenise messages that spell special tokens.

        Args:
            messages: checked messages.
            render: the chat template, from messages to text.

        Raises:
            ValueError: the template refuses the messages, or this tokenizer cannot keep
                the spelling as text.
        """
        texts = list(_texts(list(messages)))
        marks = self._free_marks(texts)
        spelt = {match for text in texts for match in self._spelling.findall(text)}
        to_mark = dict(zip(sorted(spelt), marks, strict=False))
        marked = _replace(
            list(messages),
            lambda text: self._spelling.sub(lambda match: to_mark[match.group()], text),
        )
        return self._encode(render(marked), {mark: each for each, mark in to_mark.items()})

    def _encode(self, text: str, spelling_of: Mapping[str, str]) -> list[int]:
        """Encode a text in which characters stand for spellings that are no special tokens."""
        encoder = self._encoder
        if encoder is None:
            raise ValueError(
                "the content spells a special token, which this tokenizer cannot keep as text"
            )
        if _OPEN in text:
            raise ValueError("the content holds the private-use character U+10FFFC")
        private = self._spelling.sub(lambda match: _private(self._ids[match.group()]), text)
        for mark, spelling in spelling_of.items():
            private = private.replace(mark, spelling)
        ids: list[int] = encoder.encode(private, add_special_tokens=False).ids
        return ids

    def hide(self, value: Any, *, always: bool = False) -> tuple[Any, bool]:
        """Put characters that stand for special tokens' spellings into the texts of a value.

        For texts that become part of a plain prompt; :meth:`encode_text` brings them back.

        Args:
            value: a text, or lists and mappings of texts.
            always: the value joins a text in which spellings are hidden.

        Returns:
            The value, and whether spellings are hidden in it or in what it joins.

        Raises:
            ValueError: they would be, and a text holds such a character of its own.
        """
        if not (always or any(self._spelling.search(text) for text in _texts(value))):
            return value, False
        if any(mark in text for text in _texts(value) for mark in self._spelling_of):
            raise ValueError("the content holds a private-use character from U+100000 on")
        marks = {spelling: mark for mark, spelling in self._spelling_of.items()}
        hidden = _replace(
            value, lambda text: self._spelling.sub(lambda match: marks[match.group()], text)
        )
        return hidden, True

    def encode_text(self, text: str) -> list[int]:
        """Tokenise a text whose own spellings are special tokens and the hidden ones text.

        Raises:
            ValueError: this tokenizer cannot keep the spelling as text.
        """
        return self._encode(text, self._spelling_of)

    @cached_property
    def _spelling_of(self) -> dict[str, str]:
        """Spellings by the characters that hide them."""
        return {chr(_FIRST_MARK + at): spelling for at, spelling in enumerate(sorted(self._ids))}

    def _free_marks(self, texts: Sequence[str]) -> Iterator[str]:
        taken = set(str(self._tokenizer.chat_template)).union(*texts)
        return (chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in taken)

    @cached_property
    def _encoder(self) -> Any | None:
        """The tokenizer's copy; made when a row first needs it (seconds for 100k tokens)."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else _respelt(backend, self._ids)


def _private(token_id: int) -> str:
    return f"{_OPEN}{token_id}{_CLOSE}"


def _respelt(backend: Any, ids: dict[str, int]) -> Any | None:
    """Copy a ``tokenizers.Tokenizer`` with its special tokens under private spellings.

    None where that cannot be done, as where the model itself merges text into such a token.
    """
    from tokenizers import Tokenizer as Backend

    description = json.loads(backend.to_str())
    description |= {"truncation": None, "padding": None, "post_processor": None}
    for token in description["added_tokens"]:
        if token["content"] in ids:
            token |= {"content": _private(token["id"]), "special": True, "normalized": False}
    model = description["model"]
    names = {spelling: _private(token_id) for spelling, token_id in ids.items()}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): value for name, value in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    try:
        copy = Backend.from_str(json.dumps(description))
    except Exception:  # tokenizers raises nothing more special
        return None
    kept = all(copy.token_to_id(_private(token_id)) == token_id for token_id in ids.values())
    return copy if kept else None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _replace(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _replace(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, change) for item in value]
    return value
