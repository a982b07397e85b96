"""``prompt.normalize`` over all that makes a prompt's frame: the job's texts, named columns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from batchgen.prompts.messages import Message, texts_of, with_texts
from batchgen.prompts.normalize.rules import Changes, NormalizeSpec, TextRules

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
