"""Logs of log-probabilities: each position once, whatever the pool, chunks and preemptions."""

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.core import EngineCore
from batchgen.engine.preemption import PreemptionPolicy
from batchgen.engine.request import Request
from batchgen.engine.step import IntArray, LogprobRows
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.fake_model import FakeExecutor, generate
from tests.support.invariants import check_invariants
from tests.support.toy_constraint import ToyConstraint


def _mark(history: Any) -> int:
    return zlib.crc32(repr(list(history)).encode()) % 1_000_000


class _Logging(FakeExecutor):
    """Marks each entry by the tokens before it, and counts the entries that it makes."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.most_given = 0
        self.num_entries = 0

    def _logprobs(self, plan: Any, sampled: IntArray) -> tuple[LogprobRows, ...]:
        self.most_given = max(self.most_given, len(plan.samples.given))
        assert len(plan.samples.given) == sum(len(e.token_ids) for e in plan.samples.logged)
        found = []
        for entry in plan.samples.logged:
            places = plan.samples.given[entry.first : entry.first + len(entry.token_ids)].tolist()
            known = entry.token_ids.tolist()
            if entry.sample >= 0:
                places.append(int(plan.query_starts[plan.samples.rows[entry.sample] + 1]) - 1)
                known.append(int(sampled[entry.sample]))
            assert len(places) == entry.num_entries
            histories = [self.slots[plan.slots[place]] for place in places]
            assert [len(each) for each in histories] == (plan.positions[places] + 1).tolist()
            self.num_entries += len(places)
            width = (1, 1 + entry.num_best)
            found.append(
                LogprobRows(
                    np.tile(np.array(known, dtype=np.int32)[:, None], width),
                    np.tile(np.array([_mark(h) for h in histories], np.float32)[:, None], width),
                    np.ones(len(places), dtype=np.int32),
                )
            )
        return tuple(found)

    def _sample(self, history: Any, samples: Any, index: int) -> int | None:
        special = next((each for each in samples.special if each.index == index), None)
        if special is None or special.constraint is None:
            return super()._sample(history, samples, index)
        if special.forced is not None:
            return int(special.forced)
        return max(special.constraint.allowed())


def _engine(**given: Any) -> tuple[EngineCore, _Logging]:
    scheduler = make_scheduler(**given)

    def before(plan: Any) -> None:
        check_invariants(scheduler, plan)
        if not len(plan.swap_out):
            executor.forget(scheduler.blocks.pool.free_blocks())

    executor = _Logging(scheduler.blocks.block_size, before=before)
    return EngineCore(scheduler, executor), executor


def _check(request: Request) -> int:
    """Check a request's log and return its number of entries."""
    log, params, tokens = request.logprobs, request.params, request.token_ids
    if params.logprobs is None and params.prompt_logprobs is None:
        assert log is None
        return 0
    assert log is not None
    first = 1 if params.prompt_logprobs is not None else request.num_prompt_tokens
    end = request.num_prompt_tokens if params.logprobs is None else len(tokens)
    rows = log.rows(first, end)
    assert (log.first, rows.ranks.tolist()) == (first, [1] * (end - first))
    assert rows.token_ids[:, 0].tolist() == tokens[first:end].tolist()
    assert rows.logprobs[:, 0].tolist() == [_mark(tokens[:i]) for i in range(first, end)]
    return end - first


_COUNTS = st.none() | st.integers(0, 3)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(1, 16), _COUNTS, _COUNTS),
        min_size=1,
        max_size=9,
    ),
    block_size=st.sampled_from([4, 8]),
    num_blocks=st.integers(12, 40),
    budget=st.integers(6, 60),
    swap_blocks=st.sampled_from([0, 30]),
    preemption=st.sampled_from(list(PreemptionPolicy)),
    prefix_caching=st.booleans(),
)
def test_d10_every_entry_is_made_once_and_behind_what_really_stood_before_it(
    rows, block_size, num_blocks, budget, swap_blocks, preemption, prefix_caching
):
    engine, executor = _engine(
        num_blocks=num_blocks, block_size=block_size, budget=budget, swap_blocks=swap_blocks,
        admission=AdmissionPolicy.PROMPT, preemption=preemption, prefix_caching=prefix_caching,
    )  # fmt: skip
    # Long shared beginnings, so that hits are there to be had.
    prompts = [[5] * 11 + [6, 7, kind] + [8] * length for kind, length, *_ in rows]
    params = [
        SamplingParams(max_tokens=most, logprobs=out, prompt_logprobs=prompt)
        for _, _, most, out, prompt in rows
    ]
    num_entries = 0
    for request, prompt in zip(
        run_all(engine, make_requests(prompts, params)), prompts, strict=True
    ):
        expected = generate(prompt, request.params.max_tokens)
        assert request.output_token_ids == expected[: len(request.output_token_ids)]
        num_entries += _check(request)
    assert executor.num_entries == num_entries


def test_d09_a_row_that_logs_its_prompt_takes_nothing_from_the_cache_and_gives_to_others():
    engine, _ = _engine(num_blocks=64, block_size=4)
    prompts = [[1] * 8 + [2], [1] * 8 + [3], [1] * 8 + [4]]
    logs, plain = SamplingParams(max_tokens=2, prompt_logprobs=1), SamplingParams(max_tokens=2)
    for request in make_requests(prompts, [plain, logs, plain]):
        run_all(engine, [request])
        _check(request)
        assert request.account.cached_tokens == (8 if request.request_id == 2 else 0)
    assert engine.scheduler.counters.prefill_tokens == 9 + 9 + 1


def test_d10_a_prompt_whose_row_makes_room_goes_on_from_the_cache_behind_its_last_entry():
    engine, _ = _engine(num_blocks=14, block_size=4, budget=4, admission=AdmissionPolicy.PROMPT)
    params = SamplingParams(max_tokens=14, prompt_logprobs=1, logprobs=1)
    prompts = [[1] * 10, [2] * 36]
    first, second = make_requests(prompts, params)
    # It makes room in the middle of its prompt.
    second.priority = 1
    finished = run_all(engine, [first, second])
    assert second.account.num_preemptions > 0
    assert 0 < second.max_computed < 36
    for request, prompt in zip(finished, prompts, strict=True):
        _check(request)
        assert request.output_token_ids == generate(prompt, 14)


def test_a_step_asks_for_a_bounded_number_of_logits_and_decoding_goes_on_beside_long_prompts():
    engine, executor = _engine(num_blocks=900, block_size=4, budget=2000)
    logs = SamplingParams(max_tokens=3, prompt_logprobs=0)
    requests = make_requests([[i + 1] * 700 for i in range(3)], logs)
    short = Request.create(9, [9] * 5, SamplingParams(max_tokens=8, logprobs=1), max_model_len=99)
    for request in run_all(engine, [*requests, short]):
        _check(request)
    assert executor.most_given <= 256 + 3
    assert engine.stats.steps < 20


@pytest.mark.parametrize("logprobs", [None, 2])
def test_tokens_that_a_constraint_forces_are_the_same_and_have_entries_of_their_own(logprobs):
    def rule(tokens: list[int]) -> set[int]:
        if len(tokens) == 9:
            return set()
        return {30, 31} if len(tokens) % 4 == 0 else {40 + len(tokens)}

    engine, _ = _engine(num_blocks=64, block_size=4)
    (request,) = make_requests([[3] * 6], SamplingParams(max_tokens=20, logprobs=logprobs))
    request.constraint = ToyConstraint(rule)
    run_all(engine, [request])
    assert request.output_token_ids == [31, 41, 42, 43, 31, 45, 46, 47, 31]
    assert engine.scheduler.counters.forced_tokens == (0 if logprobs else 6)
    assert engine.stats.steps == (9 if logprobs else 3)
    _check(request)


def test_a_log_grows_and_keeps_what_was_written():
    log = SamplingParams(logprobs=2)
    (request,) = make_requests([[1] * 5], log)
    assert request.logprobs is not None
    for token in range(5, 400):
        entry = request.logprobs.rows(token, token + 1)
        entry.ranks[:] = token
        entry.token_ids[:] = [[token, 1, 2]]
    assert request.logprobs.rows(5, 400).ranks.tolist() == list(range(5, 400))
    assert np.array_equal(request.logprobs.rows(5, 400).token_ids[:, 0], np.arange(5, 400))
