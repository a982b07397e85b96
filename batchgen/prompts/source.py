"""Which of a job's keys and columns a prompt comes from, and whether they fit together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow as pa

from batchgen.errors import UsageError, listed
from batchgen.prompts.chat_template import TemplateVariables, template_reads
from batchgen.prompts.columns import close_matches, is_list_of, is_text
from batchgen.prompts.normalize import NormalizeSpec
from batchgen.prompts.tokenizer import Tokenizer, has_chat_template

DEFAULT_TOKEN_IDS_COLUMN = "prompt_token_ids"
DEFAULT_MESSAGES_COLUMN = "messages"
DEFAULT_COLUMN = "prompt"
DEFAULT_TOOLS_COLUMN = "tools"


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """The ``prompt`` keys, with every text already read from its file.

    Attributes:
        column, messages_column, token_ids_column, template: the explicit sources; at
            most one may be given, and with none the input's columns decide.
        format: ``auto``, ``chat`` or ``plain``; how template, system and shots join.
        system: goes before everything; an empty text counts as none.
        shots: rows with the template's columns and ``answer_column``, in order.
        shot_places: where each of them stands, for messages.
        separator, answer_prefix: the joints of the plain format.
        normalize: how the frame of a prompt is spelt.
        fields: columns that a template lists.
        field_order: ``given``, ``fixed`` or ``rows``; in which order it lists them.
        chat_template: in the place of the model's own.
        variables: what the chat template sees beside messages and tools.
        tools_column: names the tools of a row with messages; with none ``tools``.
        continue_final_message: whether a last message of the assistant is continued.
    """

    column: str | None = None
    messages_column: str | None = None
    token_ids_column: str | None = None
    template: str | None = None
    format: str = "auto"
    system: str | None = None
    shots: Sequence[Mapping[str, Any]] = ()
    shot_places: Sequence[str] = ()
    answer_column: str = "answer"
    separator: str = "\n\n"
    answer_prefix: str = " "
    normalize: NormalizeSpec = field(default_factory=NormalizeSpec)
    fields: Sequence[str] = ()
    field_order: str = "given"
    chat_template: str | None = None
    variables: TemplateVariables = field(default_factory=TemplateVariables)
    tools_column: str | None = None
    continue_final_message: bool = False


class Source(StrEnum):
    """What a row's prompt is made from."""

    TOKEN_IDS = "token ids"
    MESSAGES = "messages"
    TEXT = "text"
    TEMPLATE = "template"


def settle_source(spec: PromptSpec, names: Sequence[str]) -> tuple[Source, str | None]:
    """Give the source that keys and columns settle, and its column where it is one.

    Raises:
        UsageError: no source or two, or a column that the input lacks.
    """
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
            f"Columns: {listed(names)}"
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
        f"Columns: {listed(names)}"
    )


def check_keys_fit(spec: PromptSpec, source: Source) -> None:
    """Refuse keys that the source leaves no place for.

    Raises:
        UsageError: the keys by name, and what to do.
    """
    if source is Source.TEMPLATE:
        return
    keys = {
        "prompt.system": spec.system,
        "prompt.shots_file": spec.shots,
        "prompt.fields": spec.fields,
    }
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


def check_chat_keys(spec: PromptSpec, source: Source, settled_format: str | None) -> None:
    """Refuse keys about chats where a prompt is none.

    Args:
        settled_format: ``chat`` or ``plain`` for a template.

    Raises:
        UsageError: the keys by name.
    """
    of_messages: dict[str, Any] = {
        "prompt.tools_column": spec.tools_column,
        "prompt.continue_final_message": spec.continue_final_message,
    }
    of_chats = {
        "prompt.chat_template_file": spec.chat_template,
        "prompt.chat_template_kwargs": spec.variables.named,
    }
    is_chat = settled_format == "chat"
    keys = {} if source is Source.MESSAGES else of_messages | ({} if is_chat else of_chats)
    given = [key for key, value in keys.items() if value]
    if given:
        raise UsageError(
            f"{' and '.join(given)} cannot be used here: the prompt comes from the input's "
            f"{source.value}, without {'messages of its own' if is_chat else 'a chat template'}"
        )


def settle_tools(
    spec: PromptSpec, source: Source, schema: pa.Schema, tokenizer: Tokenizer | None
) -> tuple[str | None, str | None]:
    """Give the column of the rows' tools, or why one that is there by default is not used.

    Raises:
        UsageError: a column that a key names cannot be used.
    """
    name = spec.tools_column or DEFAULT_TOOLS_COLUMN
    if source is not Source.MESSAGES or (spec.tools_column is None and name not in schema.names):
        return None, None
    problem = None
    if name not in schema.names:
        problem = f"is no column of the input{close_matches(name, schema.names)}"
    elif not _can_be_tools(schema.field(name).type):
        problem = f"has type {schema.field(name).type}, not JSON text or a list of structs"
    elif not template_reads(tokenizer, "tools"):
        problem = "has no place in the chat template, which prints no tools"
    if problem is None:
        return name, None
    if spec.tools_column is not None:
        raise UsageError(f"prompt.tools_column={name} {problem}")
    return None, f"the column '{name}' is not used: it {problem}"


def _can_be_tools(kind: pa.DataType) -> bool:
    holds_tools = is_list_of(kind, lambda item: pa.types.is_struct(item) or is_text(item))
    return is_text(kind) or holds_tools or pa.types.is_null(kind)


def check_normalize(spec: NormalizeSpec, source: Source, columns: Sequence[str]) -> None:
    """Refuse rules that can change nothing, and columns that no prompt is made from.

    Args:
        columns: the input columns that prompts are made from.

    Raises:
        UsageError: the key, and what to do.
    """
    if source is Source.TOKEN_IDS and (spec.is_on or spec.columns):
        raise UsageError("prompt.normalize changes texts, but the prompts are token ids")
    for name in spec.columns:
        if name not in columns:
            raise UsageError(
                f"prompt.normalize.columns={name} is no column that the prompts are made "
                f"from{close_matches(name, columns)}. These are: {', '.join(columns) or 'none'}"
            )
    if spec.is_on and source is not Source.TEMPLATE and not spec.columns:
        raise UsageError(
            f"prompt.normalize touches no column's content by itself, and these prompts are "
            f"content alone; name the column to change its frame too: "
            f"prompt.normalize.columns=[{columns[0]}]"
        )


def check_type(source: Source, column: str, kind: pa.DataType) -> None:
    """Refuse a column whose type cannot hold the source.

    Raises:
        UsageError: the column, and what it must be.
    """
    fits = {
        Source.TEXT: is_text(kind),
        Source.MESSAGES: is_text(kind) or is_list_of(kind, _is_message),
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


def _is_message(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) or (pa.types.is_map(kind) and is_text(kind.key_type)))


def check_tokenizer(source: Source, spec: PromptSpec, tokenizer: Tokenizer | None) -> None:
    """Refuse a tokenizer that cannot make the source's prompts.

    Raises:
        UsageError: it is missing, or lacks a chat template.
    """
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


def settle_format(asked: str, tokenizer: Tokenizer | None) -> str:
    """Give ``chat`` or ``plain`` for ``prompt.format``."""
    if asked == "auto":
        return "chat" if has_chat_template(tokenizer) else "plain"
    return asked
