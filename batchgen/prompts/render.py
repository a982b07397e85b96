"""From a row's columns to a prompt: token ids, a text, or a chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.errors import RowError, RowErrorType, UsageError
from batchgen.prompts.fields.orders import FieldOrders
from batchgen.prompts.messages import Message, parse_messages
from batchgen.prompts.normalize.normalizer import Normalizer
from batchgen.prompts.row_sampling import sampling_columns
from batchgen.prompts.shots import render_shots
from batchgen.prompts.source import (
    PromptSpec,
    Source,
    check_keys_fit,
    check_normalize,
    check_tokenizer,
    check_type,
    probe_chat,
    settle_format,
    settle_source,
)
from batchgen.prompts.special import ContentGuard
from batchgen.prompts.template import RowTemplate
from batchgen.prompts.tokenizer import Tokenizer, render_chat
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
        normalizer: what ``prompt.normalize`` has changed so far.
        field_orders: the order of ``fields`` in each row; None for the order given.
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
        if self.source is Source.TEMPLATE:
            self.format = settle_format(spec.format, tokenizer)
            self._prepare_template(spec, schema.names, tokenizer)
        own = (self._column,) if self._column is not None else self._template.columns
        check_normalize(spec.normalize, self.source, own)
        self._is_frame = self._column in spec.normalize.columns
        self.columns: tuple[str, ...] = tuple(dict.fromkeys((*own, *sampling_columns(schema))))

    def _prepare_template(
        self, spec: PromptSpec, names: Sequence[str], tokenizer: Tokenizer | None
    ) -> None:
        # In a chat the spelling of a special token is kept as text later, in all messages.
        self._guard = ContentGuard(tokenizer) if self.format == "plain" else None
        self._head_hides = False
        own = self.normalizer
        rewrite = (lambda text, is_end: own.part(text, is_whole=is_end)) if own.is_on else None
        self._template = RowTemplate(
            spec.template or "", names, rewrite=rewrite, fields=spec.fields
        )
        rows = self._shots([own.shot(row) for row in spec.shots])
        places = spec.shot_places or [f"shot {number}" for number in range(len(rows))]
        shots = own.shots(render_shots(rows, self._template, spec.answer_column, places))
        system = own.system(spec.system) if spec.system else ""
        separator = own.part(spec.separator, is_whole=False)
        answer_prefix = own.part(spec.answer_prefix, is_whole=False)
        self._head_messages: list[Message] = []
        if system:
            self._head_messages.append({"role": "system", "content": system})
        for question, answer in shots:
            self._head_messages.append({"role": "user", "content": question})
            self._head_messages.append({"role": "assistant", "content": answer})
        self._head_text = system + separator if system else ""
        self._head_text += "".join(
            question + answer_prefix + answer + separator for question, answer in shots
        )
        if self.format == "chat":
            probe_chat(self._chat("?").messages, tokenizer)

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
        make = self._text if self.source is Source.TEXT else self._messages
        return [make(value) for value in python_values(column)]

    def shared_head(self, tokenizer: Tokenizer | None) -> str | None:
        """Give the text with which every row's prompt begins, special tokens spelt out.

        Returns:
            None where a row brings its own beginning, all rows are the same, or a shot spells
            a special token that is to stay text.
        """
        if self.source is not Source.TEMPLATE or not self._template.columns or self._head_hides:
            return None
        lead = self._template.lead
        if self.format == "plain":
            return self._head_text + lead
        head, mark, _ = render_chat(tokenizer, self._chat(lead + _MARK).messages).partition(_MARK)
        return head if mark else None

    def _render_template(
        self, row: Mapping[str, Any] | Unreadable, position: int
    ) -> Prompt | RowError:
        if isinstance(row, Unreadable):
            return RowError(RowErrorType.TEMPLATE_ERROR, str(row))
        order = self.field_orders.of(position) if self.field_orders is not None else ()
        try:
            values, hides = self.normalizer.row(row), False
            if self._guard is not None:
                values, hides = self._guard.hide(values, always=self._head_hides)
            text = self._template.render(values, order)
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

    def _text(self, value: str | None) -> Prompt | RowError:
        if value is None:
            return RowError(RowErrorType.NULL_PROMPT, "the prompt is null")
        text = self.normalizer.text(value) if self._is_frame else value
        return Text(text) if text else RowError(RowErrorType.EMPTY_PROMPT, _EMPTY_TEXT)

    def _messages(self, value: Any) -> Prompt | RowError:
        if value is None:
            return RowError(RowErrorType.NULL_PROMPT, "the messages are null")
        if isinstance(value, Unreadable):
            return RowError(RowErrorType.INVALID_MESSAGES, str(value))
        try:
            messages = parse_messages(value)
        except ValueError as error:
            return RowError(RowErrorType.INVALID_MESSAGES, str(error))
        return Chat(self.normalizer.messages(messages) if self._is_frame else messages)


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
