"""Chat messages as they come in a row: a list of structs, or a JSON string."""

import json
from typing import Any

Message = dict[str, Any]


def parse_messages(value: Any) -> list[Message]:
    """Check one row's messages and bring them to the form chat templates expect.

    A Parquet column gives every struct the keys of all of them, so null keys are dropped
    at every depth. Content given as a list of text parts is joined. Content may be
    missing only where the message carries something else, such as ``tool_calls``.

    Args:
        value: a list of ``{"role": ..., "content": ...}``, or its JSON.

    Raises:
        ValueError: not such a list; the message says where.
    """
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        parsed = _prune(parsed)
    except json.JSONDecodeError as error:
        raise ValueError(f"the messages are not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("the messages are nested too deeply") from error
    if not isinstance(parsed, list) or not parsed:
        raise ValueError("the messages must be a list of at least one message")
    return [_check(message, number) for number, message in enumerate(parsed)]


def _prune(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _prune(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_prune(item) for item in value]
    return value


def _check(message: Any, number: int) -> Message:
    where = f"message {number}"
    if not isinstance(message, dict):
        raise ValueError(f"{where} must have a role and content, not be {message!r}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}: role must be a text such as 'user', not {role!r}")
    if "content" in message:
        return {**message, "content": _text(message["content"], where)}
    if len(message) == 1:
        raise ValueError(f"{where} has no content")
    return message


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part, where) for part in content)
    raise ValueError(f"{where}: content must be a text or a list of text parts, not {content!r}")


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"{where}: a content part of type {kind} is not text")
