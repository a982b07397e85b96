"""Bringing JSON's values to the types of the parameters, without guessing."""

from collections.abc import Mapping
from typing import Any

from batchgen.sampling.structure import Structure
from batchgen.text import refuse_lone_surrogates

_LISTS_OF_IDS = ("stop_token_ids",)
_OPTIONAL_COUNTS = ("logprobs", "prompt_logprobs")


def convert(name: str, value: Any, kind: type) -> Any:
    """Bring a JSON value to a parameter's type.

    Args:
        name: the parameter.
        value: what JSON holds; not null.
        kind: the type of the parameter's default.

    Raises:
        ValueError: it is of another type; the message says what it must be.
    """
    try:
        return _converted(name, value, kind)
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"{name} is too large or nested too deeply: {error}") from error


def _converted(name: str, value: Any, kind: type) -> Any:
    refuse_lone_surrogates(value, name)
    if name == "structured":
        if not isinstance(value, dict):
            raise ValueError(f'structured must be an object as in {{"choice": []}}, not {value!r}')
        return Structure.of(value)
    if name == "logit_bias":
        return bias(value)
    if kind is tuple:
        return _items(name, value)
    return _scalar(name, value, int if name in _OPTIONAL_COUNTS else kind)


def bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Return (token id, number) pairs by id of a mapping, whose keys may be text as in JSON.

    Raises:
        ValueError: it is no such mapping.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f'logit_bias must be an object as in {{"50": -100}}, not {value!r}')
    try:
        return tuple(sorted((int(token), _number(number)) for token, number in value.items()))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"logit_bias must map token ids to numbers, not {dict(value)!r}"
        ) from error


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    return float(value)


def _items(name: str, value: Any) -> tuple[Any, ...]:
    items = [value] if isinstance(value, str | int) else value
    item_type = int if name in _LISTS_OF_IDS else str
    if not isinstance(items, list | tuple) or any(
        not isinstance(item, item_type) or isinstance(item, bool) for item in items
    ):
        raise ValueError(f"{name} must be a list of {item_type.__name__}, not {value!r}")
    return tuple(items)


def _scalar(name: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{name} must be {kind.__name__}, not {value!r}")
    return value
