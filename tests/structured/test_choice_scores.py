"""Choices' probabilities and their calibration, against brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.structured.calibration import content_free_offsets, normalised, prior_offsets
from batchgen.structured.choices import ChoiceTree

VOCAB = 3


def _next(tokens: tuple[int, ...]) -> np.ndarray:
    """A toy model: [VOCAB] probabilities of the next token."""
    weights = np.random.default_rng([*tokens, len(tokens)]).random(VOCAB) + 0.05
    return weights / weights.sum()


def _probability(tokens: tuple[int, ...]) -> float:
    return math.prod(_next(tokens[:at])[token] for at, token in enumerate(tokens))


@settings(max_examples=100, deadline=None)
@given(
    spelled=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple),
        min_size=2, max_size=7, unique=True,
    )
)  # fmt: skip
def test_probabilities_are_those_of_texts_that_begin_with_one_choice_and_no_longer_one(
    spelled: list[tuple[int, ...]],
) -> None:
    tree = ChoiceTree.of({str(tokens): tokens for tokens in spelled})
    scores = [
        np.log(_next(path)[tokens])
        for path, tokens in zip(tree.paths, tree.next_tokens, strict=True)
    ]
    found = np.exp(tree.log_probabilities(scores))
    expected = dict.fromkeys(spelled, 0.0)
    for text in itertools.product(range(VOCAB), repeat=4):
        met = [tokens for tokens in spelled if text[: len(tokens)] == tokens]
        if met:
            expected[max(met, key=len)] += _probability(text)
    # A text that leaves a longer choice half way still counts for the shorter one only where
    # its next token is none of the tree's.
    for tokens, probability in zip(spelled, found, strict=True):
        following = {each[len(tokens)] for each in spelled
                     if len(each) > len(tokens) and each[: len(tokens)] == tokens}  # fmt: skip
        leaving = 1 - sum(_next(tokens)[token] for token in following)
        assert probability == pytest.approx(_probability(tokens) * leaving)
        assert probability <= expected[tokens] + 1e-12
    assert found.sum() <= 1 + 1e-12


def test_the_tree_asks_only_where_choices_part_or_go_on() -> None:
    tree = ChoiceTree.of({"a": (1,), "b": (2,), "ab": (1, 2), "abc": (1, 2, 3), "abd": (1, 2, 0)})
    assert tree.paths == ((), (1,), (1, 2))
    assert [tokens.tolist() for tokens in tree.next_tokens] == [[1, 2], [2], [0, 3]]
    single = ChoiceTree.of({"a": (1,), "b": (2,)})
    assert single.paths == ((),)


def test_a_choice_that_certainly_goes_on_is_impossible_and_no_warning_is_raised() -> None:
    tree = ChoiceTree.of({"a": (1,), "ab": (1, 2)})
    found = tree.log_probabilities([np.array([0.0]), np.array([0.0])])
    assert found.tolist() == [-np.inf, 0.0]
    assert normalised(found[None]).tolist() == [[0.0, 1.0]]
    assert normalised(np.full((1, 4), -np.inf)).tolist() == [[0.25] * 4]


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(2, 200), seed=st.integers(0, 99), share=st.floats(0.1, 0.9))
def test_two_choices_are_parted_at_the_quantile_of_their_distance(rows, seed, share) -> None:
    scores = np.random.default_rng(seed).normal([-1, -3], 1, (rows, 2))
    labels = normalised(scores, prior_offsets(scores, np.array([share, 1 - share]))).argmax(axis=1)
    distance = scores[:, 0] - scores[:, 1]
    won = distance[labels == 0]
    assert abs(len(won) - share * rows) <= 1
    # It is a threshold: who wins is further in favour of the choice than who does not.
    assert not len(won) or won.min() >= distance[labels == 1].max(initial=-np.inf)


@pytest.mark.parametrize("number", [3, 5, 10])
def test_labels_get_the_shares_that_were_asked_for(number: int) -> None:
    rng = np.random.default_rng(number)
    scores = rng.normal(rng.normal(0, 3, number), 1 + rng.random(number), (4000, number))
    shares = rng.dirichlet(np.full(number, 3.0))
    labels = normalised(scores, prior_offsets(scores, shares)).argmax(axis=1)
    assert np.abs(np.bincount(labels, minlength=number) / 4000 - shares).max() < 0.01


def test_what_a_model_prefers_whatever_the_row_makes_no_difference_any_more() -> None:
    scores = np.random.default_rng(0).normal(0, 2, (300, 3))
    shares, bias = np.full(3, 1 / 3), np.array([4.0, -2.0, 0.5])
    plain = normalised(scores, prior_offsets(scores, shares))
    biased = normalised(scores + bias, prior_offsets(scores + bias, shares))
    assert np.allclose(plain, biased, atol=1e-6)
    empty = np.array([[0.0, 0.0, 0.0]])
    assert np.allclose(
        normalised(scores, content_free_offsets(empty)),
        normalised(scores + bias, content_free_offsets(empty + bias)),
    )


def test_without_content_all_choices_are_equally_likely() -> None:
    empty = np.log(np.array([[0.7, 0.2, 0.1]]))
    assert np.allclose(normalised(empty, content_free_offsets(empty)), 1 / 3)
    several = np.log(np.array([[0.7, 0.3], [0.5, 0.5], [0.9, 0.1]]))
    offsets = content_free_offsets(several)
    # Zhao et al.: the mean of the probabilities is what is divided by.
    assert offsets[1] - offsets[0] == pytest.approx(math.log(0.7 / 0.3))


def test_no_rows_need_no_offsets() -> None:
    assert prior_offsets(np.empty((0, 2)), np.array([0.5, 0.5])).tolist() == [0.0, 0.0]
