"""The scheduler over a model whose every KV slot can be checked."""

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.core import EngineCore
from batchgen.engine.preemption import PreemptionPolicy
from batchgen.engine.request import FinishReason, Request
from batchgen.engine.scheduler import Scheduler
from batchgen.errors import RowErrorType
from batchgen.sampling import SamplingParams
from tests.support.drive import make_engine_over_fake, make_requests, make_scheduler, run_all
from tests.support.fake_model import FakeExecutor, generate


def _run(
    engine: EngineCore | Scheduler, prompts: Sequence[Sequence[int]], max_tokens: int = 5
) -> tuple[list[Request], FakeExecutor]:
    if isinstance(engine, Scheduler):
        engine, _ = make_engine_over_fake(engine)
    executor = engine._executor
    executor.plans.clear()
    requests = make_requests(prompts, SamplingParams(max_tokens=max_tokens))
    return run_all(engine, requests), executor


def _assert_outputs(requests: Sequence[Request], max_tokens: int) -> None:
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        assert request.output_token_ids == generate(prompt, max_tokens)
        assert request.finish_reason is FinishReason.LENGTH


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_outputs_never_depend_on_pool_budget_sharing_or_preemption(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5), "block size")
    tokens = st.integers(0, 2)  # few tokens, so that prefixes are shared often
    prompts = data.draw(st.lists(st.lists(tokens, min_size=1, max_size=14), max_size=12))
    max_tokens = data.draw(st.integers(1, 9), "max_tokens")
    needed = max([-(-(len(p) + max_tokens) // size) for p in prompts] or [1])
    scheduler = make_scheduler(
        data.draw(st.integers(needed, needed + 12), "blocks"),
        size,
        swap_blocks=data.draw(st.integers(0, 8), "swap"),
        prefix_caching=data.draw(st.booleans(), "caching"),
        max_num_seqs=data.draw(st.integers(1, 8), "seqs"),
        budget=data.draw(st.integers(1, 20), "budget"),
        admission=data.draw(st.sampled_from(AdmissionPolicy)),
        preemption=data.draw(st.sampled_from(PreemptionPolicy)),
    )
    requests, _ = _run(scheduler, prompts, max_tokens)
    _assert_outputs(requests, max_tokens)
    computed = scheduler.counters.prefill_tokens
    assert (
        computed
        == sum(len(r.token_ids[: r.num_prompt_tokens]) for r in requests)
        - sum(r.account.cached_tokens for r in requests)
        or scheduler.counters.preemptions
    )
    if scheduler._admission is AdmissionPolicy.WORST_CASE:
        assert scheduler.counters.preemptions == 0


def test_a02_a_reused_block_is_not_found_under_its_old_prefix() -> None:
    scheduler = make_scheduler(3, 4)
    engine, _ = make_engine_over_fake(scheduler)
    x, y, tail = [1, 1, 1, 1], [2, 2, 2, 2], [7, 7, 7, 7]
    for prompt in ([*x, *tail, 5], [*y, *tail, 5], [*x, *tail, 5]):
        requests, _ = _run(engine, [prompt], 1)
        _assert_outputs(requests, 1)
        assert requests[0].account.cached_tokens == 0


def test_a06_rows_that_share_a_prefix_hit_it_in_the_step_that_writes_it() -> None:
    shared = list(range(8))
    scheduler = make_scheduler(5, 4)
    requests, executor = _run(scheduler, [[*shared, 10 + i] for i in range(3)], 1)
    _assert_outputs(requests, 1)
    assert [r.account.cached_tokens for r in requests] == [0, 8, 8]
    assert executor.plans[0].num_rows == 3
    assert scheduler.blocks.pool.num_owned == 0
    assert scheduler.blocks.pool.num_free + scheduler.blocks.pool.num_cached == 5


def test_a09_a_failed_admission_changes_no_reference() -> None:
    scheduler = make_scheduler(5, 4, max_num_seqs=4)
    engine, _ = make_engine_over_fake(scheduler)
    prefix = [3] * 8
    run_all(engine, make_requests([[*prefix, 1]], SamplingParams(max_tokens=1)))
    holder = Request.create(10, [5] * 6, SamplingParams(max_tokens=6), max_model_len=99)
    waiter = Request.create(11, [*prefix, *[4] * 8], SamplingParams(max_tokens=1), max_model_len=99)
    scheduler.add(holder)
    engine.step()
    scheduler.add(waiter)
    for _ in range(3):
        engine.step()
        assert waiter in scheduler.waiting
        # Only the holder's table counts; the invariants compare them block by block.
        assert sum(scheduler.blocks.pool.ref_counts) == len(holder.block_table)
    while scheduler.num_unfinished:
        engine.step()
    assert waiter.output_token_ids == generate([*prefix, *[4] * 8], 1)
    assert scheduler.blocks.pool.num_available == 5


def test_a10_a_matched_block_cannot_be_taken_before_it_is_pinned() -> None:
    engine, _ = make_engine_over_fake(make_scheduler(4, 4))
    _run(engine, [[1] * 5], 1)
    # The only room for the first row is the block that the second one would hit.
    requests, _ = _run(engine, [[2] * 13, [1] * 5], 2)
    _assert_outputs(requests, 2)


def test_a11_a_hit_row_writes_behind_its_prefix_only() -> None:
    engine, _ = make_engine_over_fake(make_scheduler(8, 4))
    shared = list(range(8))
    _run(engine, [[*shared, 9]], 1)
    requests, executor = _run(engine, [[50, 51, 52], [*shared, 20, 21, 22]], 1)
    plan = executor.plans[0]
    hit = requests[1]
    assert hit.account.cached_tokens == 8
    row = list(plan.context_lens).index(11)
    start, end = plan.query_starts[row], plan.query_starts[row + 1]
    assert plan.positions[start:end].tolist() == [8, 9, 10]
    third = plan.block_tables[row][2] * 4
    assert plan.slots[start:end].tolist() == [third, third + 1, third + 2]


@pytest.mark.parametrize("preemption", PreemptionPolicy)
def test_b02_a_row_that_fills_the_pool_alone_ends_with_length(preemption) -> None:
    scheduler = make_scheduler(3, 4, swap_blocks=3, preemption=preemption)
    requests, _ = _run(scheduler, [[1] * 8, [2] * 3], 9)
    assert requests[0].finish_reason is FinishReason.LENGTH
    assert requests[0].output_token_ids == generate([1] * 8, 5)
    assert requests[1].output_token_ids == generate([2] * 3, 9)


@pytest.mark.parametrize("preemption", PreemptionPolicy)
def test_b04_preemptions_stay_a_small_multiple_of_the_rows(preemption) -> None:
    scheduler = make_scheduler(25, 4, swap_blocks=15, preemption=preemption, max_num_seqs=64)
    prompts = [[i, i, i, i] for i in range(40) for _ in range(2)]
    requests, _ = _run(scheduler, prompts, 16)
    _assert_outputs(requests, 16)
    assert scheduler.counters.preemptions > 0
    assert scheduler.counters.preemptions <= 2 * len(prompts)


def test_b05_a_recomputed_row_prefills_its_prompt_and_what_it_generated() -> None:
    scheduler = make_scheduler(6, 4, prefix_caching=False, preemption=PreemptionPolicy.RECOMPUTE)
    requests, executor = _run(scheduler, [[1] * 6, [2] * 6], 8)
    _assert_outputs(requests, 8)
    victim = requests[1]
    assert victim.account.num_preemptions == 1
    # The prompt and the tokens so far in one row.
    again = [plan for plan in executor.plans if plan.num_rows == 1 and plan.num_tokens > 6]
    assert len(again) == 1
    assert victim.account.recomputed_tokens == again[0].num_tokens - 1


def test_b06_a_preempted_row_hits_its_own_cached_blocks() -> None:
    scheduler = make_scheduler(6, 4, preemption=PreemptionPolicy.RECOMPUTE)
    row = Request.create(0, [1] * 9, SamplingParams(max_tokens=3), max_model_len=99)
    engine, executor = make_engine_over_fake(scheduler)
    scheduler.add(row)
    engine.step()
    scheduler._preempt(_NoStep(), row)
    engine.step()
    # Two whole blocks are hit, the ninth token is copied: the generated one is left.
    assert executor.plans[-1].num_tokens == 1
    assert row.account.recomputed_tokens == 0


class _NoStep:
    preempted = False
    swap_out: list[tuple[int, int]] = []  # noqa: RUF012


def test_b08_every_running_row_progresses_when_one_is_forced_out() -> None:
    scheduler = make_scheduler(7, 4, prefix_caching=False, preemption=PreemptionPolicy.RECOMPUTE)
    engine, _ = make_engine_over_fake(scheduler)
    requests = make_requests([[1] * 5, [2] * 5, [3] * 5], SamplingParams(max_tokens=12))
    for request in requests:
        scheduler.add(request)
    for _ in range(20):
        before = [r.num_output_tokens for r in scheduler.running]
        rows = list(scheduler.running)
        engine.step()
        list(scheduler.running)  # brings them up to date
        for row, tokens in zip(rows, before, strict=True):
            assert row.num_output_tokens > tokens or row.account.num_preemptions
    for _ in engine.run([]):
        pass
    _assert_outputs(requests, 12)


def test_b09_a_swapped_row_comes_back_in_other_blocks_with_the_same_kv() -> None:
    scheduler = make_scheduler(6, 4, swap_blocks=6)
    requests, executor = _run(scheduler, [[1] * 7, [2] * 7], 12)
    _assert_outputs(requests, 12)
    assert scheduler.counters.swapped_out_blocks > 0
    assert scheduler.counters.swapped_in_blocks > 0
    assert any(len(plan.swap_in) for plan in executor.plans)


@pytest.mark.parametrize("swap_blocks", [0, 1])
def test_no_swap_space_or_a_full_one_means_recompute(swap_blocks: int) -> None:
    scheduler = make_scheduler(6, 4, swap_blocks=swap_blocks, prefix_caching=False)
    requests, _ = _run(scheduler, [[1] * 7, [2] * 7], 12)
    _assert_outputs(requests, 12)
    assert scheduler.counters.preemptions > 0
    assert scheduler.counters.swapped_out_blocks == 0
    assert scheduler.counters.recomputed_tokens > 0


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_c05_a_block_is_taken_when_the_first_token_behind_the_border_is_stored(length) -> None:
    # The last sampled token is never stored: 4 of the 5 outputs are.
    exact = -(-(length + 4) // 4)
    scheduler = make_scheduler(exact, 4)
    requests, executor = _run(scheduler, [[9] * length], 5)
    _assert_outputs(requests, 5)
    for step, plan in enumerate(executor.plans):
        stored = length + step
        assert (plan.block_tables[0] >= 0).sum() == -(-stored // 4)
    assert requests[0].account.peak_blocks == exact


def test_a_prompt_that_can_never_fit_fails_at_once_and_others_go_on() -> None:
    scheduler = make_scheduler(2, 4)
    requests, _ = _run(scheduler, [[1] * 8, [2] * 3, [1] * 16, [1] * 9], 2)
    assert requests[0].error.type is RowErrorType.EXCEEDS_KV_CAPACITY
    assert "3 blocks" in requests[0].error.message
    assert requests[1].output_token_ids == generate([2] * 3, 2)
    assert scheduler.counters.most_refused_blocks == 5


def test_worst_case_admission_never_preempts_and_prompt_admission_runs_more_rows() -> None:
    peaks = {}
    for policy in AdmissionPolicy:
        scheduler = make_scheduler(16, 4, admission=policy)
        requests, executor = _run(scheduler, [[i] * 4 for i in range(8)], 12)
        _assert_outputs(requests, 12)
        peaks[policy] = max(plan.num_rows for plan in executor.plans)
        if policy is AdmissionPolicy.WORST_CASE:
            assert scheduler.counters.preemptions == 0
    assert peaks[AdmissionPolicy.WORST_CASE] == 4
    assert peaks[AdmissionPolicy.PROMPT] > 4


def test_rows_are_pulled_from_the_source_only_as_they_are_needed() -> None:
    scheduler = make_scheduler(8, 4, max_num_seqs=2)
    executor = FakeExecutor(4)
    engine = EngineCore(scheduler, executor, lookahead=3)
    pulled: deque[int] = deque()

    def source():
        for request in make_requests([[i] for i in range(50)], SamplingParams(max_tokens=2)):
            pulled.append(request.request_id)
            yield request

    finished = 0
    for batch in engine.run(source()):
        finished += len(batch)
        assert len(pulled) - finished <= 3 + 2
    assert finished == 50


def test_logits_that_are_not_numbers_fail_their_row_only() -> None:
    scheduler = make_scheduler(16, 4)
    engine, _ = make_engine_over_fake(
        scheduler, choose=lambda tokens: None if tokens[0] == 2 else 7
    )
    requests = run_all(engine, make_requests([[1], [2], [3]], SamplingParams(max_tokens=3)))
    assert [r.output_token_ids for r in requests] == [[7] * 3, [], [7] * 3]
    assert requests[1].error.type is RowErrorType.ENGINE_ERROR


def test_c11_a_second_run_returns_its_own_rows() -> None:
    engine, _ = make_engine_over_fake(make_scheduler(32, 4))
    for first in (0, 3):
        prompts = [[first + i] * 3 for i in range(3)]
        requests, _ = _run(engine, prompts, 4)
        _assert_outputs(requests, 4)
