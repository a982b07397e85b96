"""Entries of log-probabilities against a float64 model that sorts the whole vocabulary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.step import LoggedTokens
from batchgen.runtime.logprobs import logprob_rows
from batchgen.runtime.sampler import sample
from batchgen.sampling import SamplingParams
from tests.support.sample_batch import OneSample, sample_batch
from tests.support.toy_constraint import ToyConstraint


def _by_hand(logits: np.ndarray, token: int, k: int) -> tuple[list[int], list[float], int]:
    exact = logits.astype(np.float64)
    logprobs = exact - np.log(np.exp(exact - exact.max()).sum()) - exact.max()
    order = sorted(range(len(exact)), key=lambda i: (-exact[i], i))
    ids = [token, *order[:k]]
    return ids, [logprobs[i] for i in ids], order.index(token) + 1


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(
        st.lists(st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1.0, 2.25, 40.0]), min_size=6, max_size=6),
        min_size=1,
        max_size=70,
    ),
    k=st.integers(0, 6),
    data=st.data(),
)
def test_entries_are_those_of_a_sorted_vocabulary_ties_by_id(logits, k, data):
    tokens = [data.draw(st.integers(0, 5)) for _ in logits]
    rows = logprob_rows(torch.tensor(logits), torch.tensor(tokens), k)
    for at, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        ids, logprobs, rank = _by_hand(np.array(row), token, k)
        assert rows.token_ids[at].tolist() == ids
        assert rows.logprobs[at] == pytest.approx(logprobs, abs=1e-5)
        assert rows.ranks[at] == rank


def test_they_are_the_models_own_whatever_is_done_to_the_logits_and_change_no_token():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4 + 5, 30, generator=generator) * 3
    params = [
        SamplingParams(repetition_penalty=1.7, presence_penalty=1.0, logit_bias=((4, 9.0),)),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(),
        SamplingParams(temperature=2.0),
    ]
    samples = [
        OneSample(each, key=i, prompt=(4, 5), output=(6,), banned=(3,) if i == 1 else ())
        for i, each in enumerate(params)
    ]
    samples[2] = OneSample(params[2], constraint=ToyConstraint(lambda tokens: {11, 12}))
    plain = sample(logits[:4].clone(), sample_batch(samples)).token_ids.tolist()
    logged = (
        LoggedTokens(0, 0, np.array([9, 8]), 0, num_best=4),
        LoggedTokens(1, 2, np.array([1, 2, 3]), -1, num_best=2),
        LoggedTokens(2, 5, np.array([], np.int64), 2, num_best=0),
        LoggedTokens(3, 5, np.array([], np.int64), 3, num_best=3),
    )
    batch = sample_batch(samples, given=np.arange(5), logged=logged)
    output = sample(logits.clone(), batch)
    assert output.token_ids.tolist() == plain
    follows = {0: [(4, 9), (5, 8), (0, plain[0])], 1: [(6, 1), (7, 2), (8, 3)],
               2: [(2, plain[2])], 3: [(3, plain[3])]}  # fmt: skip
    for number, (entry, found) in enumerate(zip(logged, output.logprobs, strict=True)):
        assert len(found.ranks) == entry.num_entries
        k = entry.num_best
        for at, (row, token) in enumerate(follows[number]):
            ids, logprobs, rank = _by_hand(logits[row].numpy(), token, k)
            assert found.token_ids[at, : 1 + k].tolist() == ids
            assert found.logprobs[at, : 1 + k] == pytest.approx(logprobs, abs=1e-4)
            assert found.ranks[at] == rank


def test_a_settled_token_is_taken_whatever_the_logits_say():
    logits = torch.tensor([[5.0, 1.0, 2.0]]).repeat(2, 1)
    entries = [OneSample(SamplingParams(temperature=float(t)), forced=1) for t in (0, 1)]
    assert sample(logits, sample_batch(entries)).token_ids.tolist() == [1, 1]
