"""Steps planned one ahead against steps one after the other."""

from dataclasses import asdict
from random import Random
from typing import Any

import numpy as np
import pytest

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.core import EngineCore, FinishedOutput
from batchgen.engine.preemption import PreemptionPolicy
from batchgen.engine.request import FinishReason, Request
from batchgen.engine.step import NO_LEGAL_TOKEN, SampleBatch
from batchgen.engine.stopping import RequestFinisher
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.engine_model import EOS, _says, expected_output, random_prompt
from tests.support.fake_model import FakeExecutor
from tests.support.invariants import check_invariants
from tests.support.toy_constraint import ToyConstraint


def _run(
    prompts: Any,
    params: Any,
    *,
    ahead: bool,
    choose: Any = None,
    constraints: Any = (),
    **given: Any,
) -> tuple[list[Request], EngineCore, list[Any]]:
    """Run requests to their end; also give all plans, with the tokens that were run."""
    scheduler = make_scheduler(**given)

    def before(plan: Any) -> None:
        check_invariants(scheduler, plan)
        if not len(plan.swap_out):
            executor.forget(scheduler.blocks.pool.free_blocks())

    executor = FakeExecutor(scheduler.blocks.block_size, before=before, choose=choose)
    engine = EngineCore(scheduler, executor, overlap=ahead)
    requests = make_requests(prompts, params)
    for number, constraint in constraints:
        requests[number].constraint = constraint
    return run_all(engine, requests), engine, executor.plans


def _never_ends(history: Any) -> int | None:
    said = _says(history)
    return 0 if said is None or said == EOS else said


def _same_plan(one: Any, other: Any) -> bool:
    """Whether two plans compute the same, but for tokens that one has not read yet."""
    known = one.token_ids >= 0
    return (
        one.step == other.step
        and np.array_equal(one.token_ids[known], other.token_ids[known])
        and all(
            np.array_equal(getattr(one, name), getattr(other, name))
            for name in ("positions", "slots", "query_starts", "context_lens", "block_tables")
        )
        and all(
            np.array_equal(getattr(one, name), getattr(other, name))
            for name in ("swap_out", "swap_in", "copies")
        )
        and np.array_equal(one.samples.positions, other.samples.positions)
    )


def _pressed(rng: Random) -> dict[str, Any]:
    """A pool that is much too small, under any policy."""
    size = rng.randint(1, 4)
    return {
        "num_blocks": rng.randint(24, 40) // size,
        "block_size": size,
        "swap_blocks": rng.choice((0, 3, 16)),
        "max_num_seqs": rng.choice((3, 8)),
        "budget": rng.choice((1, 4, 10, 40)),
        "admission": rng.choice(list(AdmissionPolicy)),
        "preemption": rng.choice(list(PreemptionPolicy)),
        "prefix_caching": rng.random() < 0.8,
    }


def test_where_rows_end_by_length_every_plan_and_every_account_is_the_same() -> None:
    preemptions = 0
    for seed in range(150):
        rng = Random(seed)
        prompts = [random_prompt(rng) for _ in range(12)]
        params = [SamplingParams(max_tokens=rng.randint(1, 12)) for _ in prompts]
        given = _pressed(rng)
        runs = [
            _run(prompts, params, ahead=ahead, choose=_never_ends, eos=(EOS,), **given)
            for ahead in (False, True)
        ]
        (rows, engine, plans), (ahead_rows, ahead_engine, ahead_plans) = runs
        assert len(plans) == len(ahead_plans)
        assert all(_same_plan(b, a) for a, b in zip(plans, ahead_plans, strict=True))
        for row, other in zip(rows, ahead_rows, strict=True):
            assert row.output_token_ids == other.output_token_ids
            assert (row.finish_reason, row.account) == (other.finish_reason, other.account)
        counters = engine.scheduler.counters
        assert asdict(counters) == asdict(ahead_engine.scheduler.counters)
        preemptions += counters.preemptions
        assert any((plan.token_ids < 0).any() for plan in ahead_plans) or given["budget"] == 1
    assert preemptions > 50


def _compare_with_surprises() -> int:
    """Rows that end at any token, all running at once; return how many ended by surprise."""
    surprises = 0
    for seed in range(150):
        rng = Random(seed)
        prompts = [random_prompt(rng) for _ in range(10)]
        params = [SamplingParams(max_tokens=rng.randint(1, 30)) for _ in prompts]
        given = {"num_blocks": 400, "block_size": rng.randint(1, 4), "budget": 400, "eos": (EOS,)}
        rows, engine, _ = _run(prompts, params, ahead=False, choose=_says, **given)
        others, ahead_engine, _ = _run(prompts, params, ahead=True, choose=_says, **given)
        for row, other, prompt, each in zip(rows, others, prompts, params, strict=True):
            tokens, reason = expected_output(prompt, each.max_tokens)
            assert (other.output_token_ids, other.finish_reason) == (tokens, reason)
            assert (row.finish_reason, row.account) == (other.finish_reason, other.account)
            surprises += reason is not FinishReason.LENGTH
        counters = asdict(engine.scheduler.counters)
        assert counters == asdict(ahead_engine.scheduler.counters)
    return surprises


def test_a_row_that_ends_by_surprise_has_its_tokens_and_its_account() -> None:
    assert _compare_with_surprises() > 300


def _keep_the_growth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "take_back", lambda self, request, count, peak: None)


def _count_the_token_after_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestFinisher, "_take_back_growth", lambda self, request: None)


def _feed_another_rows_token(patch: pytest.MonkeyPatch) -> None:
    sound = FakeExecutor._fed
    patch.setattr(FakeExecutor, "_fed", lambda self, ids: sound(self, np.maximum(ids, -1)))


@pytest.mark.parametrize(
    "plant", [_keep_the_growth, _count_the_token_after_the_end, _feed_another_rows_token]
)
def test_a_planted_fault_shows(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        _compare_with_surprises()


class _Obedient(FakeExecutor):
    """The fake model, which takes the largest token that the row's constraint allows."""

    def _sample(self, history: Any, samples: SampleBatch, index: int) -> int | None:
        for entry in samples.special:
            if entry.index == index and entry.constraint is not None:
                assert entry.constraint.tokens == list(history[entry.num_prompt_tokens :])
                return max(entry.constraint.allowed(), default=NO_LEGAL_TOKEN)
        return super()._sample(history, samples, index)


def _digits(tokens: list[int]) -> set[int]:
    return {100 + len(tokens), 200 + sum(tokens) % 7} if len(tokens) < 6 else set()


def test_rows_whose_next_input_the_host_must_know_are_read_before_the_next_plan() -> None:
    scheduler = make_scheduler(200, 4)
    executor = _Obedient(4)
    engine = EngineCore(scheduler, executor, overlap=True)
    requests = make_requests([[1, 2, 3], [1, 2, 4], [5]], SamplingParams(max_tokens=12))
    requests[0].constraint = ToyConstraint(_digits)
    free = make_requests([[1, 2, 4], [5]], SamplingParams(max_tokens=12))
    rows = run_all(engine, requests)
    assert rows[0].output_token_ids[-1] >= 100 and len(rows[0].output_token_ids) == 6
    alone = _Obedient(4)
    expected = run_all(EngineCore(make_scheduler(200, 4), alone), free)
    assert [r.output_token_ids for r in rows[1:]] == [r.output_token_ids for r in expected]
    # While the constrained row is there every token is known; afterwards steps overlap.
    unread = [bool((plan.token_ids < 0).any()) for plan in executor.plans]
    constrained = [any(entry.constraint for entry in p.samples.special) for p in executor.plans]
    last = max(i for i, there in enumerate(constrained) if there)
    assert not any(unread[: last + 2]) and all(unread[last + 2 :])


def test_penalties_and_scores_need_the_host_and_min_tokens_do_not() -> None:
    def plan_for(**params: Any) -> Any:
        scheduler = make_scheduler(20, 4)
        (request,) = make_requests([[1, 2]], SamplingParams(max_tokens=9, **params))
        scheduler.add(request)
        return scheduler.schedule()

    assert plan_for(frequency_penalty=0.5).samples.needs_host
    assert plan_for(repetition_penalty=1.5).samples.needs_host
    assert not plan_for(min_tokens=3, temperature=0.5, top_k=3).samples.needs_host


def test_tokens_are_read_while_the_next_step_is_under_way() -> None:
    """The order of launching and reading, as the device sees it."""
    log: list[tuple[str, int]] = []

    class Logging(FakeExecutor):
        def execute(self, plan: Any) -> Any:
            log.append(("launch", plan.step))

            class Logged(FinishedOutput):
                def result(self) -> Any:
                    log.append(("read", plan.step))
                    return self.output

            return Logged(super().execute(plan).output)

    executor = Logging(4)
    engine = EngineCore(make_scheduler(50, 4), executor, overlap=True)
    run_all(engine, make_requests([[1, 2], [3]], SamplingParams(max_tokens=5)))
    expected = [("launch", 0)]
    for step in range(4):
        expected += [("launch", step + 1), ("read", step)]
    assert log == [*expected, ("read", 4)]
