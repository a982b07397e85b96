"""What an output has to be: a choice, a regular expression or a JSON schema."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from batchgen.text import refuse_lone_surrogates


@dataclass(frozen=True, slots=True)
class Structure:
    """What an output has to be; exactly one attribute is given.

    Attributes:
        choice: one of these texts.
        regex: a text that the whole of this regular expression matches.
        json: a JSON text that this JSON schema accepts; the schema is JSON in one line.
    """

    choice: tuple[str, ...] | None = None
    regex: str | None = None
    json: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self | None:
        """Make one of named values; None if all of them are null.

        Args:
            values: ``choice`` a list of text, ``regex`` a text, ``json`` a schema or its text.

        Raises:
            ValueError: an unknown name, a value of the wrong type, or more than one value.
        """
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise ValueError(
                f"structured.{unknown[0]} is none of structured.{', structured.'.join(names)}"
            )
        given = {name: value for name, value in values.items() if value is not None}
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(f'structured.{name}' for name in given)} are both named, but an "
                "output has one structure"
            )
        if not given:
            return None
        return cls(**{name: _structure(name, value) for name, value in given.items()})


def _structure(name: str, value: Any) -> Any:
    refuse_lone_surrogates(value, f"structured.{name}")
    if name == "choice":
        return _choice(value)
    if name == "json":
        return _schema(value)
    if not isinstance(value, str):
        raise ValueError(f"structured.{name} must be text, not {value!r}")
    return value


def _schema(value: Any) -> str:
    """Return a schema as one line of JSON; its properties keep their order."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured.json cannot be read as JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise ValueError(f"structured.json must be a schema, which is an object, not {value!r}")
    refuse_lone_surrogates(value, "structured.json")
    return json.dumps(value)


def _choice(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"structured.choice must be a list of text, not {value!r}")
    if not value:
        raise ValueError("structured.choice is an empty list, which allows no output at all")
    if not all(value):
        raise ValueError("structured.choice holds an empty text")
    repeated = next((text for text, count in Counter(value).items() if count > 1), None)
    if repeated is not None:
        raise ValueError(f"structured.choice names {repeated!r} twice")
    return tuple(value)
