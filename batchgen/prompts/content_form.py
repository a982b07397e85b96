"""In which form a chat template takes the content of messages: as a text, or in parts.

Some templates loop over ``message['content']`` and print the text of each part; given a text they
print nothing, without an error. Others print a list as Python writes it. So a template is tried
once for each role and form, with a text that is easily found again in what it renders.
"""

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cache
from typing import Any

from batchgen.errors import UsageError
from batchgen.prompts.messages import Content, Message, Tool, text_of, texts_of
from batchgen.prompts.sandbox import LimitError

# Private-use characters, which no template changes.
_FIRST, _SECOND = "\U0010fffa", "\U0010fffb"
_RAW = re.compile(rf"""["']text["']\s*:\s*["']{_FIRST}""")
_CALL: Tool = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "f", "arguments": {}},
}


class _Form(StrEnum):
    TEXT = "text"
    PART = "one part"
    PARTS = "parts"


_CHOICES = {
    _Form.TEXT: (_Form.TEXT, _Form.PART),
    _Form.PART: (_Form.PART, _Form.TEXT),
    _Form.PARTS: (_Form.PARTS, _Form.TEXT, _Form.PART),
}


class ContentForms:
    """Presents content to a chat template in a form from which it takes the text.

    Args:
        render: the chat template, from messages to text; raises ValueError where it refuses them.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._keeps = cache(self._probe)

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with each content as it was given, or in the form that is taken."""
        return [self._fitted(message) for message in messages]

    def check(self, messages: Sequence[Message], rendered: str) -> None:
        """Look whether the template leaves out the content of a message without an error.

        Raises:
            ValueError: it does; the message names the role.
        """
        for message in messages:
            content = message.get("content")
            if content is None:
                continue
            if self._keeps(message["role"], self._form(message["role"], content)) is not False:
                continue
            # The template may well print such a message in this place.
            if any(text.strip() not in rendered for text in texts_of(content)):
                raise ValueError(
                    f"the chat template leaves out what messages of the role {message['role']} say"
                )

    def check_user(self) -> None:
        """Look whether the template takes what users write.

        Raises:
            UsageError: it leaves it out, in whatever form.
        """
        if self._keeps("user", self._form("user", "")) is False:
            raise UsageError(
                "the model's chat template leaves out what the user's messages say, given as a "
                "text and as a list of parts; name another template with "
                "prompt.chat_template_file, or use a prompt.template with prompt.format=plain"
            )

    def _fitted(self, message: Message) -> Message:
        content = message.get("content")
        if content is None:
            return message
        form = self._form(message["role"], content)
        if form is _Form.TEXT:
            return {**message, "content": text_of(content)}
        if form is _Form.PART and (isinstance(content, str) or len(content) != 1):
            return {**message, "content": [{"type": "text", "text": text_of(content)}]}
        return message

    def _form(self, role: str, content: Content) -> _Form:
        if isinstance(content, str):
            given = _Form.TEXT
        else:
            given = _Form.PART if len(content) == 1 else _Form.PARTS
        return next((form for form in _CHOICES[given] if self._keeps(role, form)), given)

    def _probe(self, role: str, form: _Form) -> bool | None:
        """Try a role in a form: whether the text comes through, None where it is refused."""
        texts = [_FIRST, _SECOND] if form is _Form.PARTS else [_FIRST + _SECOND]
        content: Any = [{"type": "text", "text": text} for text in texts]
        probed = {"role": role, "content": texts[0] if form is _Form.TEXT else content}
        for messages in self._conversations(probed):
            try:
                rendered = self._render(messages)
            except LimitError:
                raise
            except ValueError:
                continue
            is_there = _FIRST in rendered and _SECOND in rendered
            return is_there and not _RAW.search(rendered)
        return None

    def _conversations(self, probed: Message) -> list[list[Message]]:
        """Return conversations with a message, the likeliest first."""
        role = probed["role"]
        if role == "user":
            return [[probed]]
        user = self._fitted({"role": "user", "content": "?"})
        if role in ("system", "developer"):
            return [[probed, user]]
        if role == "assistant":
            return [[user, probed, user], [user, probed]]
        called = {"role": "assistant", "tool_calls": [_CALL]}
        answer = {**probed, "tool_call_id": _CALL["id"], "name": "f"}
        return [[user, called, answer], [user, probed], [probed, user]]
