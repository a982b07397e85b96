"""The model's chat template, rendered in our sandbox as transformers renders it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from batchgen.errors import UsageError
from batchgen.prompts.columns import close_matches
from batchgen.prompts.content_form import ContentForms
from batchgen.prompts.marks import Marks
from batchgen.prompts.messages import Message, Tool, texts_of, with_texts
from batchgen.prompts.sandbox import Environment, LimitError
from batchgen.prompts.tokenizer import Tokenizer, has_chat_template
from batchgen.text import refuse_lone_surrogates

# Names that messages have for their reasoning; the first is what templates read.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# What the renderer gives to a template; the rest of its names are variables of its own.
_GIVEN = ("messages", "tools", "add_generation_prompt", "continue_final_message")
# Behind the text to continue; the blank shows whether the template strips it.
_END = "\U0010fffb "


@dataclass(frozen=True, slots=True)
class TemplateVariables:
    """What a job gives to the chat template beside its messages.

    Attributes:
        named: ``prompt.chat_template_kwargs``.
        now: the time that the template may print, the same for all of a job.
    """

    named: Mapping[str, Any] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.now().astimezone())


class ChatTemplate:
    """Renders messages to text in which the template's own special tokens are marked.

    Args:
        tokenizer: has the template and the special tokens that it names.
        marks: of the special tokens.
        variables: what else the template sees.

    Raises:
        UsageError: a variable is none of the template's, or the renderer's own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: Marks,
        variables: TemplateVariables | None = None,
    ) -> None:
        variables = variables or TemplateVariables()
        self._tokenizer = tokenizer
        self._variables = dict(variables.named)
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
            "strftime_now": lambda form: _time_text(variables.now, form),
        }
        self._compiled: dict[str, jinja2.Template] = {}
        _check_variables(variables.named, tokenizer, self._environment.globals)
        self._forms = ContentForms(lambda messages: self._render(messages, None))

    def check_user(self) -> None:
        """Refuse a template that leaves out what users write.

        Raises:
            UsageError: it does.
        """
        self._forms.check_user()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Tool] | None = None,
        continues: bool = False,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages up to where the assistant's answer begins or goes on.

        Args:
            messages: checked messages.
            tools: what the assistant may call.
            continues: whether the last message is to be continued, not answered.
            add_generation_prompt: whether an answer is begun where none is continued.

        Raises:
            ValueError: the chat template refuses these messages, fails on them, or leaves out
                what one of them says.
        """
        fitted = self._forms.fitted(messages)
        if continues:
            text = self._render_continued(fitted, tools)
        else:
            text = self._render(fitted, tools, add_generation_prompt)
        self._forms.check(messages, text)
        return text

    def _render_continued(self, messages: Sequence[Message], tools: list[Tool] | None) -> str:
        """Render messages up to the end of the last one's text, as transformers does."""
        *before, last = messages
        content = last.get("content", [])
        texts = texts_of(content)
        if not texts:
            raise ValueError("the last message has no text to continue")
        marked = with_texts(content, [*texts[:-1], texts[-1] + _END])
        rendered = self._render([*before, {**last, "content": marked}], tools, False)
        head, end, behind = rendered.rpartition(_END.strip())
        if not end or texts[-1].strip() not in head:
            raise ValueError("the chat template changes the message that is to be continued")
        return head if behind.startswith(" ") else head.rstrip()

    def _render(
        self,
        messages: Sequence[Message],
        tools: list[Tool] | None,
        add_generation_prompt: bool = True,
    ) -> str:
        values: dict[str, Any] = {
            "messages": list(map(_as_seen, messages)),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._names,
            **self._variables,
        }
        try:
            refuse_lone_surrogates([values["messages"], tools, self._variables], "the chat")
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
    """Return the special token with which the chat template ends an answer.

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


def template_reads(tokenizer: Tokenizer, name: str) -> bool:
    """Whether the chat template names a variable, such as ``tools`` or ``strftime_now``."""
    return re.search(rf"\b{re.escape(name)}\b", _sources(tokenizer)) is not None


def _sources(tokenizer: Tokenizer) -> str:
    """Return the text of the chat template, or of all where there are several by name."""
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def _check_variables(
    named: Mapping[str, Any], tokenizer: Tokenizer, own: Mapping[str, Any]
) -> None:
    for name in named:
        if name in _GIVEN or name in own:
            raise UsageError(
                f"prompt.chat_template_kwargs.{name} cannot be set: batchgen gives it to the "
                "chat template itself"
            )
        if not template_reads(tokenizer, name):
            words = sorted(set(re.findall(r"[A-Za-z_]\w{2,}", _sources(tokenizer))))
            raise UsageError(
                f"prompt.chat_template_kwargs.{name}: the chat template has no variable of this "
                f"name{close_matches(name, words)}; correct it, or leave it out"
            )


def _time_text(now: datetime, form: str) -> str:
    """Format a time as transformers formats the local one, on a machine in any time zone."""
    # The C library's own %s would take this machine's zone.
    form = re.sub(
        "%(.)", lambda code: f"{now.timestamp():.0f}" if code[1] == "s" else code[0], form
    )
    return now.replace(tzinfo=None).strftime(form)


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
