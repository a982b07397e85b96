"""Sharing by the token: what stands in a part of a block is copied, not computed."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.request import Request
from batchgen.sampling import SamplingParams
from tests.support.drive import make_engine_over_fake, make_requests, make_scheduler, run_all
from tests.support.fake_model import generate


def _floor(prompts: list[list[int]]) -> int:
    """E_1: the tokens of the prefix tree, and one for every prompt that adds none."""
    total = 0
    for previous, prompt in pairwise([[], *sorted(prompts)]):
        shared = 0
        while shared < min(len(previous), len(prompt) - 1) and previous[shared] == prompt[shared]:
            shared += 1
        total += len(prompt) - shared
    return total


def _run(prompts: list[list[int]], size: int, blocks: int = 4000, max_tokens: int = 3):
    scheduler = make_scheduler(blocks, size, budget=64)
    engine, executor = make_engine_over_fake(scheduler)
    requests = make_requests(sorted(prompts), SamplingParams(max_tokens=max_tokens))
    finished = run_all(engine, requests)
    for request in finished:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        assert request.output_token_ids == generate(prompt, max_tokens)
    return scheduler, finished, executor


@pytest.mark.parametrize("size", [4, 16, 128])
def test_few_shot_rows_compute_each_distinct_token_once(size: int) -> None:
    prompts = [[*range(54), 100 + i, i % 7, i] for i in range(60)]
    scheduler, finished, _ = _run(prompts, size)
    computed = scheduler.counters.prefill_tokens
    # Blocks of four: two shared tokens behind the last border are not worth a step.
    assert computed == _floor(prompts) or (size == 4 and computed < 1.1 * _floor(prompts))
    cached = sum(request.account.cached_tokens for request in finished)
    assert cached == sum(map(len, prompts)) - computed


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_with_room_for_all_distinct_tokens_are_computed_once(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=20)
    prompts = data.draw(st.lists(tokens, min_size=1, max_size=25))
    scheduler, _, _ = _run(prompts, data.draw(st.sampled_from([1, 2, 4, 8])))
    # But for up to three tokens that a row computes rather than wait for them.
    extra = scheduler.counters.prefill_tokens - _floor(prompts)
    assert 0 <= extra <= 3 * (len(prompts) - 1)


def test_samples_of_one_prompt_fork_after_one_prefill() -> None:
    scheduler, finished, executor = _run([[7] * 14] * 4, 8, max_tokens=6)
    # The prompt once, then its last token for each of the other three.
    assert scheduler.counters.prefill_tokens == 14 + 3
    assert sum(len(plan.copies) for plan in executor.plans) == 3
    assert [request.account.cached_tokens for request in finished] == [0, 13, 13, 13]


def test_a08_a_fork_lives_on_when_its_source_is_evicted() -> None:
    scheduler = make_scheduler(5, 8)
    engine, executor = make_engine_over_fake(scheduler)
    short, long = make_requests(
        [[1] * 6, [1] * 6], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=9)]
    )
    scheduler.add(short)
    scheduler.add(long)
    while short.finish_reason is None or not long.block_table:
        engine.step()
    source = executor.plans[-1].copies[0, 0]
    scheduler.blocks.end_step()
    taken = scheduler.blocks.pool.allocate(scheduler.blocks.pool.num_available)
    assert source in taken
    executor.forget(taken)
    scheduler.blocks.pool.release(taken)
    while long.finish_reason is None:
        engine.step()
    assert long.output_token_ids == generate([1] * 6, 9)


def test_a_follower_waits_one_step_and_others_take_its_place() -> None:
    leader, follower, stranger = [1] * 6, [1] * 7, [9] * 6
    scheduler = make_scheduler(100, 8)
    engine, executor = make_engine_over_fake(scheduler)
    for request in make_requests([leader, follower, stranger], SamplingParams(max_tokens=4)):
        scheduler.add(request)
    engine.step()
    assert executor.plans[0].num_rows == 2
    engine.step()
    assert executor.plans[1].num_rows == 3
    assert executor.plans[1].copies.shape == (1, 2)


def test_a_follower_that_would_gain_little_starts_at_once() -> None:
    leader, follower = [1] * 3 + [2] * 9, [1] * 3 + [3] * 9
    scheduler = make_scheduler(100, 16)
    engine, executor = make_engine_over_fake(scheduler)
    for request in make_requests([leader, follower], SamplingParams(max_tokens=4)):
        scheduler.add(request)
    engine.step()
    assert executor.plans[0].num_rows == 2
    assert scheduler.counters.prefill_tokens == 24


def test_without_room_to_hold_the_source_the_row_computes_its_part() -> None:
    # The row needs all three blocks: none is left to keep the tail it would copy from.
    scheduler = make_scheduler(3, 4)
    engine, _ = make_engine_over_fake(scheduler)
    run_all(engine, make_requests([[1] * 6], SamplingParams(max_tokens=1)))
    wide = Request.create(5, [1] * 5 + [2] * 6, SamplingParams(max_tokens=1), max_model_len=99)
    run_all(engine, [wide])
    assert wide.output_token_ids == generate([1] * 5 + [2] * 6, 1)
    assert wide.account.cached_tokens == 4
