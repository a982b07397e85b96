"""JSON schemas in the words that the grammar library keeps to."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

MANY_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
ONE_SCHEMA = (
    "items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else",
    "propertyNames",
)  # fmt: skip
_COUNTED = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_JOINS = ("allOf", "anyOf", "oneOf", "$ref")
# The library holds numbers as 64-bit floats, and integers' bounds as 64-bit integers made of them.
_LAST_EXACT, _FIRST_BEYOND = 2**53, 2**63


class SchemaError(ValueError):
    """A schema that outputs cannot be held to; the message has the position."""


@dataclass(slots=True)
class Prepared:
    """A schema that the library keeps to.

    Attributes:
        schema: it accepts what the given one accepts, unknown formats left out.
        unknown_formats: these, which are annotations.
    """

    schema: Any = None
    unknown_formats: set[str] = field(default_factory=set)
    _root: Any = None
    _inlined: list[str] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _patterns: dict[str, str] = field(default_factory=dict)
    _joins: bool = False

    def rebuild(self, schema: Any, pointer: str) -> Any:
        """Rebuild a schema at a JSON pointer with all schemas in it."""
        if not isinstance(schema, dict):
            return schema
        _check_numbers(schema, pointer)
        schema = dict(schema)
        self._joins = self._joins or any(name in schema for name in _JOINS)
        written_format = schema.get("format")
        if isinstance(written_format, str) and not _is_known_format(written_format):
            self.unknown_formats.add(written_format)
            del schema["format"]
        for steps, part in list(schemas_in(schema)):
            make = self._branch if steps[0] == "oneOf" else self.rebuild
            _put(schema, steps, make(part, pointer + pointer_to(steps)))
        return self._without_spent_patterns(schema, pointer)

    def _branch(self, schema: Any, pointer: str) -> Any:
        """Rebuild a branch of a oneOf with what it refers to written out.

        The library looks whether branches exclude one another, but not behind references.
        """
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or reference in self._inlined:
            return self.rebuild(schema, pointer)
        target = _found(self._root, reference)
        if not isinstance(target, dict):
            return self.rebuild(schema, pointer)
        self._inlined.append(reference)
        beside = {name: part for name, part in schema.items() if name != "$ref"}
        rebuilt = self.rebuild(target | beside, pointer)
        self._inlined.pop()
        return rebuilt

    def check_patterns(self) -> None:
        """Refuse patterns of which schemas that are joined may leave nothing.

        Raises:
            SchemaError: one of them.
        """
        if not self._joins:
            return
        for pattern, pointer in self._patterns.items():
            if _is_spent(pattern, self._names):
                raise SchemaError(
                    f"structured.json at {pointer or 'its top'}: patternProperties {pattern!r} "
                    "matches only names that are properties; write its schema into theirs"
                )

    def _without_spent_patterns(self, schema: dict[str, Any], pointer: str) -> dict[str, Any]:
        """Move patterns that match only named properties into these.

        The library joins the schemas of a name and of the patterns that match it, but waits
        for ever for one more name where a pattern has none left.
        """
        properties = schema.get("properties", {})
        required, patterns = schema.get("required", []), schema.get("patternProperties", {})
        if not (isinstance(properties, dict) and isinstance(patterns, dict)):
            return schema
        names = [*properties, *required] if isinstance(required, list) else list(properties)
        names = list(dict.fromkeys(name for name in names if isinstance(name, str)))
        self._names.update(names)
        spent = [pattern for pattern in patterns if _is_spent(pattern, names)]
        self._patterns |= {pattern: pointer for pattern in patterns if pattern not in spent}
        if not spent:
            return schema
        properties = dict(properties)
        for pattern in spent:
            for name in names:
                if _matches(pattern, name):
                    properties[name] = _both(properties.get(name, True), patterns[pattern])
        left = {pattern: part for pattern, part in patterns.items() if pattern not in spent}
        return schema | {"properties": properties, "patternProperties": left}


def prepare(schema: Any) -> Prepared:
    """Bring a schema into the library's words.

    Raises:
        SchemaError: outputs cannot be held to it.
    """
    prepared = Prepared(_root=schema)
    prepared.schema = prepared.rebuild(schema, "")
    prepared.check_patterns()
    return prepared


def json_grammar(schema: Any) -> str:
    """Write a prepared schema, or one of those in it, as a grammar, which may be wrong still.

    Raises:
        SchemaError: the library does not read it, as where it is nested too deeply.
    """
    if schema is True:
        schema = {}
    elif schema is False:
        schema = {"anyOf": []}
    try:
        # As Python's json.dumps writes it: models have seen this form most, and free white space
        # lets a small model run on in blanks for ever. A schema's own "x-guidance" wins.
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema),
            defaults={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            },
        )
    except ValueError as error:
        raise SchemaError(f"structured.json cannot be used: {error}") from error


def schemas_in(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Walk over the schemas directly in one, with the steps that lead to them."""
    for name in MANY_SCHEMAS:
        parts = schema.get(name)
        for key, part in parts.items() if isinstance(parts, dict) else ():
            yield (name, key), part
    for name in LISTS_OF_SCHEMAS:
        parts = schema.get(name)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            yield (name, str(index)), part
    for name in ONE_SCHEMA:
        if name in schema:
            yield (name,), schema[name]


def pointer_to(steps: tuple[str, ...]) -> str:
    """Write steps as the end of a JSON pointer."""
    return "".join(f"/{step.replace('~', '~0').replace('/', '~1')}" for step in steps)


def _found(root: Any, reference: str) -> Any:
    """Return what a reference within a schema leads to; None if it leads nowhere."""
    if not reference.startswith("#/"):
        return None
    found = root
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _put(schema: dict[str, Any], steps: tuple[str, ...], part: Any) -> None:
    """Put a schema where the steps lead, into copies of what holds it."""
    if len(steps) == 1:
        schema[steps[0]] = part
        return
    name, key = steps
    held = schema[name]
    if isinstance(held, list):
        schema[name] = [part if str(at) == key else each for at, each in enumerate(held)]
    else:
        schema[name] = held | {key: part}


def _check_numbers(schema: dict[str, Any], pointer: str) -> None:
    is_integer = schema.get("type") == "integer"
    found = [(name, schema.get(name), is_integer) for name in _COUNTED]
    found += [(name, each, False) for name in ("const", "enum") for each in _leaves(schema, name)]
    for name, number, is_bound in found:
        if isinstance(number, int) and not _is_exact(number, is_bound=is_bound):
            near = int(float(max(min(number, _FIRST_BEYOND - 1024), 1024 - _FIRST_BEYOND)))
            raise SchemaError(
                f"structured.json at {pointer}/{name}: {number} is beyond 2^53 and cannot be kept "
                f"exactly; the nearest number that can is {near}"
            )


def _leaves(schema: dict[str, Any], name: str) -> Iterator[Any]:
    """Walk over the values in a constant or a list of them."""
    waiting = [schema.get(name)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        else:
            yield value


def _is_exact(number: int, *, is_bound: bool) -> bool:
    if abs(number) <= _LAST_EXACT or (is_bound and number == _FIRST_BEYOND - 1):
        return True
    return -_FIRST_BEYOND < number < _FIRST_BEYOND and int(float(number)) == number


def _both(one: Any, other: Any) -> Any:
    """Make a schema that accepts what two accept."""
    if other in (True, {}):
        return one
    return other if one in (True, {}) else {"allOf": [one, other]}


@lru_cache(256)
def _is_known_format(name: str) -> bool:
    return not LLMatcher.validate_grammar(json_grammar({"type": "string", "format": name}))


@lru_cache(1)
def _byte_tokens() -> LLTokenizer:
    return LLTokenizer("byte")


def _after(schema: Any, text: str) -> LLMatcher | None:
    """Return the state of a schema's grammar after a text, or None if it does not accept it."""
    matcher = LLMatcher(_byte_tokens(), json_grammar(schema), log_level=0)
    tokens = list(text.encode())
    if matcher.is_error() or matcher.try_consume_tokens(tokens) < len(tokens):
        return None
    return matcher


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern is found in a name, as the library reads patterns."""
    state = _after({"type": "string", "pattern": pattern}, json.dumps(name, ensure_ascii=False))
    return state is not None and state.is_accepting()


def _is_spent(pattern: str, names: list[str] | set[str]) -> bool:
    """Whether a pattern matches some of these names and no other text at all."""
    matched = [name for name in names if _matches(pattern, name)]
    if not matched:
        return False
    schema = {
        "type": "object",
        "properties": {name: {"const": 0} for name in matched},
        "required": matched,
        "patternProperties": {pattern: {"const": 0}},
        "additionalProperties": False,
    }
    begun = json.dumps(dict.fromkeys(matched, 0), ensure_ascii=False).removesuffix("}") + ", "
    state = _after(schema, begun)
    if state is None:
        return False
    state.compute_bitmask()
    return state.is_error()
