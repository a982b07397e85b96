"""From a structure to a grammar of the library, and what is wrong with it in words."""

import json
import re
from typing import Any

from llguidance import LLMatcher

from batchgen.sampling import Structure
from batchgen.structured.schema import json_grammar, pointer_to, prepare, schemas_in

_UNSATISFIABLE = "Unsatisfiable schema: "
_ONE_OF = "oneOf constraints are not supported"
_OVERLAP = (
    "one value may match several schemas of this oneOf; write anyOf instead, or let them differ in "
    "their type or in a required property that is another const in each"
)


def grammar_of(structure: Structure) -> str:
    """Write a structure as a grammar, which may be wrong still.

    Raises:
        SchemaError: outputs cannot be held to the schema.
    """
    if structure.choice is not None:
        # One lexeme: as two of them the longer of "a" and "ab" would win without being asked.
        return LLMatcher.grammar_from_lark(
            "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, structure.choice))
        )
    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(structure.regex)
    assert structure.json is not None
    return json_grammar(prepare(json.loads(structure.json)).schema)


def spelling_of(structure: Structure) -> str:
    """Return the texts that a structure spells out, as far as that can be seen."""
    if structure.choice is not None:
        return "\0".join(structure.choice)
    return (structure.regex or structure.json or "").replace("\\", "")


def notes_on(structure: Structure) -> list[str]:
    """Return what of a usable structure outputs are not held to."""
    if structure.json is None:
        return []
    formats = sorted(prepare(json.loads(structure.json)).unknown_formats)
    if not formats:
        return []
    return [
        f"structured.json: format {', '.join(formats)} is taken as an annotation: outputs are not "
        "held to it; a pattern would be kept"
    ]


def is_unsatisfiable(error: str) -> bool:
    """Whether the library's complaint is that nothing matches."""
    return error.startswith(_UNSATISFIABLE)


def explain(structure: Structure, error: str) -> str:
    """Say in words for the user what the library complains of, with key and position."""
    if structure.regex is not None:
        return _explain_regex(structure.regex, error)
    if structure.json is not None:
        pointer = _locate(prepare(json.loads(structure.json)).schema, error)
        reason = _OVERLAP if error.startswith(_ONE_OF) else error.removeprefix(_UNSATISFIABLE)
        return f"structured.json at {pointer or 'its top'}: {reason}"
    return f"structured.choice cannot be used: {error.splitlines()[0]}"


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
    """Return the JSON pointer of the innermost schema that the library complains of."""
    inner: dict[str, Any] = schema if isinstance(schema, dict) else {}
    shared: dict[str, Any] = {
        name: inner[name] for name in ("$defs", "definitions") if name in inner
    }
    pointer = ""
    while True:
        for steps, part in schemas_in(inner):
            if isinstance(part, dict) and _error(shared | part) == error:
                pointer, inner = pointer + pointer_to(steps), part
                break
        else:
            return pointer


def _error(schema: dict[str, Any]) -> str:
    return LLMatcher.validate_grammar(json_grammar(schema))
