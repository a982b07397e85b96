"""What is wrong with a structure, said before the run."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from batchgen.errors import RowErrorType
from batchgen.sampling import SamplingParams, Structure
from batchgen.structured.grammars import Grammars
from tests.structured.walks import grammars_of
from tests.support import tiny_tokenizers

INVALID = RowErrorType.INVALID_SAMPLING_PARAMS
EMPTY = RowErrorType.UNSATISFIABLE_CONSTRAINT
GRAMMARS = grammars_of(tiny_tokenizers.make())


def _nested(inner: Any) -> Structure:
    schema = {
        "type": "object",
        "properties": {"a/b": {"anyOf": [{"$ref": "#/$defs/ok"}, {"items": inner}]}},
        "$defs": {"ok": {"type": "string"}},
    }
    structure = Structure.of({"json": schema})
    assert structure is not None
    return structure


@pytest.mark.parametrize(
    ("structure", "kind", "says"),
    [
        (Structure(regex="yes|(no"), INVALID, ["structured.regex='yes|(no'", "unclosed group",
                                               "character 5"]),
        (Structure(regex="a{3,2}"), INVALID, ["count range", "character 2"]),
        (Structure(regex="a\n(b"), INVALID, ["unclosed group", "character 3"]),
        (Structure(regex="(?=a)b"), INVALID, ["look-around", "character 1"]),
        (Structure(regex=r"\bfoo\b"), INVALID, ["whole output has to match"]),
        (Structure(regex="\ud800"), INVALID, ["half a character"]),
        (Structure(regex=r"[^\s\S]"), EMPTY, ["matches no text"]),
        (_nested({"type": "text"}), INVALID, ["/properties/a~1b/anyOf/1/items", "text"]),
        (_nested({"uniqueItems": True}), INVALID, ["/properties/a~1b/anyOf/1/items",
                                                   "uniqueItems"]),
        (_nested({"type": "string", "pattern": "(a"}), INVALID, ["anyOf/1/items", "unclosed"]),
        (Structure(json='{"$ref": "#/$defs/x"}'), INVALID, ["$defs/x", "its top"]),
        (Structure(json='{"type": "integer", "minimum": 5, "maximum": 3}'), EMPTY,
         ["minimum (5) is greater"]),
        (Structure(json="false"), EMPTY, ["its top"]),
        (Structure(json='{"enum": []}'), EMPTY, ["structured.json"]),
        (Structure(choice=("a<|im_end|>",)), INVALID, ["'<|im_end|>'", "frames"]),
        (Structure(regex=r"a<\|im_end\|>"), INVALID, ["'<|im_end|>'"]),
        (Structure(choice=("\ud800",)), INVALID, ["structured.choice"]),
    ],
)  # fmt: skip
def test_a_structure_that_makes_no_sense_is_refused_with_key_and_position(
    structure: Structure, kind: RowErrorType, says: list[str]
) -> None:
    problem = GRAMMARS.problem(SamplingParams(structured=structure))
    assert problem is not None
    assert problem.type is kind
    assert all(text in problem.message for text in says), problem.message


@pytest.mark.parametrize("schema", ["true", "{}", '{"type": "string"}', '{"const": 1}'])
def test_a_schema_that_makes_sense_is_taken(schema: str) -> None:
    assert GRAMMARS.problem(SamplingParams(structured=Structure(json=schema))) is None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"choices": ["a"]}, "structured.choices is none of structured.choice"),
        ({"choice": "a"}, "list of text"),
        ({"choice": ["a", 1]}, "list of text"),
        ({"choice": []}, "empty list"),
        ({"choice": ["a", ""]}, "empty text"),
        ({"choice": ["a", "b", "a"]}, "'a' twice"),
        ({"choice": ["a"], "regex": "a"}, "structured.choice and structured.regex are both"),
        ({"regex": 5}, "structured.regex must be text"),
        ({"json": "{'a'"}, "line 1 column 2"),
        ({"json": "[1]"}, "must be a schema"),
        ({"json": 5}, "must be a schema"),
    ],
)
def test_values_that_are_no_structure_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"structured\.") as refused:
        Structure.of(values)
    assert says in str(refused.value)


def test_a_rows_structure_replaces_the_jobs_and_an_empty_one_frees_the_row() -> None:
    job = SamplingParams(structured=Structure(regex="a+"))
    assert job.override({"structured": None}).structured == Structure(regex="a+")
    row = job.override_json('{"structured": {"choice": ["x", "y"], "regex": null}}')
    assert row.structured == Structure(choice=("x", "y"))
    assert job.override({"structured": {}}).structured is None
    schema = job.override({"structured": {"json": {"type": "object", "a": 1}}}).structured
    assert schema == Structure(json='{"type": "object", "a": 1}')
    with pytest.raises(ValueError, match="must be an object"):
        job.override({"structured": ["x"]})
    with pytest.raises(ValueError, match="ignore_eos"):
        job.override({"ignore_eos": True})


def test_a_text_that_the_model_cannot_spell_is_found_before_the_run() -> None:
    # No token for "z", and none for single bytes.
    inner = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[]))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    problem = grammars_of(tokenizer).problem(
        SamplingParams(structured=Structure(choice=("ab", "abz")))
    )
    assert problem is not None
    assert problem.type is EMPTY
    assert "'abz'" in problem.message


def test_a_model_without_a_tokenizer_or_with_an_unknown_one_is_refused() -> None:
    class Slow:
        eos_token_id = 0

        def __len__(self) -> int:
            return 3

    words = Tokenizer(models.WordPiece(vocab={"a": 0, "##b": 1, "</s>": 2, "[UNK]": 3}))
    words.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    for given, says in (
        (None, "model.tokenizer"),
        (Slow(), "tokenizer.json"),
        (tokenizer, "tokenizer"),
    ):
        grammars = Grammars(given, 4, lambda: {2})
        for params in (
            SamplingParams(structured=Structure(regex="a")),
            SamplingParams(score_choices=("a", "b")),
        ):
            problem = grammars.problem(params)
            assert problem is not None
            assert problem.type is INVALID
            assert says in problem.message
