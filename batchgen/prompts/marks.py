"""Which special tokens of a rendered text a template wrote itself.

Whatever a template makes of a row, the row's text must not become a special token. So what is
marked is the template's own text: where a literal spells a special token, every character of
it is replaced by a stand-in that no data holds (a lone surrogate, which is not valid Unicode).
Stand-ins go through concatenation, joins, macros and filters like any character. After the
rendering, what is spelled in stand-ins is a special token, and any other spelling is text.
"""

import re
from collections.abc import Collection
from typing import Any

_FIRST, _LAST = 0xD800, 0xDFFF
_SURROGATE = re.compile("[\ud800-\udfff]")
# Templates as Phi-4-mini's join them to special tokens: '<|' + message['role'] + '|>'.
_ROLES = "system|user|assistant|tool|developer|function|model|ipython|observation|environment"


class Marks:
    """Stand-ins for the special tokens that a template spells.

    Args:
        spellings: of the special tokens.
    """

    def __init__(self, spellings: Collection[str]) -> None:
        longest_first = sorted(spellings, key=len, reverse=True)
        alphabet = sorted(set("".join(spellings)))[: _LAST - _FIRST + 1]
        self._marked = {ord(char): chr(_FIRST + at) for at, char in enumerate(alphabet)}
        self._plain = {ord(stand_in): chr(char) for char, stand_in in self._marked.items()}
        self.spelling = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        split = (re.fullmatch(rf"(.+?)({_ROLES})(.+)", each, re.DOTALL) for each in longest_first)
        joined = [each.groups() for each in split if each is not None]
        self._edges = _edges({each[0] for each in joined}, {each[2] for each in joined})
        wholes = [self._mark(each) for each in longest_first]
        around_roles = [f"{self._mark(a)}{role}{self._mark(b)}" for a, role, b in joined]
        self._written = re.compile("|".join(map(re.escape, wholes + around_roles)) or "(?!)")

    def mark(self, literal: str, *, joins_roles: bool = False) -> str:
        """Mark the special tokens that a template's literal text spells.

        Args:
            joins_roles: whether a literal's end, a message's role and another literal's start
                may make a special token together.
        """
        marked = self.spelling.sub(lambda match: self._mark(match[0]), literal)
        if joins_roles:
            marked = self._edges.sub(lambda match: self._mark(match[0]), marked)
        return marked

    def plain(self, value: Any) -> Any:
        """Return a value as it would be without marks, at any depth."""
        if isinstance(value, str):
            return value.translate(self._plain) if _SURROGATE.search(value) else value
        if isinstance(value, list | tuple):
            items = map(self.plain, value)
            return list(items) if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {self.plain(key): self.plain(item) for key, item in value.items()}
        return value

    def written(self, rendered: str) -> list[tuple[int, int]]:
        """Return where a rendered text has the special tokens of its template."""
        return [match.span() for match in self._written.finditer(rendered)]

    def _mark(self, text: str) -> str:
        return text.translate(self._marked)


def _edges(before: Collection[str], after: Collection[str]) -> re.Pattern[str]:
    if not before:
        return re.compile("(?!)")
    heads, tails = ("|".join(map(re.escape, each)) for each in (before, after))
    return re.compile(rf"(?:{heads})(?=\Z|%s|\{{)|(?:\A|(?<=%s)|(?<=\}}))(?:{tails})")
