"""The sampler against transformers' own logits processors and a float64 model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.request import noise_key
from batchgen.engine.step import NO_LEGAL_TOKEN, NO_TOKEN, ScoredSample
from batchgen.runtime.sampler import _filtered_probabilities, prepare, sample
from batchgen.sampling import SamplingParams
from tests.support.sample_batch import OneSample, sample_batch
from tests.support.toy_constraint import ToyConstraint


def _entry(
    *, key: int = 0, position: int = 0, prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (), banned: tuple[int, ...] = (), allowed: Any = None, **params: Any,
) -> OneSample:  # fmt: skip
    constraint = None if allowed is None else ToyConstraint(lambda tokens: set(allowed))
    return OneSample(SamplingParams(**params), key, position, prompt, output, banned, constraint)


def _sample(logits: torch.Tensor, *entries: OneSample) -> list[int]:
    return sample(logits, sample_batch(entries)).token_ids.tolist()


def _choose(logits: Any, **given_: Any) -> int:
    return _sample(torch.tensor([logits], dtype=torch.float32), _entry(**given_))[0]


def _filtered(logits: torch.Tensor, entry: OneSample) -> torch.Tensor:
    (random,) = prepare(sample_batch([entry]), torch.from_numpy).random
    return _filtered_probabilities(logits, random)[0]


def _support(logits: list[float], **params: Any) -> list[int]:
    rows = torch.tensor([logits], dtype=torch.float32)
    return _filtered(rows, _entry(**params)).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("top_p", [0.0, 1e-9, float(np.exp(3) / np.exp([1, 3, 2]).sum())])
def test_d04_top_p_always_keeps_the_top_token(top_p: float) -> None:
    assert _support([1, 3, 2], temperature=1.0, top_p=top_p) == [1]


def test_d04_top_p_one_filters_nothing() -> None:
    assert _support([1, 3, -60], temperature=1.0, top_p=1.0) == [0, 1, 2]


@pytest.mark.parametrize("top_k", [1, 2])
def test_d05_top_k_before_top_p_leaves_a_renormalised_token(top_k: int) -> None:
    logits = torch.zeros(1, 100)
    entry = _entry(temperature=0.01, top_k=top_k, top_p=0.8)
    kept = _filtered(logits, entry)
    assert kept.nonzero()[:, 0].tolist() == list(range(top_k))
    assert kept.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-40, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_d06_a_tiny_temperature_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[10.0, 30.0, 20.0]], dtype=dtype).float()
    assert _sample(logits, _entry(temperature=temperature)) == [1]


def test_d07_greedy_and_random_rows_share_a_batch_and_a_nan_fails_its_row_only() -> None:
    logits = torch.tensor([[float("-inf"), 1, 2], [0, 0, 50], [float("nan"), 1, 2], [5, 1, 2]])
    entries = (_entry(), _entry(temperature=0.7), _entry(temperature=0.7), _entry())
    assert _sample(logits, *entries) == [2, 2, NO_TOKEN, 0]


def test_d02_samples_of_one_row_differ_and_repeat_exactly() -> None:
    def draw(sample_index: int) -> list[int]:
        key = noise_key(1, "row", sample_index)
        return [_choose([0.0] * 100, temperature=1.0, key=key, position=i) for i in range(8)]

    first = [draw(i) for i in range(4)]
    assert len({tuple(tokens) for tokens in first}) == 4
    assert first == [draw(i) for i in range(4)]


def test_noise_depends_on_seed_id_type_sample_and_position_only() -> None:
    keys = {noise_key(s, i, n) for s in (0, 1) for i in (1, "1", "a") for n in (0, 1)}
    assert len(keys) == 12
    logits = torch.zeros(3, 50)
    entries = [_entry(temperature=1.0, key=i, position=4) for i in range(3)]
    together = _sample(logits.clone(), *entries)
    alone = [_sample(logits[:1].clone(), entry)[0] for entry in entries]
    assert together == alone


def test_i09_the_lowest_id_wins_a_tie() -> None:
    logits = torch.full((1, 50_000), -1.0)
    logits[0, [17, 400, 49_999]] = 3.0
    assert _sample(logits.clone(), _entry()) == [17]
    assert _sample(logits.clone(), _entry(temperature=1.0, top_k=1)) == [17]


def test_frequencies_follow_the_filtered_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    params = {"temperature": 1.3, "top_k": 4, "top_p": 0.9}
    entries = [_entry(key=noise_key(0, i, 0), **params) for i in range(20_000)]
    drawn = np.bincount(_sample(logits.repeat(20_000, 1), *entries), minlength=5) / 20_000
    expected = _filtered(logits[None], entries[0]).numpy()
    assert np.abs(drawn - expected).max() < 4 * np.sqrt(0.25 / 20_000)


# Exact in float32 and no closer than an eighth, so that no rounding makes ties.
_floats = st.lists(st.integers(-64, 64).map(lambda i: i / 8), min_size=2, max_size=12, unique=True)


@settings(max_examples=200, deadline=None)
@given(logits=_floats, k=st.integers(1, 12), p=st.floats(0.05, 0.99), m=st.floats(0.01, 0.9),
       t=st.floats(0.2, 3))  # fmt: skip
def test_each_filter_keeps_what_transformers_keeps(logits, k, p, m, t) -> None:
    rows = torch.tensor([logits], dtype=torch.float64)
    warmed = rows / t
    for name, value, warper in (
        ("top_k", k, tf.TopKLogitsWarper(k)),
        ("min_p", m, tf.MinPLogitsWarper(m)),
        ("top_p", p, tf.TopPLogitsWarper(p)),
    ):
        ours = _support(logits, temperature=t, **{name: value})
        theirs = (warper(None, warmed.clone())[0] > -torch.inf).nonzero()[:, 0].tolist()
        probabilities = torch.softmax(warmed, -1)[0].sort(descending=True).values
        # Where a cumulated probability meets the bound, rounding decides.
        close = (probabilities.cumsum(0) - p).abs().min() < 1e-5
        near_floor = (probabilities / probabilities[0] - m).abs().min() < 1e-5
        assert ours == theirs or (name == "top_p" and close) or (name == "min_p" and near_floor)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_penalties_equal_their_definition_in_float64(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 6), max_size=8)
    prompt, output = data.draw(tokens), data.draw(tokens)
    logits = data.draw(st.lists(st.floats(-5, 5, width=32), min_size=7, max_size=7))
    presence, frequency = data.draw(st.floats(-2, 2)), data.draw(st.floats(-2, 2))
    repetition = data.draw(st.floats(0.5, 2))
    expected = np.array(logits, dtype=np.float64)
    for token in {*prompt, *output}:
        expected[token] *= 1 / repetition if expected[token] > 0 else repetition
    for token in set(output):
        expected[token] -= frequency * output.count(token) + presence
    chosen = _choose(
        logits, prompt=tuple(prompt), output=tuple(output), presence_penalty=presence,
        frequency_penalty=frequency, repetition_penalty=repetition,
    )  # fmt: skip
    assert expected[chosen] >= expected.max() - 1e-5


def test_repetition_penalty_equals_transformers() -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[3, 4, 4, 9]])
    theirs = tf.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    ours = logits.clone()
    entry = _entry(prompt=(3, 4), output=(4, 9), repetition_penalty=1.7)
    _sample(ours, entry)
    torch.testing.assert_close(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_constraint_chooses_among_its_tokens_and_leaves_other_rows_alone(data) -> None:
    vocab = data.draw(st.sampled_from([7, 32, 33, 100, 900, 1100]))
    rows = data.draw(st.integers(1, 5))
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows * vocab))
    ids = st.sets(st.integers(0, vocab - 1), min_size=1, max_size=vocab)
    sets = [data.draw(st.none() | ids) for _ in range(rows)]
    entries = [_entry(allowed=each, temperature=float(i % 2), key=i) for i, each in enumerate(sets)]
    dense = logits.clone()
    for row, each in zip(dense, sets, strict=True):
        if each is not None:
            row[
                [token for token in range(vocab) if token not in each or token >= 1000]
            ] = -torch.inf
    free = [_entry(temperature=float(i % 2), key=i) for i in range(rows)]
    assert _sample(logits.clone(), *entries) == _sample(dense, *free)


def test_a_token_that_only_just_follows_the_rules_is_taken_and_none_is_said() -> None:
    logits = torch.tensor([[1.0, -50.0, 3.0]]).repeat(4, 1)
    entries = (
        _entry(allowed=[1]),
        _entry(allowed=[1], temperature=1.0, top_p=0.1),
        _entry(allowed=[1, 2], banned=(2,)),
        _entry(allowed=[1], banned=(1,)),
    )
    assert _sample(logits, *entries) == [1, 1, 1, NO_LEGAL_TOKEN]
    logits = torch.tensor([[1.0, 2.0, float("nan")]]).repeat(2, 1)
    assert _sample(logits, _entry(allowed=[1, 2]), _entry(allowed=[])) == [
        NO_TOKEN,
        NO_LEGAL_TOKEN,
    ]


def test_top_p_counts_what_the_constraint_has_left() -> None:
    logits = torch.tensor([[9.0, 1.0, 1.1, 0.0]])
    entry = _entry(allowed=[1, 2, 3], temperature=1.0, top_p=0.7)
    _sample(logits, entry)
    assert _filtered(logits, entry).nonzero()[:, 0].tolist() == [1, 2]


def test_scored_samples_get_log_probabilities_and_change_nothing_else() -> None:
    logits = torch.randn(70, 50, generator=torch.Generator().manual_seed(1))
    logits[3, 5] = float("nan")
    free = [_entry(temperature=float(i % 2), key=i) for i in range(70)]
    wanted = [np.arange(i % 7 + 1) * 5 for i in range(70)]
    entries = [
        replace(each, scored=ScoredSample(0, tokens)) if i % 2 else each
        for i, (each, tokens) in enumerate(zip(free, wanted, strict=True))
    ]
    assert _sample(logits.clone(), *entries) == _sample(logits.clone(), *free)
    scores = sample(logits.clone(), sample_batch(entries)).scores
    for row, found in zip(range(1, 70, 2), scores, strict=True):
        if row != 3:
            exact = logits[row].double().log_softmax(-1)[wanted[row]].numpy()
            assert np.abs(found - exact).max() < 1e-12
