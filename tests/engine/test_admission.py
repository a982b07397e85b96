"""How many rows run at once, by arithmetic; what is kept free for them; swap or recompute."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.admission import Admission, AdmissionPolicy, OutputLengths
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.preemption import PreemptionCosts, PreemptionPolicy
from batchgen.engine.request import Request
from batchgen.engine.step import StepOutput
from batchgen.sampling import SamplingParams
from tests.support.drive import make_engine_over_fake, make_requests, make_scheduler, run_all
from tests.support.fake_model import generate


def _most_rows_at_once(prompts: list[list[int]], num_blocks: int) -> int:
    """Run the scheduler alone, without a model, and count."""
    scheduler = make_scheduler(
        num_blocks, 16, max_num_seqs=1000, budget=1_000_000, admission=AdmissionPolicy.WORST_CASE
    )
    for request in make_requests(prompts, SamplingParams(max_tokens=2, ignore_eos=True)):
        scheduler.add(request)
    most = 0
    while (plan := scheduler.schedule()) is not None:
        most = max(most, len(scheduler.running))
        scheduler.advance()
        scheduler.update(StepOutput(np.array([1] * len(plan.samples))))
    return most


def test_16_rows_of_4096_tokens_fit_4096_blocks_and_76_with_80_percent_shared() -> None:
    # 4,095 tokens of prompt and one stored output token each.
    def rows(shared: int) -> list[list[int]]:
        return [[*range(shared), *[10_000 + i] * (4_095 - shared)] for i in range(100)]

    assert _most_rows_at_once(rows(0), 4_096) == 16
    # 205 of 256 blocks are held once: (4096 - 205) / 51.
    assert _most_rows_at_once(rows(3_280), 4_096) == 76


def _request(prompt: int, max_tokens: int, **params: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request.create(0, [1] * prompt, sampling, max_model_len=10_000)


def test_auto_is_the_worst_case_where_that_is_near_or_certain() -> None:
    auto = Admission(AdmissionPolicy.AUTO, BlockManager(1000, 4))
    worst = Admission(AdmissionPolicy.WORST_CASE, BlockManager(1000, 4))
    auto.lengths.add(1)
    for near in (_request(400, 100), _request(4, 100, ignore_eos=True)):
        held = -(-near.num_prompt_tokens // 4)
        assert auto.growth(near, held) == worst.growth(near, held) == 25
    far = _request(4, 100)
    assert auto.growth(far, 1) == 1
    assert worst.growth(far, 1) == 25


def test_a_row_that_has_all_its_blocks_keeps_nothing_free() -> None:
    for policy in AdmissionPolicy:
        assert Admission(policy, BlockManager(1000, 4)).growth(_request(4, 1), 1) == 0


@given(
    finished=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    so_far=st.integers(0, 60),
    most=st.integers(61, 90),
)
def test_the_expected_length_is_the_mean_of_those_that_went_on(finished, so_far, most) -> None:
    lengths = OutputLengths()
    for length in finished:
        lengths.add(length)
    longer = [length for length in finished if length > so_far]
    expected = int(np.ceil(np.mean(longer))) if longer else so_far + 1
    assert lengths.expect(so_far, most) == expected
    assert lengths.expect(0, 1) == 1


def test_expected_admission_runs_more_rows_than_the_worst_case_with_few_preemptions() -> None:
    peaks, preemptions = {}, {}
    for policy in (AdmissionPolicy.WORST_CASE, AdmissionPolicy.EXPECTED):
        scheduler = make_scheduler(64, 4, eos=(0,), admission=policy, swap_blocks=64)
        # Rows may run to 40 tokens, but end after about eight.
        engine, executor = make_engine_over_fake(scheduler, vocab=8)
        prompts = [[i + 10] * 4 for i in range(60)]
        finished = run_all(engine, make_requests(prompts, SamplingParams(max_tokens=40)))
        for request in finished:
            whole = generate(request.token_ids[:4].tolist(), 40, vocab=8)
            stop = whole.index(0) + 1 if 0 in whole else 40
            assert request.output_token_ids == whole[:stop]
        peaks[policy] = max(plan.num_rows for plan in executor.plans)
        preemptions[policy] = scheduler.counters.preemptions
    assert peaks[AdmissionPolicy.EXPECTED] >= 2 * peaks[AdmissionPolicy.WORST_CASE]
    assert preemptions[AdmissionPolicy.WORST_CASE] == 0
    assert preemptions[AdmissionPolicy.EXPECTED] <= 30


def test_a_row_of_low_priority_makes_room_first() -> None:
    scheduler = make_scheduler(
        9, 4, prefix_caching=False, admission=AdmissionPolicy.PROMPT, swap_blocks=9
    )
    engine, _ = make_engine_over_fake(scheduler)
    requests = make_requests([[1] * 6, [2] * 6, [3] * 6], SamplingParams(max_tokens=9))
    requests[0].priority = 5
    run_all(engine, requests)
    assert [request.account.num_preemptions > 0 for request in requests] == [True, False, False]
    for request in requests:
        assert request.output_token_ids == generate(request.token_ids[:6].tolist(), 9)


@pytest.mark.parametrize("swap_s, swaps", [(1.0, False), (1e-9, True)])
def test_auto_preemption_takes_the_cheaper_way(swap_s: float, swaps: bool) -> None:
    costs = PreemptionCosts(swap_s_per_block=swap_s, compute_s_per_token=1e-3)
    scheduler = make_scheduler(
        6, 4, swap_blocks=9, preemption=PreemptionPolicy.AUTO, admission=AdmissionPolicy.PROMPT,
        costs=costs,
    )  # fmt: skip
    engine, _ = make_engine_over_fake(scheduler)
    run_all(engine, make_requests([[1] * 7, [2] * 7], SamplingParams(max_tokens=12)))
    assert scheduler.counters.preemptions > 0
    assert (scheduler.counters.swapped_out_blocks > 0) == swaps


def test_costs_follow_the_measured_steps() -> None:
    costs = PreemptionCosts(swap_s_per_block=0.01)
    assert costs.swap_is_cheaper(100, 1)
    costs.observe_step(100, 1.0)
    assert costs.compute_s_per_token == pytest.approx(0.01)
    assert costs.swap_is_cheaper(2, 4)
    assert not costs.swap_is_cheaper(2, 3)
