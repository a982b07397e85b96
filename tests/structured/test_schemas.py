"""JSON schemas that a grammar of the library alone would keep wrongly, or not at all."""

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from batchgen.errors import RowErrorType
from batchgen.sampling import SamplingParams, Structure
from tests.structured.walks import grammars_of, random_output
from tests.support import tiny_tokenizers

TOKENIZER = tiny_tokenizers.make()
GRAMMARS = grammars_of(TOKENIZER)
CLOSED = {"type": "object", "additionalProperties": False}
POINTS = {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99}
NOTE = {"enum": ["a", "b"]}
RATED = {**CLOSED, "properties": {"points": POINTS, "note": NOTE}, "required": ["points", "note"]}
BIG = 2**53


def _problem(schema: Any) -> str | None:
    structure = Structure(json=json.dumps(schema))
    problem = GRAMMARS.problem(SamplingParams(structured=structure))
    if problem is None:
        return None
    assert problem.type is RowErrorType.INVALID_SAMPLING_PARAMS
    return problem.message


def _outputs(schema: Any, count: int = 20) -> list[Any]:
    """Outputs of fair choices among the allowed tokens, none of which may lead nowhere."""
    assert _problem(schema) is None
    structure, rng = Structure(json=json.dumps(schema)), random.Random(0)
    walks = (
        random_output(GRAMMARS, structure, {TOKENIZER.eos_token_id}, rng, 120) for _ in range(count)
    )
    found = [json.loads(TOKENIZER.decode(tokens)) for tokens in walks if tokens is not None]
    validator = Draft202012Validator(schema)
    assert found
    assert all(validator.is_valid(value) for value in found), found
    return found


@pytest.mark.parametrize(
    "schema",
    [
        {**RATED, "patternProperties": {"^points$": {"type": "integer"}}},
        {**RATED, "patternProperties": {"^points$": {"minimum": 30}}},
        {**RATED, "patternProperties": {"^(points|note)$": True}},
        {**RATED, "patternProperties": {"^[p]oints$": {"minimum": 9}, "^n": {"type": "string"}}},
        {**RATED, "required": ["points", "note", "extra"],
         "patternProperties": {"^extra$": {"enum": [1, 2]}, "^po": {"maximum": 60}}},
        {**CLOSED, "properties": {"a": {"const": 1}, "b": {"const": 2}},
         "patternProperties": {"^a$": True}},
        {"type": "array", "maxItems": 2,
         "items": {**RATED, "patternProperties": {"^note$": {"const": "b"}}}},
    ],
)  # fmt: skip
def test_n19_a_pattern_that_matches_only_named_properties_holds_for_these(schema: Any) -> None:
    assert len({json.dumps(value) for value in _outputs(schema)}) > 1


def test_n19_such_a_pattern_in_a_schema_that_is_joined_is_refused_with_its_place() -> None:
    schema = {**RATED, "allOf": [{"patternProperties": {"^points$": {"minimum": 5}}}]}
    assert "/allOf/0: patternProperties '^points$' matches only names" in (_problem(schema) or "")


def test_n18_branches_that_exclude_one_another_are_taken_and_others_told_what_to_write() -> None:
    def branch(kind: str) -> dict[str, Any]:
        return {**CLOSED, "properties": {"kind": {"const": kind}, "n": {"enum": [1, 2]}},
                "required": ["kind", "n"]}  # fmt: skip

    union = {
        **CLOSED,
        "properties": {"pet": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}},
        "required": ["pet"],
        "$defs": {"cat": branch("cat"), "dog": branch("dog")},
    }
    assert {value["pet"]["kind"] for value in _outputs(union)} == {"cat", "dog"}
    assert None in _outputs({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]})
    overlap = {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}
    message = _problem(overlap) or ""
    assert "/properties/a: " in message
    assert "write anyOf instead" in message
    assert "coerce" not in message


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "integer", "minimum": BIG - 2, "maximum": BIG + 7}, "/maximum"),
        ({"properties": {"n": {"exclusiveMinimum": -BIG - 1}}}, "/properties/n/exclusiveMinimum"),
        ({"type": "integer", "maximum": 2**70}, "/maximum"),
        ({"const": BIG + 1}, "/const"),
        ({"enum": ["a", {"deep": [BIG + 1]}]}, "/enum"),
        ({"anyOf": [{"type": "null"}, {"multipleOf": BIG + 1}]}, "/anyOf/1/multipleOf"),
        ({"type": "number", "maximum": 2**63 - 1}, "/maximum"),
    ],
)
def test_t5_a_number_that_cannot_be_kept_exactly_is_refused_with_its_place(
    schema: Any, place: str
) -> None:
    message = _problem(schema) or ""
    assert message.startswith(f"structured.json at {place}: ")
    assert "beyond 2^53" in message


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (BIG - 9, BIG),
        (2**60, 2**60 + 2**9),
        (-(10**18) - 2**9, -(10**18)),
        (2**63 - 1025, 2**63 - 1),
        (1024 - 2**63, 3 * 1024 - 2**63),
    ],
)
def test_t5_bounds_that_can_be_kept_are_kept_exactly(low: int, high: int) -> None:
    if low == 2**63 - 1025:
        low = 2**63 - 1024
    found = _outputs({"type": "integer", "minimum": low, "maximum": high}, count=40)
    assert min(found) < max(found)
    for edge in (low, high):
        assert _outputs({"type": "integer", "minimum": edge, "maximum": edge}) == [edge] * 20


def test_t5_numbers_in_annotations_do_not_count() -> None:
    assert _outputs({"enum": [1, 2], "default": 2**80, "examples": [BIG + 1]})


def test_t5_unknown_formats_are_annotations_and_named_once() -> None:
    schema = {
        **CLOSED,
        "properties": {
            "a": {"type": "string", "format": "phone", "maxLength": 3},
            "format": {"type": "string", "format": "regex", "enum": ["x", "y"]},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["a", "format", "day"],
    }
    assert all(value["day"].count("-") == 2 for value in _outputs(schema))
    structure = Structure(json=json.dumps(schema))
    (note,) = GRAMMARS.notes(SamplingParams(structured=structure))
    assert "format phone, regex is taken as an annotation" in note
    assert GRAMMARS.notes(SamplingParams(structured=Structure(json='{"format": "uuid"}'))) == []
    # A value that looks like a schema is none.
    assert {"format": "phone"} in _outputs({"enum": [{"format": "phone"}, 1]})


def test_t5_a_schema_nested_beyond_all_measure_is_refused() -> None:
    text = '{"items": ' * 900 + "{}" + "}" * 900
    problem = GRAMMARS.problem(SamplingParams(structured=Structure(json=text)))
    assert problem is not None
    assert problem.type is RowErrorType.INVALID_SAMPLING_PARAMS


def test_t5_min_tokens_is_refused_with_choices_and_warned_about_with_other_structures() -> None:
    choice = SamplingParams(min_tokens=5, structured=Structure(choice=("a", "b")))
    assert "min_tokens=5 does not go with structured.choice" in (choice.problem() or "")
    regex = SamplingParams(min_tokens=5, structured=Structure(regex="a+"))
    assert regex.problem() is None
    assert "ends there all the same" in (regex.warning() or "")
