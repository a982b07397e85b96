"""From a row's columns to a prompt: token ids, a text, or a chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen import activity
from batchgen.errors import RowError, RowErrorType, UsageError
from batchgen.prompts.chat_template import ChatTemplate
from batchgen.prompts.fields.orders import FieldOrders
from batchgen.prompts.marks import Marks
from batchgen.prompts.messages import Message, Tool, parse_messages, parse_tools
from batchgen.prompts.normalize import Normalizer
from batchgen.prompts.row_sampling import sampling_columns
from batchgen.prompts.sandbox import LimitError
from batchgen.prompts.shots import render_shots
from batchgen.prompts.source import (
    PromptSpec,
    Source,
    check_chat_keys,
    check_keys_fit,
    check_normalize,
    check_tokenizer,
    check_type,
    settle_format,
    settle_source,
    settle_tools,
)
from batchgen.prompts.special import SpecialTokens
from batchgen.prompts.template import RowTemplate
from batchgen.prompts.tokenizer import Tokenizer, has_chat_template
from batchgen.prompts.values import Unreadable, python_rows, python_values

# Stands for a row's own text in a chat template; a private-use character.
_MARK = "\U0010fffe"
_EMPTY_TEXT = "the prompt is an empty text"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids that the user made; not yet checked against the vocabulary."""

    ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Text:
    """A text to tokenise as it stands, special tokens' spellings included.

    Attributes:
        text: the whole prompt.
        is_marked: its special tokens are those marked in it (see ``marks``), and no others.
    """

    text: str
    is_marked: bool = False


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the model's chat template.

    Attributes:
        messages: checked messages.
        tools: what the assistant may call.
        continues: whether the last message is to be continued, not answered.
    """

    messages: list[Message]
    tools: list[Tool] | None = None
    continues: bool = False


Prompt = TokenIds | Text | Chat


class Renderer:
    """Renders rows from the one source that the keys and the input's columns settle.

    Attributes:
        source: what prompts are made from.
        format: ``chat`` or ``plain`` for a template, else None.
        columns: the input columns to read, those of per-row sampling included.
        prompt_columns: those of them that prompts are made from.
        normalizer: what ``prompt.normalize`` has changed so far.
        field_orders: the order of ``fields`` in each row; None for the order given.
        special: tells the tokenizer's special tokens from text.
        chat_template: the model's, where it has one.
        tools_column: names the tools of a row, where they are used.
        ignored: says that a column which looks like the rows' tools is not used.
        rows_ending_with_assistant: so far, those that are not continued.
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
        self.source, self._column = settle_source(spec, schema.names)
        check_keys_fit(spec, self.source)
        if self._column is not None:
            check_type(self.source, self._column, schema.field(self._column).type)
        check_tokenizer(self.source, spec, tokenizer)
        self.normalizer = Normalizer(spec.normalize)
        self.field_orders: FieldOrders | None = None
        self.format: str | None = None
        self.special = SpecialTokens(tokenizer)
        self.chat_template = (
            ChatTemplate(tokenizer, self.special.marks, spec.variables)
            if has_chat_template(tokenizer)
            else None
        )
        self.tools_column, self.ignored = settle_tools(spec, self.source, schema, tokenizer)
        self._continues = spec.continue_final_message
        self.rows_ending_with_assistant = 0
        if self.source is Source.TEMPLATE:
            self.format = settle_format(spec.format, tokenizer)
            self._prepare_template(spec, schema.names, tokenizer)
        check_chat_keys(spec, self.source, self.format)
        own = (self._column,) if self._column is not None else self._template.columns
        self.prompt_columns: tuple[str, ...] = tuple(own)
        check_normalize(spec.normalize, self.source, own)
        self._is_frame = self._column in spec.normalize.columns
        self._probe_chat()
        tools = () if self.tools_column is None else (self.tools_column,)
        self.columns: tuple[str, ...] = tuple(
            dict.fromkeys((*own, *tools, *sampling_columns(schema)))
        )

    def _prepare_template(
        self, spec: PromptSpec, names: Sequence[str], tokenizer: Tokenizer | None
    ) -> None:
        # In a chat all messages are data to the chat template, our template's text included.
        marks = self.special.marks if self.format == "plain" else Marks(())
        own = self.normalizer
        rewrite = (lambda text, is_end: own.part(text, is_whole=is_end)) if own.is_on else None
        self._template = RowTemplate(
            spec.template or "",
            names,
            rewrite=rewrite,
            fields=spec.fields,
            marks=marks,
        )
        rows = [own.shot(row) for row in spec.shots]
        places = spec.shot_places or [f"shot {number}" for number in range(len(rows))]
        shots = own.shots(render_shots(rows, self._template, spec.answer_column, places))
        system = own.system(spec.system) if spec.system else ""
        separator = marks.mark(own.part(spec.separator, is_whole=False))
        answer_prefix = marks.mark(own.part(spec.answer_prefix, is_whole=False))
        self._head_messages: list[Message] = []
        if system:
            self._head_messages.append({"role": "system", "content": system})
        for question, answer in shots:
            self._head_messages.append({"role": "user", "content": question})
            self._head_messages.append({"role": "assistant", "content": answer})
        self._head_text = marks.mark(system) + separator if system else ""
        self._head_text += "".join(
            question + answer_prefix + answer + separator for question, answer in shots
        )

    def render(self, table: pa.RecordBatch, first_row: int = 0) -> list[Prompt | RowError]:
        """Render a batch; the result has one entry for each row, in order.

        Args:
            first_row: position in the input of the batch's first row.

        Errors: ``null_prompt``, ``empty_prompt``, ``invalid_messages``,
        ``invalid_token_ids`` or ``template_error``.
        """
        if self.source is Source.TEMPLATE:
            rows = python_rows(table.select(list(self._template.columns)))
            return [self._render_template(row, first_row + at) for at, row in enumerate(rows)]
        column = table.column(self._column)
        if self.source is Source.TOKEN_IDS:
            return [_token_ids(column, row) for row in range(len(column))]
        values = python_values(column)
        if self.source is Source.TEXT:
            return [self._text(value) for value in values]
        tools = [None] * len(values)
        if self.tools_column is not None:
            tools = python_values(table.column(self.tools_column))
        return list(map(self._messages, values, tools))

    def shared_head(self) -> str | None:
        """Return the text with which every row's prompt begins, special tokens spelt out.

        Returns:
            None where a row brings its own beginning, or all rows are the same.
        """
        if self.source is not Source.TEMPLATE or not self._template.columns:
            return None
        prompt = self._prompt(self._template.lead + _MARK)
        text = prompt.text if isinstance(prompt, Text) else self.render_chat(prompt)
        head, mark, _ = self.special.marks.plain(text).partition(_MARK)
        return head if mark else None

    def render_chat(self, chat: Chat) -> str:
        """Render messages through the model's chat template; its special tokens are marked.

        Raises:
            ValueError: the chat template refuses or fails on these messages.
        """
        assert self.chat_template is not None
        return self.chat_template.render(chat.messages, tools=chat.tools, continues=chat.continues)

    def _prompt(self, text: str) -> Text | Chat:
        if self.format == "chat":
            return self._chat(text)
        return Text(self._head_text + text, is_marked=True)

    def _render_template(
        self, row: Mapping[str, Any] | Unreadable, position: int
    ) -> Prompt | RowError:
        activity.note(f"rendering prompt.template for row {position}")
        if isinstance(row, Unreadable):
            return RowError(RowErrorType.TEMPLATE_ERROR, str(row))
        order = self.field_orders.of(position) if self.field_orders is not None else ()
        try:
            text = self._template.render(self.normalizer.row(row), order)
        except ValueError as error:
            return RowError(RowErrorType.TEMPLATE_ERROR, str(error))
        if not text:
            return RowError(RowErrorType.EMPTY_PROMPT, "prompt.template gave an empty text")
        return self._prompt(text)

    def _probe_chat(self) -> None:
        """Try the job's messages on the chat template: better said once than on every row."""
        if self.source is not Source.MESSAGES and self.format != "chat":
            return
        messages = [] if self.source is Source.MESSAGES else self._head_messages
        chat = Chat([*messages, {"role": "user", "content": "?"}])
        assert self.chat_template is not None
        try:
            self.chat_template.check_user()
            self.render_chat(chat)
        except LimitError as error:
            raise UsageError(
                f"{error}; set model.tokenizer to one with another template"
            ) from error
        except ValueError as error:
            if self.source is Source.MESSAGES:
                # The rows' own messages may be others.
                return
            roles = ", ".join(message["role"] for message in chat.messages)
            raise UsageError(
                f"the model's chat template refuses the messages of this job ({roles}): {error}. "
                "Leave out what it names, or set prompt.format=plain"
            ) from error

    def _chat(self, text: str) -> Chat:
        return Chat([*self._head_messages, {"role": "user", "content": text}])

    def _text(self, value: str | None) -> Prompt | RowError:
        if value is None:
            return RowError(RowErrorType.NULL_PROMPT, "the prompt is null")
        text = self.normalizer.text(value) if self._is_frame else value
        return Text(text) if text else RowError(RowErrorType.EMPTY_PROMPT, _EMPTY_TEXT)

    def _messages(self, value: Any, tools: Any) -> Prompt | RowError:
        if value is None:
            return RowError(RowErrorType.NULL_PROMPT, "the messages are null")
        for each in (value, tools):
            if isinstance(each, Unreadable):
                return RowError(RowErrorType.INVALID_MESSAGES, str(each))
        try:
            messages, parsed_tools = parse_messages(value), parse_tools(tools)
        except ValueError as error:
            return RowError(RowErrorType.INVALID_MESSAGES, str(error))
        if self._is_frame:
            messages = self.normalizer.messages(messages)
        is_last_of_assistant = messages[-1]["role"] == "assistant"
        self.rows_ending_with_assistant += is_last_of_assistant and not self._continues
        return Chat(messages, parsed_tools, is_last_of_assistant and self._continues)


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
