"""From a row's columns to a prompt: token ids, a text, or a chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.errors import RowError, RowErrorType, UsageError
from batchgen.prompts.columns import close_matches, is_list_of, is_text
from batchgen.prompts.messages import Message, parse_messages
from batchgen.prompts.row_sampling import sampling_columns
from batchgen.prompts.shots import render_shots
from batchgen.prompts.special import ContentGuard
from batchgen.prompts.template import RowTemplate
from batchgen.prompts.tokenizer import Tokenizer, has_chat_template, render_chat

DEFAULT_TOKEN_IDS_COLUMN = "prompt_token_ids"
DEFAULT_MESSAGES_COLUMN = "messages"
DEFAULT_COLUMN = "prompt"


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """The ``prompt`` keys, with every text already read from its file.

    Attributes:
        column, messages_column, token_ids_column, template: the explicit sources; at
            most one may be given, and with none the input's columns decide.
        format: ``auto``, ``chat`` or ``plain``; how template, system and shots join.
        system: goes before everything; an empty text counts as none.
        shots: rows with the template's columns and ``answer_column``, in order.
        separator, answer_prefix: the joints of the plain format.
    """

    column: str | None = None
    messages_column: str | None = None
    token_ids_column: str | None = None
    template: str | None = None
    format: str = "auto"
    system: str | None = None
    shots: Sequence[Mapping[str, Any]] = ()
    answer_column: str = "answer"
    separator: str = "\n\n"
    answer_prefix: str = " "


class Source(StrEnum):
    """What a row's prompt is made from."""

    TOKEN_IDS = "token ids"
    MESSAGES = "messages"
    TEXT = "text"
    TEMPLATE = "template"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids that the user made; not yet checked against the vocabulary."""

    ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Text:
    """A text to tokenise as it stands, special tokens' spellings included.

    Attributes:
        text: the whole prompt.
        hides: in it stand characters for spellings that stay text (see ``ContentGuard.hide``).
    """

    text: str
    hides: bool = False


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the model's chat template."""

    messages: list[Message]


Prompt = TokenIds | Text | Chat


class Renderer:
    """Renders rows from the one source that the keys and the input's columns settle.

    Attributes:
        source: what prompts are made from.
        format: ``chat`` or ``plain`` for a template, else None.
        columns: the input columns to read, those of per-row sampling included.
    """

    def __init__(self, spec: PromptSpec, schema: pa.Schema, tokenizer: Tokenizer | None) -> None:
        """Settle the source and check everything that does not depend on a row.

        Args:
            schema: the input's columns and types.
            tokenizer: may be None only where the rows carry token ids.

        Raises:
            UsageError: no source or two, a missing column or one of the wrong type, a
                broken template or shot, or keys that do not fit the source.
        """
        self.source, self._column = _settle_source(spec, schema.names)
        _check_keys_fit(spec, self.source)
        if self._column is not None:
            _check_type(self.source, self._column, schema.field(self._column).type)
        _check_tokenizer(self.source, spec, tokenizer)
        self.format: str | None = None
        if self.source is Source.TEMPLATE:
            self.format = _settle_format(spec.format, tokenizer)
            self._prepare_template(spec, schema.names, tokenizer)
        own = (self._column,) if self._column is not None else self._template.columns
        self.columns: tuple[str, ...] = tuple(dict.fromkeys((*own, *sampling_columns(schema))))

    def _prepare_template(
        self, spec: PromptSpec, names: Sequence[str], tokenizer: Tokenizer | None
    ) -> None:
        self._template = RowTemplate(spec.template or "", names)
        # In a chat the spelling of a special token is kept as text later, in all messages.
        self._guard = ContentGuard(tokenizer) if self.format == "plain" else None
        self._head_hides = False
        shots = render_shots(self._shots(spec.shots), self._template, spec.answer_column)
        self._head_messages: list[Message] = []
        if spec.system:
            self._head_messages.append({"role": "system", "content": spec.system})
        for question, answer in shots:
            self._head_messages.append({"role": "user", "content": question})
            self._head_messages.append({"role": "assistant", "content": answer})
        self._head_text = spec.system + spec.separator if spec.system else ""
        self._head_text += "".join(
            question + spec.answer_prefix + answer + spec.separator for question, answer in shots
        )
        if self.format == "chat":
            _probe_chat(self._chat("?").messages, tokenizer)

    def render(self, table: pa.RecordBatch) -> list[Prompt | RowError]:
        """Render a batch; the result has one entry for each row, in order.

        Errors: ``null_prompt``, ``empty_prompt``, ``invalid_messages``,
        ``invalid_token_ids`` or ``template_error``.
        """
        if self.source is Source.TEMPLATE:
            rows = table.select(list(self._template.columns)).to_pylist()
            # A table of no columns has no rows in Python, but still num_rows of them.
            return [self._render_template(row) for row in rows or [{}] * table.num_rows]
        column = table.column(self._column)
        if self.source is Source.TOKEN_IDS:
            return [_token_ids(column, row) for row in range(len(column))]
        make = _text if self.source is Source.TEXT else _messages
        return [make(value) for value in column.to_pylist()]

    def _render_template(self, row: Mapping[str, Any]) -> Prompt | RowError:
        try:
            hides = False
            if self._guard is not None:
                row, hides = self._guard.hide(row, always=self._head_hides)
            text = self._template.render(row)
        except ValueError as error:
            return RowError(RowErrorType.TEMPLATE_ERROR, str(error))
        if not text:
            return RowError(RowErrorType.EMPTY_PROMPT, "prompt.template gave an empty text")
        if self.format == "chat":
            return self._chat(text)
        return Text(self._head_text + text, hides)

    def _shots(self, shots: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Hide what the shots of a plain prompt spell."""
        if self._guard is None:
            return list(shots)
        try:
            hidden, self._head_hides = self._guard.hide(list(shots))
        except ValueError as error:
            raise UsageError(f"prompt.shots_file: {error}") from error
        return list(hidden)

    def _chat(self, text: str) -> Chat:
        return Chat([*self._head_messages, {"role": "user", "content": text}])


def _settle_source(spec: PromptSpec, names: Sequence[str]) -> tuple[Source, str | None]:
    keys = {
        "prompt.token_ids_column": (Source.TOKEN_IDS, spec.token_ids_column),
        "prompt.messages_column": (Source.MESSAGES, spec.messages_column),
        "prompt.column": (Source.TEXT, spec.column),
        "prompt.template": (Source.TEMPLATE, spec.template),
    }
    explicit = [(key, source, value) for key, (source, value) in keys.items() if value is not None]
    if len(explicit) > 1:
        given = " and ".join(key for key, _, _ in explicit)
        raise UsageError(f"{given} each say where the prompt comes from; keep one of them")
    if not explicit:
        return _default_source(names)
    key, source, value = explicit[0]
    if source is Source.TEMPLATE:
        return source, None
    if value not in names:
        raise UsageError(
            f"{key}={value} is no column of the input{close_matches(value, names)}. "
            f"Columns: {', '.join(names)}"
        )
    return source, value


def _default_source(names: Sequence[str]) -> tuple[Source, str]:
    defaults = (
        (Source.TOKEN_IDS, DEFAULT_TOKEN_IDS_COLUMN),
        (Source.MESSAGES, DEFAULT_MESSAGES_COLUMN),
        (Source.TEXT, DEFAULT_COLUMN),
    )
    for source, column in defaults:
        if column in names:
            return source, column
    raise UsageError(
        f"the input has none of the columns {', '.join(column for _, column in defaults)}. "
        "Name the prompt's column with prompt.column, prompt.messages_column or "
        "prompt.token_ids_column, or write a prompt.template over the columns. "
        f"Columns: {', '.join(names)}"
    )


def _check_keys_fit(spec: PromptSpec, source: Source) -> None:
    if source is Source.TEMPLATE:
        return
    keys = {"prompt.system": spec.system, "prompt.shots_file": spec.shots}
    given = [key for key, value in keys.items() if value]
    if given:
        raise UsageError(
            f"{' and '.join(given)} need a prompt.template; the prompt comes from the input's "
            f"{source.value} as it stands. For a text column write "
            "prompt.template='{{ column }}'"
        )
    if spec.format == "chat" and source is Source.TEXT:
        raise UsageError(
            "prompt.format=chat needs a prompt.template, for example prompt.template="
            "'{{ prompt }}'; a prompt column is tokenised as it stands"
        )
    if spec.format == "plain" and source is Source.MESSAGES:
        raise UsageError("prompt.format=plain cannot be used with messages; leave it out")


def _check_type(source: Source, column: str, kind: pa.DataType) -> None:
    fits = {
        Source.TEXT: is_text(kind),
        Source.MESSAGES: is_text(kind) or is_list_of(kind, pa.types.is_struct),
        Source.TOKEN_IDS: is_list_of(kind, pa.types.is_integer),
    }
    if fits[source] or pa.types.is_null(kind):
        return
    wanted = {
        Source.TEXT: "text",
        Source.MESSAGES: "a list of structs with role and content, or a JSON text",
        Source.TOKEN_IDS: "a list of integers",
    }
    hint = ""
    if source is Source.TEXT and is_list_of(kind, pa.types.is_struct):
        hint = f"; for chat messages set prompt.messages_column={column}"
    raise UsageError(f"column '{column}' must be {wanted[source]}, but is {kind}{hint}")


def _check_tokenizer(source: Source, spec: PromptSpec, tokenizer: Tokenizer | None) -> None:
    if source is Source.TOKEN_IDS:
        return
    if tokenizer is None:
        raise UsageError(
            f"the model has no tokenizer, which prompts from {source.value} need; set "
            "model.tokenizer, or give token ids"
        )
    needs_chat = source is Source.MESSAGES or (source is Source.TEMPLATE and spec.format == "chat")
    if needs_chat and not has_chat_template(tokenizer):
        what = "messages" if source is Source.MESSAGES else "prompt.format=chat"
        raise UsageError(
            f"{what} need a chat template, and this tokenizer has none; use a "
            "prompt.template with prompt.format=plain, or set model.tokenizer"
        )


def _settle_format(asked: str, tokenizer: Tokenizer | None) -> str:
    if asked == "auto":
        return "chat" if has_chat_template(tokenizer) else "plain"
    return asked


def _probe_chat(messages: list[Message], tokenizer: Tokenizer | None) -> None:
    # Some models refuse a system message: better said once than on every row.
    try:
        render_chat(tokenizer, messages)
    except ValueError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UsageError(
            f"the model's chat template refuses the messages of this job ({roles}): {error}. "
            "Leave out what it names, or set prompt.format=plain"
        ) from error


def _text(value: str | None) -> Prompt | RowError:
    if value is None:
        return RowError(RowErrorType.NULL_PROMPT, "the prompt is null")
    if not value:
        return RowError(RowErrorType.EMPTY_PROMPT, "the prompt is an empty text")
    return Text(value)


def _messages(value: Any) -> Prompt | RowError:
    if value is None:
        return RowError(RowErrorType.NULL_PROMPT, "the messages are null")
    try:
        return Chat(parse_messages(value))
    except ValueError as error:
        return RowError(RowErrorType.INVALID_MESSAGES, str(error))


def _token_ids(column: pa.Array, row: int) -> Prompt | RowError:
    scalar = column[row]
    if not scalar.is_valid:
        return RowError(RowErrorType.NULL_PROMPT, "the token ids are null")
    values = scalar.values
    if len(values) == 0:
        return RowError(RowErrorType.EMPTY_PROMPT, "the list of token ids is empty")
    if values.null_count:
        return RowError(RowErrorType.INVALID_TOKEN_IDS, "the list of token ids holds a null")
    # Out-of-range values (uint64 too) must stay visible, so nothing is cast here.
    return TokenIds(values.to_numpy(zero_copy_only=False))
