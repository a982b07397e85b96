"""Rendered texts become ids: a special token where the template wrote one, else text.

A user who writes ``<|im_end|>`` in a message must not end the message. The template's own
special tokens (see ``marks``) must still be ids, and every other token must be what an ordinary
tokenisation gives. Where data spells a special token, a copy of the tokenizer that knows its
special tokens by private spellings only encodes the text, with these in the template's places.
"""

import json
from functools import cached_property
from typing import Any

from batchgen.prompts.marks import Marks
from batchgen.prompts.tokenizer import Tokenizer, panics_as_errors

_OPEN, _CLOSE = "\U0010fffc", "\U0010fffd"


class SpecialTokens:
    """The special tokens of a tokenizer, and how they are told from text.

    Special are the tokenizer's added tokens flagged so, and those it lists as
    ``chat_control_tokens``.

    Attributes:
        marks: of the template's own special tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        controls = set(getattr(tokenizer, "chat_control_tokens", None) or ())
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._ids = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content and (token.special or token.content in controls)
        }
        self.marks = Marks(self._ids)

    def resolve(self, rendered: str) -> str | list[int]:
        """Resolve the marks of a rendered text.

        Returns:
            The text where an ordinary tokenisation gives the right ids, else the ids.

        Raises:
            ValueError: data spells a special token, which this tokenizer cannot keep as text.
        """
        plain: str = self.marks.plain(rendered)
        written = self.marks.written(rendered)
        if written == [match.span() for match in self.marks.spelling.finditer(plain)]:
            return plain
        if self._encoder is None:
            raise ValueError(
                "the content spells a special token, which this tokenizer cannot keep as text"
            )
        if _OPEN in plain:
            raise ValueError("the content holds the private-use character U+10FFFC")
        pieces, end = list[str](), 0
        for start, stop in written:
            pieces += [plain[end:start], _private(self._ids[plain[start:stop]])]
            end = stop
        private = "".join([*pieces, plain[end:]])
        with panics_as_errors():
            ids: list[int] = self._encoder.encode(private, add_special_tokens=False).ids
        return ids

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
