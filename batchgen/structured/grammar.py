"""From a structure to a grammar of the library, and what is wrong with it in words."""

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from batchgen.sampling import Structure

_MANY_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
_ONE_SCHEMA = ("items", "additionalProperties", "additionalItems", "contains", "not")
_UNSATISFIABLE = "Unsatisfiable schema: "


def grammar_of(structure: Structure) -> str:
    """Write a structure as a grammar, which may be wrong still."""
    if structure.choice is not None:
        # One lexeme: as two of them the longer of "a" and "ab" would win without being asked.
        return LLMatcher.grammar_from_lark(
            "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, structure.choice))
        )
    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(structure.regex)
    assert structure.json is not None
    return _json_grammar(json.loads(structure.json))


def spelling_of(structure: Structure) -> str:
    """Give the texts that a structure spells out, as far as that can be seen."""
    if structure.choice is not None:
        return "\0".join(structure.choice)
    return (structure.regex or structure.json or "").replace("\\", "")


def is_unsatisfiable(error: str) -> bool:
    """Whether the library's complaint is that nothing matches."""
    return error.startswith(_UNSATISFIABLE)


def explain(structure: Structure, error: str) -> str:
    """Say in words for the user what the library complains of, with key and position."""
    if structure.regex is not None:
        return _explain_regex(structure.regex, error)
    if structure.json is not None:
        pointer = _locate(json.loads(structure.json), error)
        return f"structured.json at {pointer or 'its top'}: {error.removeprefix(_UNSATISFIABLE)}"
    return f"structured.choice cannot be used: {error.splitlines()[0]}"


def _json_grammar(schema: Any) -> str:
    if schema is True:
        schema = {}
    elif schema is False:
        schema = {"anyOf": []}
    # As Python's json.dumps writes it: models have seen this form most, and free white space
    # lets a small model run on in blanks for ever. A schema's own "x-guidance" wins.
    return LLMatcher.grammar_from_json_schema(
        schema,
        defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    )


def _explain_regex(pattern: str, error: str) -> str:
    """Take reason and position out of a report that quotes the pattern above a caret."""
    reason = re.search(r"^error: (.+)$", error, re.MULTILINE)
    if reason is None:
        text = error.partition("(in regex): ")[2] or error
        return (
            f"structured.regex={pattern!r} cannot be used: {text.splitlines()[0]}; the whole "
            "output has to match, so that anchors and word borders are not needed"
        )
    caret = re.search(r"^ {4}( *)\^+$", error, re.MULTILINE)
    where = ""
    if caret:
        # The report spells each line break as two characters.
        before = len(caret[1])
        where = f" at character {before + 1 - pattern[:before].count(chr(10))}"
    return f"structured.regex={pattern!r} is no regular expression: {reason[1]}{where}"


def _locate(schema: Any, error: str) -> str:
    """Give the JSON pointer of the innermost schema that the library complains of."""
    inner: dict[str, Any] = schema if isinstance(schema, dict) else {}
    shared: dict[str, Any] = {
        name: inner[name] for name in ("$defs", "definitions") if name in inner
    }
    pointer = ""
    while True:
        for step, part in _schemas_in(inner):
            if isinstance(part, dict) and _error(shared | part) == error:
                pointer, inner = f"{pointer}/{step}", part
                break
        else:
            return pointer


def _schemas_in(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _MANY_SCHEMAS:
        parts = schema.get(name)
        for key, part in parts.items() if isinstance(parts, dict) else ():
            yield f"{name}/{key.replace('~', '~0').replace('/', '~1')}", part
    for name in _LISTS_OF_SCHEMAS:
        parts = schema.get(name)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            yield f"{name}/{index}", part
    for name in _ONE_SCHEMA:
        yield name, schema.get(name)


def _error(schema: dict[str, Any]) -> str:
    return LLMatcher.validate_grammar(_json_grammar(schema))
