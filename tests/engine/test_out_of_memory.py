"""Steps that find no memory on the device are finished in pieces, and rows never notice."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.core import EngineCore
from batchgen.engine.micro_batches import join_outputs, split_plan
from batchgen.engine.step import LoggedTokens, LogprobRows, StepOutput, StepPlan
from batchgen.errors import EngineError
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.engine_model import random_prompt
from tests.support.fake_model import FakeExecutor, generate
from tests.support.sample_batch import OneSample, sample_batch

_NONE = np.zeros((0, 2), dtype=np.int64)


@st.composite
def _plans(draw: st.DrawFn) -> StepPlan:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    before = [draw(st.integers(0, 9)) for _ in lengths]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.concatenate([np.arange(b, b + n) for b, n in zip(before, lengths, strict=True)])
    rows = sorted(draw(st.sets(st.integers(0, len(lengths) - 1))))
    entries = [
        OneSample(SamplingParams(min_tokens=row % 2), key=row, banned=(row,) * (row % 2))
        for row in rows
    ]
    samples = sample_batch(entries)
    samples.rows[:] = rows
    total = int(starts[-1])
    return StepPlan(
        step=4,
        token_ids=np.arange(total) * 3,
        positions=positions,
        slots=np.arange(total) * 5,
        query_starts=starts,
        context_lens=np.array(before) + lengths,
        block_tables=np.arange(len(lengths) * 2, dtype=np.int32).reshape(-1, 2),
        samples=samples,
        swap_out=np.ones((2, 2), dtype=np.int64),
        swap_in=_NONE,
        copies=np.ones((1, 2), dtype=np.int64),
    )


def _tokens_of(plan: StepPlan) -> list[tuple[int, ...]]:
    """Every token of a plan: id, position, slot, and its row's table; the row may be cut."""
    row_of = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_starts))
    columns = (plan.token_ids, plan.positions, plan.slots)
    return [
        (*(int(column[t]) for column in columns), *plan.block_tables[row_of[t]].tolist())
        for t in range(plan.num_tokens)
    ]


def _samples_of(plan: StepPlan) -> list[tuple[Any, ...]]:
    """Every sample: its noise key, the slot of the token that it follows, what is special."""
    special = {entry.index: entry.banned for entry in plan.samples.special}
    last = plan.query_starts[1:][plan.samples.rows] - 1
    return [
        (int(plan.samples.noise_keys[i]), int(plan.slots[last[i]]), special.get(i))
        for i in range(len(plan.samples))
    ]


@settings(deadline=None)
@given(plan=_plans(), size=st.integers(1, 60))
def test_pieces_have_every_token_and_sample_of_the_plan_once_and_in_order(
    plan: StepPlan, size: int
) -> None:
    pieces = split_plan(plan, size)
    assert [t for piece in pieces for t in _tokens_of(piece)] == _tokens_of(plan)
    assert [s for piece in pieces for s in _samples_of(piece)] == _samples_of(plan)
    for piece in pieces:
        assert 0 < piece.num_tokens <= size
        assert not len(piece.copies) + len(piece.swap_out) + len(piece.swap_in)
        assert piece.num_rows == len(piece.block_tables) == len(piece.query_starts) - 1
        # A row's context ends with its last token in the piece.
        ends = piece.query_starts[1:] - 1
        assert piece.context_lens.tolist() == (piece.positions[ends] + 1).tolist()


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_are_the_same_whenever_memory_runs_out(
    ahead: bool,
) -> None:
    short = 0
    for seed in range(40):
        rng = Random(seed)
        scheduler = make_scheduler(rng.randint(8, 30), 4, budget=24, swap_blocks=8)
        limit = rng.randint(2, 24)
        executor = FakeExecutor(4, is_short=lambda plan, limit=limit: plan.num_tokens > limit)
        engine = EngineCore(scheduler, executor, overlap=ahead)
        prompts = [random_prompt(rng) for _ in range(8)]
        rows = run_all(engine, make_requests(prompts, SamplingParams(max_tokens=9)))
        for row, prompt in zip(rows, prompts, strict=True):
            assert row.output_token_ids == generate(prompt, 9)
        short += engine.stats.out_of_memory
        # Halves of halves of one step; no later one is too large.
        assert engine.stats.out_of_memory <= 31
        assert scheduler.step_tokens <= max(limit, 1) or not engine.stats.out_of_memory
    assert short > 40


@pytest.mark.parametrize("ahead", [False, True])
def test_a_device_that_holds_no_token_ends_the_engine(ahead: bool) -> None:
    executor = FakeExecutor(4, is_short=lambda plan: True)
    engine = EngineCore(make_scheduler(20, 4), executor, overlap=ahead)
    with pytest.raises(EngineError, match=r"no memory for \d+ passes in a row, the last of 1 tok"):
        run_all(engine, make_requests([[1, 2, 3]], SamplingParams(max_tokens=3)))


def test_steps_may_grow_again_after_many_without_trouble() -> None:
    scheduler = make_scheduler(20, 4, budget=64)
    trouble = iter([True])
    executor = FakeExecutor(4, is_short=lambda plan: next(trouble, False))
    engine = EngineCore(scheduler, executor)
    requests = make_requests([[1, 2, 3, 4]] * 250, SamplingParams(max_tokens=20))
    for request in requests:
        scheduler.add(request)
    engine.step()
    assert scheduler.step_tokens < 64
    while engine.step():
        scheduler.take_finished()
    assert scheduler.step_tokens == 64


@pytest.mark.parametrize("size", range(1, 9))
def test_every_logged_token_finds_its_logits_in_one_of_the_pieces(size: int) -> None:
    # A row of two tokens that logs nothing, then one of six: five known ones, and the sampled.
    known = np.array([11, 12, 13, 14, 15])
    samples = sample_batch(
        [OneSample(SamplingParams()), OneSample(SamplingParams())],
        given=np.arange(2, 7),
        logged=(LoggedTokens(0, 0, known, 1, num_best=0),),
    )
    plan = StepPlan(
        step=0,
        token_ids=np.arange(8),
        positions=np.array([0, 1, 0, 1, 2, 3, 4, 5]),
        slots=np.arange(8),
        query_starts=np.array([0, 2, 8]),
        context_lens=np.array([2, 6]),
        block_tables=np.zeros((2, 1), dtype=np.int32),
        samples=samples,
        swap_out=_NONE,
        swap_in=_NONE,
        copies=_NONE,
    )
    parts = split_plan(plan, size)
    outputs = []
    for number, part in enumerate(parts):
        logprobs = []
        for entry in part.samples.logged:
            places = part.samples.given[entry.first :][: len(entry.token_ids)] + number * size
            # The token that follows there is the one that the entry is of.
            assert entry.token_ids.tolist() == known[places - 2].tolist()
            ranks = places.tolist()
            if entry.sample >= 0:
                assert part.samples.rows[entry.sample] == part.num_rows - 1
                ranks.append(99)
            assert len(ranks) == entry.num_entries
            logprobs.append(_ranked(ranks))
        outputs.append(StepOutput(10 * number + part.samples.rows, logprobs=tuple(logprobs)))
    output = join_outputs(plan, parts, outputs)
    assert output.logprobs[0].ranks.tolist() == [2, 3, 4, 5, 6, 99]
    assert output.token_ids.tolist() == np.concatenate([o.token_ids for o in outputs]).tolist()


def _ranked(ranks: list[int]) -> LogprobRows:
    shape = (len(ranks), 1)
    return LogprobRows(
        np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.array(ranks, np.int32)
    )
