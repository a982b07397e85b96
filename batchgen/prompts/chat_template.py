"""The model's chat template, rendered in our sandbox as transformers renders it."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from batchgen.prompts.marks import Marks
from batchgen.prompts.sandbox import Environment, LimitError
from batchgen.prompts.tokenizer import Tokenizer, has_chat_template
from batchgen.text import refuse_lone_surrogates

# Names that messages have for their reasoning; the first is what templates read.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders messages to text in which the template's own special tokens are marked.

    Args:
        tokenizer: has the template and the special tokens that it names.
        marks: of the special tokens.
        now: gives the time that templates may print.
    """

    def __init__(
        self, tokenizer: Tokenizer, marks: Marks, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._tokenizer = tokenizer
        self._names = {
            name: marks.mark(token) for name, token in tokenizer.special_tokens_map.items()
        }
        self._environment = Environment(
            marks,
            joins_roles=True,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
        )
        self._environment.filters["tojson"] = self._to_json
        self._environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
        }
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **names: Any,
    ) -> str:
        """Render messages up to where the assistant's answer begins.

        Args:
            names: what else the template sees, such as ``tools``.

        Raises:
            ValueError: the chat template refuses or fails on these messages.
        """
        values: dict[str, Any] = {
            "messages": list(map(_as_seen, messages)),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._names,
            **names,
        }
        try:
            refuse_lone_surrogates([values["messages"], names], "the chat")
            source = self._tokenizer.get_chat_template(tools=values["tools"])
            return self._environment.render(self._template(source), values)
        except LimitError as error:
            raise LimitError(f"the model's chat template takes {error}") from error
        except Exception as error:
            # A template is a program of the model's author: it raises what it likes.
            raise ValueError(f"chat template: {error}") from error

    def _template(self, source: str) -> jinja2.Template:
        if source not in self._compiled:
            self._compiled[source] = self._environment.compiled(self._environment.parse(source))
        return self._compiled[source]

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            self._environment.marks.plain(value) if ensure_ascii else value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Give the special token with which the chat template ends an answer.

    Returns None where there is no template, or what it puts behind an answer is no special token.
    """
    if not has_chat_template(tokenizer):
        return None
    answer = "answer"
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    try:
        text = ChatTemplate(tokenizer, Marks(())).render(chat, add_generation_prompt=False)
    except ValueError:
        return None
    behind = text.rpartition(answer)[2].lstrip()
    ends = [
        (len(token.content), int(token_id))
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content and behind.startswith(token.content)
    ]
    return max(ends)[1] if ends else None


class _Generation(Extension):
    """``{% generation %}`` says for training what the assistant wrote; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _as_seen(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out keys without a value, and name the reasoning as templates do."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING_FIELDS if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
