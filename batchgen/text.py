"""Texts from data as they may be said, and what is no text at all."""

import re
from collections.abc import Mapping
from typing import Any

# What moves a terminal's cursor, hides text or turns it around; all but line breaks and tabs.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Write control characters in a text for people as escapes, such as ``\x1b``."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def refuse_lone_surrogates(value: Any, what: str) -> None:
    """Raise ValueError where texts at any depth hold half of a character.

    JSON and YAML can spell it; no tokenizer, file or terminal takes it.
    """
    # No recursion: a text of JSON may nest as deeply as its reader allows.
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            found = _SURROGATE.search(each)
            if found is not None:
                half = printable(found[0])
                raise ValueError(f"{what} holds {half}, half of a character, not text")
        elif isinstance(each, Mapping):
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            left += each


def one_line(text: str) -> str:
    r"""Write a text from data in one line: control characters and line breaks as escapes."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")
