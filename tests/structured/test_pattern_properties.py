"""Properties that are named and matched by a pattern too: outputs satisfy both.

The grammar library joins a pattern's schema to those of the names it matches, and refuses
patterns that may match one name. These tests hold it to that.
"""

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
SHORT = {"type": "string", "maxLength": 2}
CLOSED = {"type": "object", "additionalProperties": False}


def _outputs(schema: Any, count: int = 12) -> list[Any]:
    structure = Structure(json=json.dumps(schema))
    problem = GRAMMARS.problem(SamplingParams(structured=structure))
    assert problem is None, problem
    rng, found = random.Random(1), []
    while len(found) < count:
        tokens = random_output(GRAMMARS, structure, {TOKENIZER.eos_token_id}, rng, 120)
        if tokens is not None:
            found.append(json.loads(TOKENIZER.decode(tokens)))
    return found


@pytest.mark.parametrize(
    "schema",
    [
        {**CLOSED, "properties": {"ab": {"type": "integer"}}, "required": ["ab"],
         "patternProperties": {"b$": {"minimum": 5, "maximum": 7}}},
        {**CLOSED, "properties": {"a": SHORT}, "required": ["a"],
         "patternProperties": {"^a": {"enum": ["x", "yy", 3]}}},
        {**CLOSED, "required": ["a1"], "patternProperties": {"^a[0-9]?$": {"enum": [1, 2]}}},
        {"type": "object", "required": ["a1"], "maxProperties": 1,
         "patternProperties": {"^a1$": {"enum": [1, 2]}}},
        {**CLOSED, "required": ["n"], "properties": {"n": {
            **CLOSED, "properties": {"k": {"type": "integer"}}, "required": ["k"],
            "patternProperties": {"k": {"minimum": -1, "maximum": 1}}}}},
        {"type": "array", "minItems": 1, "maxItems": 2, "items": {
            **CLOSED, "properties": {"q": True}, "required": ["q"],
            "patternProperties": {"^q": {"type": "boolean"}}}},
        {**CLOSED, "properties": {"x": {"type": "integer"}}, "required": ["x"],
         "allOf": [{"patternProperties": {"^x": {"minimum": 3, "maximum": 5}}}]},
        {"type": "object", "$ref": "#/$defs/p", "maxProperties": 1, "required": ["x"],
         "properties": {"x": {"type": "integer"}},
         "$defs": {"p": {"patternProperties": {"^x": {"minimum": 3, "maximum": 5}}}}},
        {"type": "object", "maxProperties": 1,
         "allOf": [{"required": ["x"]}, {"patternProperties": {"^x": {"enum": [1, 2]}}}]},
    ],
)  # fmt: skip
def test_outputs_satisfy_the_name_s_schema_and_the_pattern_s(schema: Any) -> None:
    validator = Draft202012Validator(schema)
    found = _outputs(schema)
    assert all(validator.is_valid(value) for value in found), found
    assert len({json.dumps(value) for value in found}) > 1


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "object", "patternProperties": {"(a": SHORT}}, ["its top", "(a"]),
        ({"type": "object", "patternProperties": {"^a": SHORT, "b$": {"type": "integer"}}},
         ["structured.json at its top", "not disjoint"]),
    ],
)  # fmt: skip
def test_what_cannot_be_brought_together_is_refused(schema: Any, says: list[str]) -> None:
    problem = GRAMMARS.problem(SamplingParams(structured=Structure(json=json.dumps(schema))))
    assert problem is not None
    assert problem.type is RowErrorType.INVALID_SAMPLING_PARAMS
    assert all(text in problem.message for text in says), problem.message
