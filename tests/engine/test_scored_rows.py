"""Rows that want log-probabilities after their prompt and no token."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.core import EngineCore
from batchgen.engine.request import FinishReason, Request
from batchgen.errors import RowErrorType
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.fake_model import FakeExecutor, generate, next_token
from tests.support.invariants import check_invariants

WANTED = np.array([3, 700, 4])


def score(history: Any) -> list[float]:
    return [float(next_token((*history, int(token)))) for token in WANTED]


class _Scoring(FakeExecutor):
    """The fake model, whose scores are hashes of the whole prefix."""

    def _score(self, history: tuple[int, ...]) -> Any:
        return np.array(score(history))


def _requests(prompts: list[list[int]]) -> list[Request]:
    return [
        Request.create(
            number, prompt, SamplingParams(max_tokens=1), max_model_len=500, scored_tokens=WANTED
        )
        for number, prompt in enumerate(prompts)
    ]


@settings(max_examples=40, deadline=None)
@given(
    block_size=st.sampled_from([4, 16]), num_blocks=st.integers(14, 40), budget=st.integers(5, 60),
    swap_blocks=st.sampled_from([0, 30]), max_num_seqs=st.integers(1, 9),
)  # fmt: skip
def test_scores_are_those_of_the_whole_prompt_beside_rows_that_generate(
    block_size, num_blocks, budget, swap_blocks, max_num_seqs
) -> None:
    scheduler = make_scheduler(
        num_blocks, block_size, budget=budget, swap_blocks=swap_blocks, max_num_seqs=max_num_seqs
    )

    def before(plan: Any) -> None:
        check_invariants(scheduler, plan)
        if not len(plan.swap_out):
            executor.forget(scheduler.blocks.pool.free_blocks())

    executor = _Scoring(block_size, before=before)
    prompts = [[1] * (number % 4) + [2, 3, 4] * number + [5] for number in range(8)]
    scored = _requests(prompts)
    others = make_requests(prompts[:4], SamplingParams(max_tokens=20))
    for number, request in enumerate(others):
        request.request_id = 100 + number
    mixed = [each for pair in zip(others, scored[:4], strict=True) for each in pair] + scored[4:]
    run_all(EngineCore(scheduler, executor), mixed)
    for request, prompt in zip(scored, prompts, strict=True):
        assert request.scores is not None
        assert request.scores.tolist() == score(prompt)
        assert request.output_token_ids == []
        assert request.finish_reason is FinishReason.STOP
        assert request.timeline.first_token is not None
    for request, prompt in zip(others, prompts, strict=False):
        assert request.output_token_ids == generate(prompt, 20)
    assert scheduler.counters.sampled_tokens == 80


def test_nodes_behind_one_prompt_compute_it_once_and_take_at_most_one_step_more() -> None:
    scheduler = make_scheduler(64, 4)
    engine = EngineCore(scheduler, _Scoring(4))
    prompt = list(range(100, 130))
    run_all(engine, _requests([prompt, [*prompt, 7], [*prompt, 7, 8], [*prompt, 9]]))
    assert engine.stats.steps <= 2
    # The prompt once; for each other node its own tokens and less than a block before them.
    assert scheduler.counters.prefill_tokens <= 30 + (1 + 3) + (2 + 3) + (1 + 3)


def test_a_prompt_that_a_choice_makes_too_long_fails_alone() -> None:
    requests = _requests([[1, 2], [1] * 501])
    run_all(EngineCore(make_scheduler(64, 16), _Scoring(16)), requests)
    assert requests[0].error is None
    assert requests[1].error is not None
    assert requests[1].error.type is RowErrorType.PROMPT_TOO_LONG
