"""Constraints against brute force, Python's ``re`` and ``jsonschema``."""

import itertools
import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate

from batchgen.sampling import SamplingParams, Structure
from tests.structured.walks import after, allowed, grammars_of, outputs, random_output
from tests.support import tiny_tokenizers

KINDS = ("bytes", "metaspace", "nfc")
TOKENIZERS = {kind: tiny_tokenizers.make(kind) for kind in KINDS}
GRAMMARS = {kind: grammars_of(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "label": {"enum": ["good", "goodness", "bad"]},
        "score": {"type": "integer", "minimum": -3, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["name", "label", "score", "tags"],
    "additionalProperties": False,
}


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    """The text behind a letter: at the very beginning decoders strip spaces."""
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    return tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]


def texts(kind: str, structure: Structure, longest: int = 12) -> set[str]:
    tokenizer = TOKENIZERS[kind]
    ends = {tokenizer.eos_token_id}
    return {
        text_of(tokenizer, tokens) for tokens in outputs(GRAMMARS[kind], structure, ends, longest)
    }


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    choices=st.lists(st.text("ab \u00e9\"\\\n", min_size=1, max_size=3), min_size=1, max_size=5,
                     unique=True),
)  # fmt: skip
def test_every_choice_can_be_written_and_nothing_else(kind: str, choices: list[str]) -> None:
    assert texts(kind, Structure(choice=tuple(choices))) == set(choices)


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_choice_and_its_beginning_both_can_be_written(kind: str) -> None:
    choices = ("good", "goodness", "good story", "g")
    assert texts(kind, Structure(choice=choices)) == set(choices)


@pytest.mark.parametrize(
    "pattern", ["a|ab|abb", "a*b", "(a|b){2}", "[ab]a?", "b(ab)*", "(?i)a", "^ab$"]
)
def test_a_regex_allows_what_python_matches_whole(pattern: str) -> None:
    found = {text for text in texts("bytes", Structure(regex=pattern), 4) if set(text) <= {*"abAB"}}
    wanted = {
        text
        for length in range(5)
        for text in map("".join, itertools.product("abAB", repeat=length))
        if re.fullmatch(pattern, text)
    }
    assert {text for text in found if len(text) <= 4} == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_json_outputs_satisfy_their_schema_and_look_as_python_writes_them(kind: str) -> None:
    tokenizer, rng = TOKENIZERS[kind], random.Random(0)
    structure = Structure(json=json.dumps(SCHEMA))
    ends, done = {tokenizer.eos_token_id}, 0
    while done < 25:
        tokens = random_output(GRAMMARS[kind], structure, ends, rng)
        if tokens is None:
            continue
        text = text_of(tokenizer, tokens)
        value = json.loads(text)
        validate(value, SCHEMA)
        assert list(value) == list(SCHEMA["properties"])
        assert text.startswith('{"name": "')
        done += 1


@pytest.mark.parametrize(
    "structure",
    [
        Structure(choice=("good", "goodness", "story")),
        Structure(regex="abc+de|abfg"),
        Structure(json=json.dumps(SCHEMA)),
    ],
)
def test_tokens_are_forced_exactly_where_one_is_allowed(structure: Structure) -> None:
    rng, met = random.Random(1), 0
    grammars, end = GRAMMARS["bytes"], TOKENIZERS["bytes"].eos_token_id
    for _ in range(20):
        constraint, tokens = grammars.constraint(structure), []
        while not constraint.is_complete and len(tokens) < 60:
            ids = allowed(constraint)
            forced = constraint.forced()
            assert bool(forced) == (len(ids) == 1)
            assert forced[:1] in ([], ids)
            for number, token in enumerate(forced):
                assert allowed(after(grammars, structure, [*tokens, *forced[:number]])) == [token]
            met += len(forced)
            token = rng.choice(ids)
            if token == end:
                break
            constraint.push(token)
            tokens.append(token)
    assert met > 20


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_state_is_a_function_of_the_tokens_whatever_others_do(seed: int) -> None:
    rng = random.Random(seed)
    structure, grammars = Structure(json=json.dumps(SCHEMA)), GRAMMARS["bytes"]
    end = TOKENIZERS["bytes"].eos_token_id
    rows = [(grammars.constraint(structure), []) for _ in range(4)]
    for _ in range(25):
        constraint, tokens = rng.choice(rows)
        ids = [] if constraint.is_complete else allowed(constraint)
        assert constraint.is_complete or ids == allowed(after(grammars, structure, tokens))
        if not set(ids) - {end}:
            continue
        tokens.append(rng.choice([token for token in ids if token != end]))
        constraint.push(tokens[-1])


def test_masks_of_many_are_those_of_each() -> None:
    rng = random.Random(3)
    structure = Structure(json=json.dumps(SCHEMA))
    constraints = []
    for _ in range(40):
        constraints.append(GRAMMARS["bytes"].constraint(structure))
        for _ in range(rng.randrange(9)):
            constraints[-1].push(rng.choice(allowed(constraints[-1])))
    masks = np.zeros((40, constraints[0].source.num_words), dtype=np.int32)
    constraints[0].source.fill(constraints, masks)
    for constraint, mask in zip(constraints, masks, strict=True):
        alone = np.zeros((1, len(mask)), dtype=np.int32)
        constraint.source.fill([constraint], alone)
        assert (mask == alone[0]).all()


def test_every_end_is_allowed_where_the_output_may_end_and_no_padding_ever() -> None:
    tokenizer = TOKENIZERS["bytes"]
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    grammars = grammars_of(tokenizer, eos=(end, start), padding=40)
    structure = Structure(regex=".*")
    ids = allowed(grammars.constraint(structure))
    assert {start, end} <= set(ids)
    assert max(ids) < len(tokenizer)
    assert tokenizer.bos_token_id not in ids
    ids = allowed(after(grammars, Structure(regex="a.+"), tokenizer("a")["input_ids"]))
    assert not {start, end} & set(ids)


def test_an_output_is_complete_only_where_nothing_may_follow() -> None:
    tokenizer, grammars = TOKENIZERS["bytes"], GRAMMARS["bytes"]
    (a,), (b,) = tokenizer("a")["input_ids"], tokenizer("b")["input_ids"]
    structure = Structure(choice=("a", "ab"))
    assert not after(grammars, structure, [a]).is_complete
    assert after(grammars, structure, [a, b]).is_complete
    assert after(grammars, structure, [a, tokenizer.eos_token_id]).is_complete


def test_after_a_failure_no_token_is_allowed_and_the_reason_is_told() -> None:
    constraint = after(GRAMMARS["bytes"], Structure(choice=("yes", "no")), [3])
    assert allowed(constraint) == []
    assert not constraint.is_complete
    assert "doesn't satisfy the grammar" in str(constraint.problem)
    assert "\n" not in str(constraint.problem)


def test_a_decomposed_letter_is_written_although_the_tokenizer_composes() -> None:
    assert texts("nfc", Structure(choice=("cafe\u0301", "x"))) == {"cafe\u0301", "x"}


def test_ten_thousand_choices_compile() -> None:
    choices = tuple(f"label {number}" for number in range(10_000))
    assert GRAMMARS["bytes"].problem(SamplingParams(structured=Structure(choice=choices))) is None
