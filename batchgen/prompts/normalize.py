"""The rules of ``prompt.normalize`` for texts, and the count of what they changed.

Byte for byte equal prefixes are what a cache finds. A rule changes how a text is spelt and
never what it says; none pads a prompt or moves a token.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from batchgen.prompts.messages import Message, texts_of, with_texts

_LINE_ENDS = "\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_BLANK = rf"[^\S{_LINE_ENDS}]"
_ANY_LINE_END = re.compile(r"\r\n|[\r\x85\u2028\u2029]")
_AT_LINE_END = re.compile(rf"{_BLANK}+(?=[{_LINE_ENDS}])")
_AT_END = re.compile(rf"{_BLANK}+\Z")
_BETWEEN_WORDS = re.compile(rf"(?<=\S){_BLANK}+(?=\S)")
_EMPTY_LINES = re.compile(r"\n{3,}")
_BYTE_ORDER_MARK = "\ufeff"

TEXT_RULES = ("unicode", "line_ends", "trailing_space")
RULES = (*TEXT_RULES, "system_text", "shots_order", "message_parts")


@dataclass(frozen=True, slots=True)
class NormalizeSpec:
    """The ``prompt.normalize`` keys.

    Attributes:
        unicode: ``none``, ``nfc`` or ``nfkc``: the form of every text; a byte order mark
            goes too.
        line_ends: each line ends with a line feed.
        trailing_space: no blanks at a line's end, nor at the end of a whole text.
        system_text: one spelling of the system text: NFC, line feeds, single blanks between
            words, no more than one empty line in a row, nothing around it.
        shots_order: examples stand in the order of their text.
        message_parts: system messages come first, and a message's further keys by name.
        columns: columns that hold parts of the frame, not content; the rules change these
            as well. Of messages it is all before the last one of the user.
    """

    unicode: str = "none"
    line_ends: bool = False
    trailing_space: bool = False
    system_text: bool = False
    shots_order: bool = False
    message_parts: bool = False
    columns: Sequence[str] = ()

    @property
    def is_on(self) -> bool:
        """Whether any rule is on."""
        return self.unicode != "none" or any(getattr(self, name) for name in RULES[1:])


@dataclass(slots=True)
class Changes:
    """What the rules have changed so far, by rule.

    Attributes:
        parts: texts of the job itself: pieces of the template, system text, shots, joints.
        rows: input rows with a change in a column that the job named.
    """

    parts: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return the counts of all rules that changed anything."""
        names = [name for name in RULES if self.parts[name] or self.rows[name]]
        return {name: {"parts": self.parts[name], "rows": self.rows[name]} for name in names}

    def describe(self) -> str | None:
        """Return it as a line; None where nothing was changed."""
        said = [
            f"{name} {counts['parts']:,} texts of the job, {counts['rows']:,} rows"
            for name, counts in self.to_json().items()
        ]
        return f"normalised: {'; '.join(said)}" if said else None


class TextRules:
    """Applies the rules for texts."""

    def __init__(self, spec: NormalizeSpec) -> None:
        """Take the rules that are on."""
        self._system_text = spec.system_text
        self._steps: dict[str, Callable[[str, bool], str]] = {}
        if spec.unicode != "none":
            form = spec.unicode.upper()
            self._steps["unicode"] = lambda text, _: _composed(text, form)
        if spec.line_ends:
            self._steps["line_ends"] = lambda text, _: _ANY_LINE_END.sub("\n", text)
        if spec.trailing_space:
            self._steps["trailing_space"] = _without_trailing_space

    def text(self, text: str, changed: set[str], *, is_whole: bool = True) -> str:
        """Write a text as the rules ask.

        Args:
            changed: gets the names of the rules that changed it.
            is_whole: whether nothing stands behind it in what it belongs to.
        """
        for name, step in self._steps.items():
            result = step(text, is_whole)
            if result != text:
                changed.add(name)
                text = result
        return text

    def system(self, text: str, changed: set[str]) -> str:
        """Write a system text as the rules ask."""
        text = self.text(text, changed)
        if not self._system_text:
            return text
        result = _one_spelling(text)
        if result != text:
            changed.add("system_text")
        return result

    def value(self, value: Any, changed: set[str]) -> Any:
        """Write every text in a value, lists and structs included."""
        if isinstance(value, str):
            return self.text(value, changed)
        if isinstance(value, Mapping):
            return {key: self.value(item, changed) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item, changed) for item in value]
        return value


def _composed(text: str, form: str) -> str:
    # The form of a text with lone surrogates is defined as well: they stay as they are.
    return unicodedata.normalize(form, text.lstrip(_BYTE_ORDER_MARK))  # type: ignore[arg-type]


def _without_trailing_space(text: str, is_whole: bool) -> str:
    text = _AT_LINE_END.sub("", text)
    return _AT_END.sub("", text) if is_whole else text


def _one_spelling(text: str) -> str:
    text = _ANY_LINE_END.sub("\n", _composed(text.replace(_BYTE_ORDER_MARK, ""), "NFC"))
    text = _BETWEEN_WORDS.sub(" ", _without_trailing_space(text, is_whole=True))
    return _EMPTY_LINES.sub("\n\n", text).strip()


_FIRST_KEYS = ("role", "content")
_SYSTEM_ROLES = ("system", "developer")


class Normalizer:
    """Writes the job's own texts, and the columns it names, as its rules ask.

    Nothing else is touched: a column that is not named is content.

    Attributes:
        changes: what was changed so far.
    """

    def __init__(self, spec: NormalizeSpec) -> None:
        """Take the rules."""
        self.changes = Changes()
        self._spec = spec
        self._rules = TextRules(spec)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Return a context whose changes do not count: a row is rendered again."""
        changes, self.changes = self.changes, Changes()
        try:
            yield
        finally:
            self.changes = changes

    @property
    def is_on(self) -> bool:
        """Whether any rule is on."""
        return self._spec.is_on

    def part(self, text: str, *, is_whole: bool = True) -> str:
        """Write one of the job's texts: a piece of the template, a joint.

        Args:
            is_whole: whether nothing of the template stands behind it.
        """
        changed: set[str] = set()
        text = self._rules.text(text, changed, is_whole=is_whole)
        self.changes.parts.update(changed)
        return text

    def system(self, text: str) -> str:
        """Write the job's system text."""
        changed: set[str] = set()
        text = self._rules.system(text, changed)
        self.changes.parts.update(changed)
        return text

    def shot(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Write the texts of a row of the job's shots."""
        changed: set[str] = set()
        values: dict[str, Any] = self._rules.value(dict(row), changed)
        self.changes.parts.update(changed)
        return values

    def shots(self, shots: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Put rendered shots into their order."""
        ordered = sorted(shots) if self._spec.shots_order else list(shots)
        self.changes.parts["shots_order"] += ordered != list(shots)
        return ordered

    def row(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write the named columns of an input row."""
        named = [name for name in self._spec.columns if name in values]
        if not named:
            return values
        changed: set[str] = set()
        result = {**values, **{name: self._column(values[name], changed) for name in named}}
        self.changes.rows.update(changed)
        return result

    def text(self, text: str) -> str:
        """Write a prompt that the job named as a column of frames."""
        changed: set[str] = set()
        text = self._rules.text(text, changed)
        self.changes.rows.update(changed)
        return text

    def messages(self, messages: list[Message]) -> list[Message]:
        """Write what stands before the user's last message, and all system messages."""
        changed: set[str] = set()
        asked = [at for at, message in enumerate(messages) if message["role"] == "user"]
        cut = asked[-1] if asked else 0
        result = [
            self._message(message, changed)
            if at < cut or message["role"] in _SYSTEM_ROLES
            else message
            for at, message in enumerate(messages)
        ]
        if self._spec.shots_order:
            result = [*_in_order(result[:cut], changed), *result[cut:]]
        if self._spec.message_parts:
            result = _system_first(result, changed)
        self.changes.rows.update(changed)
        return result

    def _column(self, value: Any, changed: set[str]) -> Any:
        value = self._rules.value(value, changed)
        if self._spec.shots_order and isinstance(value, list):
            ordered = sorted(value, key=_sort_key)
            if ordered != value:
                changed.add("shots_order")
            value = ordered
        return _keys_in_order(value, changed) if self._spec.message_parts else value

    def _message(self, message: Message, changed: set[str]) -> Message:
        rest = {key: item for key, item in message.items() if key != "content"}
        result = {**message, **self._rules.value(rest, changed)}
        content = message.get("content")
        if content is not None:
            is_system = message["role"] in _SYSTEM_ROLES
            write = self._rules.system if is_system else self._rules.text
            written = [write(text, changed) for text in texts_of(content)]
            result["content"] = with_texts(content, written)
        return _keys_in_order(result, changed) if self._spec.message_parts else result


def _in_order(frame: list[Message], changed: set[str]) -> list[Message]:
    """Sort the pairs of question and answer; a frame of another build is left alone."""
    start = next(
        (at for at, each in enumerate(frame) if each["role"] not in _SYSTEM_ROLES), len(frame)
    )
    pairs = list(zip(frame[start::2], frame[start + 1 :: 2], strict=False))
    roles = [(question["role"], answer["role"]) for question, answer in pairs]
    if 2 * len(pairs) != len(frame) - start or set(roles) - {("user", "assistant")}:
        return frame
    ordered = sorted(pairs, key=_sort_key)
    if ordered != pairs:
        changed.add("shots_order")
    return [*frame[:start], *(message for pair in ordered for message in pair)]


def _system_first(messages: list[Message], changed: set[str]) -> list[Message]:
    ordered = sorted(messages, key=lambda message: message["role"] not in _SYSTEM_ROLES)
    if ordered != messages:
        changed.add("message_parts")
    return ordered


def _keys_in_order(value: Any, changed: set[str]) -> Any:
    """Sort the keys of structs at every depth, role and content first."""
    if isinstance(value, list):
        return [_keys_in_order(item, changed) for item in value]
    if not isinstance(value, dict):
        return value
    first = [key for key in _FIRST_KEYS if key in value]
    keys = [*first, *sorted(key for key in value if key not in _FIRST_KEYS)]
    if keys != list(value):
        changed.add("message_parts")
    return {key: _keys_in_order(value[key], changed) for key in keys}


def _sort_key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
