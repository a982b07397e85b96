"""The fenced blocks of a Markdown page."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Fence:
    """A block: its language, its text, and the line on which it begins."""

    language: str
    text: str
    line: int


def fences(page: str) -> Iterator[Fence]:
    """Give the blocks of a page, in order."""
    for found in _FENCE.finditer(page):
        yield Fence(found[1], found[2], page.count("\n", 0, found.start()) + 1)
