"""Bad words: how they are spelled, and that the engine rules out what transformers rules out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from batchgen.engine.request import Request
from batchgen.engine.stopping import StopRules
from batchgen.errors import RowErrorType
from batchgen.prompts.bad_words import BadWords
from batchgen.sampling import SamplingParams
from tests.support.tiny_tokenizers import make


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_a_word_is_spelled_alone_and_behind_a_space(kind):
    tokenizer = make(kind)
    spellings = BadWords(tokenizer, 1000).spellings(["story", " dog"])
    for text in ("story", " story", "dog", " dog"):
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert any(ids[-len(each) :] == each for each in spellings), text
    assert len(set(spellings)) == len(spellings)
    texts = {tokenizer.decode(each).strip() for each in spellings}
    assert texts == {"story", "dog"}


def test_a_space_that_is_a_token_of_its_own_adds_no_second_spelling(tokenizer):
    alone = tuple(tokenizer("zq")["input_ids"])
    assert tuple(tokenizer(" zq")["input_ids"])[-len(alone) :] == alone
    assert BadWords(tokenizer, 1000).spellings(["zq"]) == (alone,)


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    output=st.lists(st.integers(0, 3), min_size=1, max_size=9),
)
def test_what_is_ruled_out_after_an_output_is_what_transformers_rules_out(words, prompt, output):
    request = Request.create(
        0,
        prompt,
        SamplingParams(),
        max_model_len=99,
        bad_words=tuple(map(tuple, words)),
    )
    request.token_ids.extend(output)
    ours = set(StopRules(frozenset()).banned_now(request))
    processor = NoBadWordsLogitsProcessor(words)
    theirs = processor(torch.tensor([output]), torch.zeros(1, 4))[0]
    assert ours == set(theirs.isneginf().nonzero()[:, 0].tolist())


def test_before_the_first_token_only_words_of_one_token_are_ruled_out_whatever_the_prompt_says():
    words = ((1, 2), (3,))
    request = Request.create(0, [1], SamplingParams(), max_model_len=99, bad_words=words)
    assert StopRules(frozenset()).banned_now(request) == (3,)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": ((400, 1.0),)}, "logit_bias names token 400"),
        ({"bad_words": ("story", "")}, "no tokens of the model spell ''"),
    ],
)
def test_what_makes_no_sense_for_the_model_is_an_error(tokenizer, params, message):
    problem = BadWords(tokenizer, 400).problem(SamplingParams(**params))
    assert problem.type is RowErrorType.INVALID_SAMPLING_PARAMS
    assert message in problem.message


def test_bad_words_need_a_tokenizer_and_a_bias_does_not():
    words = BadWords(None, 400)
    assert "model.tokenizer" in words.problem(SamplingParams(bad_words=("a",))).message
    assert words.problem(SamplingParams(logit_bias=((3, 1.0),))) is None
    assert words.spellings(()) == ()
