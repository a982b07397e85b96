"""Chat messages and tools as they come in a row: lists of structs, or JSON text."""

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]
Content = str | list[dict[str, Any]]
"""A text, or parts such as ``{"type": "text", "text": ...}``."""


def parse_messages(value: Any) -> list[Message]:
    """Check one row's messages and bring them to the form chat templates expect.

    A Parquet column gives every struct the keys of all of them, so null keys are dropped
    at every depth. In JSON text a null is content, but for the keys of a message itself, which
    transformers leaves out too. Tool-call arguments given as JSON text are decoded. Content
    may be missing only where the message carries something else, such as ``tool_calls``.

    Args:
        value: a list of ``{"role": ..., "content": ...}``, or its JSON.

    Returns:
        The messages; content is a text or a list of ``{"type": "text", "text": ...}``.

    Raises:
        ValueError: not such a list; the message says where.
    """
    parsed = _parsed(value, "messages")
    if not isinstance(parsed, list) or not parsed:
        raise ValueError("the messages must be a list of at least one message")
    return [_check(message, f"message {number}") for number, message in enumerate(parsed)]


def parse_tools(value: Any) -> list[Tool] | None:
    """Check one row's tools: a list of objects, or its JSON; each may be JSON text too.

    Returns:
        None where the row has no tools.

    Raises:
        ValueError: not such a list.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    parsed = _parsed(value, "tools")
    if not isinstance(parsed, list | None):
        raise ValueError(f"the tools must be a list of objects, not {parsed!r}")
    tools = [_parsed(tool, "tools") if isinstance(tool, str) else tool for tool in parsed or ()]
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ValueError(f"tool {number} must be an object, not {tool!r}")
    return tools or None


def texts_of(content: Content) -> list[str]:
    """Return the texts of checked content, one for each part."""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def text_of(content: Content) -> str:
    """Return the whole text of checked content."""
    return "".join(texts_of(content))


def with_texts(content: Content, texts: Sequence[str]) -> Content:
    """Return checked content with other texts, as :func:`texts_of` gives them."""
    if isinstance(content, str):
        return texts[0]
    return [{**part, "text": text} for part, text in zip(content, texts, strict=True)]


def _parsed(value: Any, what: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else _prune(value)
    except ValueError as error:
        raise ValueError(f"the {what} are not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"the {what} are nested too deeply") from error


def _prune(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _prune(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_prune(item) for item in value]
    return value


def _check(given: Any, where: str) -> Message:
    if isinstance(given, list) and given and all(isinstance(each, tuple) for each in given):
        # A map, as Spark and DuckDB write messages; JSON has no tuples.
        given = dict(given)
    if not isinstance(given, dict):
        raise ValueError(f"{where} must have a role and content, not be {given!r}")
    message: Message = {key: item for key, item in given.items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}: role must be a text such as 'user', not {role!r}")
    if len(message) == 1:
        raise ValueError(f"{where} has no content")
    if "content" in message:
        message["content"] = _content(message["content"], where)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        decoded = [_call(call, f"{where}: tool call {at}") for at, call in enumerate(calls)]
        message["tool_calls"] = decoded
    return message


def _content(content: Any, where: str) -> Content:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return [_part(part, where) for part in content]
    raise ValueError(f"{where}: content must be a text or a list of text parts, not {content!r}")


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    is_text = isinstance(part, dict) and (part.get("type") or "text") == "text"
    if is_text and isinstance(part.get("text"), str):
        return {**{key: item for key, item in part.items() if item is not None}, "type": "text"}
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"{where}: a content part of type {kind} is not text")


def _call(call: Any, where: str) -> Any:
    """Decode the arguments of a tool call, which OpenAI's API gives as JSON text."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], where)}
    arguments = call.get("arguments")
    if arguments is None and "name" in call:
        return {**call, "arguments": {}}
    if not isinstance(arguments, str):
        return call
    try:
        decoded = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: the arguments are not JSON: {error}") from error
    if not isinstance(decoded, dict | None):
        raise ValueError(f"{where}: the arguments must be an object, not {decoded!r}")
    return {**call, "arguments": decoded or {}}
