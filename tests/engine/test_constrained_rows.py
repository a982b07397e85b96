"""Rows whose output is constrained: forced tokens, ends, preemption, rows without a token."""

import zlib
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.core import EngineCore
from batchgen.engine.preemption import PreemptionPolicy
from batchgen.engine.request import FinishReason, Request
from batchgen.engine.step import NO_LEGAL_TOKEN, StepOutput
from batchgen.errors import RowErrorType
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.fake_model import FakeExecutor, next_token
from tests.support.invariants import check_invariants
from tests.support.toy_constraint import ToyConstraint

EOS = 7


class _Obedient(FakeExecutor):
    """The fake model, choosing the allowed token that is next to what it would say."""

    def _sample(self, history: tuple[int, ...], samples: Any, index: int) -> int | None:
        special = next((each for each in samples.special if each.index == index), None)
        if special is None or special.constraint is None:
            return super()._sample(history, samples, index)
        assert special.constraint.tokens == list(history[special.num_prompt_tokens :])
        return choose(history, special.constraint.allowed() - set(special.banned))


def choose(history: Any, allowed: set[int]) -> int:
    """The choice that no pool, order or preemption may change."""
    wanted = next_token(history)
    return min(allowed, key=lambda token: (abs(token - wanted), token), default=NO_LEGAL_TOKEN)


def rule(tokens: list[int]) -> set[int]:
    """Often one token, sometimes a few, an end now and then, nothing after 30."""
    noise = zlib.crc32(repr(tokens).encode())
    if len(tokens) >= 30 or tokens[-1:] == [EOS]:
        return set()
    first = 20 + noise % 900
    if noise % 3:
        return {first}
    return {first, first + 7, first + 40} | ({EOS} if noise % 5 == 0 else set())


def reference(prompt: list[int], max_tokens: int) -> tuple[list[int], FinishReason]:
    """Token by token, without an engine."""
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(choose((*prompt, *output), rule(output)))
        if not rule(output):
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def _run(prompts: Any, params: Any, *, forces: bool = True, **given: Any) -> tuple[Any, EngineCore]:
    scheduler = make_scheduler(**given)

    def before(plan: Any) -> None:
        check_invariants(scheduler, plan)
        if not len(plan.swap_out):
            executor.forget(scheduler.blocks.pool.free_blocks())

    executor = _Obedient(scheduler.blocks.block_size, before=before)
    engine = EngineCore(scheduler, executor)
    requests = make_requests(prompts, params)
    for request in requests:
        request.constraint = ToyConstraint(rule, forces=forces)
    return run_all(engine, requests), engine


PROMPTS = [[1, 2, 3, 4, 5, number % 3, number] for number in range(9)]


@settings(max_examples=60, deadline=None)
@given(
    block_size=st.sampled_from([4, 16]), num_blocks=st.integers(12, 40), budget=st.integers(9, 60),
    swap_blocks=st.sampled_from([0, 30]), max_num_seqs=st.integers(1, 9),
    preemption=st.sampled_from(list(PreemptionPolicy)), forces=st.booleans(),
)  # fmt: skip
def test_outputs_are_the_same_whatever_makes_room_and_however_tokens_are_forced(
    block_size, num_blocks, budget, swap_blocks, max_num_seqs, preemption, forces
) -> None:
    lengths = [3 + 4 * number for number in range(9)]
    requests, engine = _run(
        PROMPTS, [SamplingParams(max_tokens=each) for each in lengths], forces=forces,
        num_blocks=num_blocks, block_size=block_size, budget=budget, swap_blocks=swap_blocks,
        max_num_seqs=max_num_seqs, preemption=preemption, eos=(EOS,),
        admission=AdmissionPolicy.PROMPT,
    )  # fmt: skip
    for request, prompt, length in zip(requests, PROMPTS, lengths, strict=True):
        assert (request.output_token_ids, request.finish_reason) == reference(prompt, length)
    counters = engine.scheduler.counters
    assert bool(counters.forced_tokens) == forces
    assert counters.sampled_tokens == sum(request.num_output_tokens for request in requests)


def test_rows_were_preempted_in_such_a_run() -> None:
    _, engine = _run(
        PROMPTS, SamplingParams(max_tokens=30), num_blocks=12, block_size=4, swap_blocks=6
    )
    assert engine.scheduler.counters.preemptions > 3


def test_forced_tokens_take_no_step_of_their_own() -> None:
    params = SamplingParams(max_tokens=30)
    slow, slow_engine = _run([[1, 2]], params, forces=False, num_blocks=20, block_size=4)
    fast, fast_engine = _run([[1, 2]], params, num_blocks=20, block_size=4)
    assert fast[0].output_token_ids == slow[0].output_token_ids
    forced = fast_engine.scheduler.counters.forced_tokens
    assert forced > 8
    assert slow_engine.stats.steps - fast_engine.stats.steps == forced


def _one(tokens_of: Any, **params: Any) -> Request:
    scheduler = make_scheduler(32, 4, eos=(EOS,))
    engine = EngineCore(scheduler, _Obedient(4))
    requests = make_requests([[1] * 10, [2, 3]], SamplingParams(**params))
    requests[0].constraint = ToyConstraint(tokens_of)
    finished = run_all(engine, requests)
    assert finished[1].error is None
    assert finished[1].num_output_tokens == params["max_tokens"]
    return finished[0]


def _spell(*words: list[int]) -> Any:
    """A rule that allows these outputs, and an end behind one that others go on from."""

    def tokens_of(tokens: list[int]) -> set[int]:
        longer = [word for word in words if len(word) > len(tokens)]
        following = {word[len(tokens)] for word in longer if word[: len(tokens)] == tokens}
        return following | ({EOS} if following and tokens in words else set())

    return tokens_of


def test_an_output_ends_without_a_step_where_nothing_may_follow() -> None:
    request = _one(_spell([20, 30, 40], [50]), max_tokens=6)
    assert request.output_token_ids in ([20, 30, 40], [50])
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)


def test_an_output_cut_by_max_tokens_says_length_and_is_not_repaired() -> None:
    request = _one(_spell([20, 30, 40]), max_tokens=2)
    assert request.output_token_ids == [20, 30]
    assert request.finish_reason is FinishReason.LENGTH


def test_a_forced_stop_token_ends_the_row() -> None:
    request = _one(_spell([20, 30, 40]), max_tokens=9, stop_token_ids=(30,))
    assert (request.output_token_ids, request.stop_reason) == ([20, 30], "30")


def test_min_tokens_holds_back_an_end_only_while_the_constraint_goes_on() -> None:
    request = _one(_spell([20], [20, 30, 40]), max_tokens=9, min_tokens=5)
    assert request.output_token_ids == [20, 30, 40]
    assert request.finish_reason is FinishReason.STOP


def test_a_row_that_no_token_is_left_for_fails_alone_with_its_reason() -> None:
    request = _one(_spell([20, 30, 40]), max_tokens=9, min_tokens=5, stop_token_ids=(20,))
    assert request.error is not None
    assert request.error.type is RowErrorType.UNSATISFIABLE_CONSTRAINT
    assert "after 0 tokens" in request.error.message
    assert "min_tokens" in request.error.message


def test_the_constraints_own_reason_is_told() -> None:
    scheduler = make_scheduler(32, 4)
    (request,) = make_requests([[1, 2]], SamplingParams(max_tokens=4))
    request.constraint = ToyConstraint(lambda _: set())
    request.constraint.problem = "the grammar is too complex"
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.advance()
    scheduler.update(StepOutput(np.array([NO_LEGAL_TOKEN])))
    assert request.error is not None
    assert "too complex" in request.error.message
