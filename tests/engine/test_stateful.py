"""Pool, index, scheduler and swap at random over tiny pools, against brute force.

What must hold after each step is in :mod:`tests.support.engine_model`. Here hypothesis drives it,
and faults are planted to show that it would see them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from batchgen.engine import scheduler as scheduler_module
from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.preemption import PreemptionPolicy, Swapper, SwapSpace
from batchgen.engine.prefix_index import PrefixIndex
from batchgen.engine.request import Request
from batchgen.errors import EngineError, RowError, RowErrorType
from batchgen.sampling import SamplingParams
from tests.support.drive import make_engine_over_fake, make_requests, make_scheduler, run_all
from tests.support.engine_model import STEMS, TOKENS, EngineModel, Setup, drive, fitting_window
from tests.support.invariants import check_invariants

_STEPS = 20_000
# What 12,000 steps of the seeded driver must meet, or they prove less than they say.
_MUST_SEE = {
    "preemptions": 100,
    "swap-outs": 100,
    "swap-ins": 50,
    "rows that a window has left": 100,
    "recomputed tokens": 200,
    "copies": 300,
    "cached tokens": 2_000,
    "evictions, future known": 500,
    "evictions, future unknown": 500,
    "aborts waiting": 100,
    "aborts running": 100,
    "aborts swapped": 1,
    "pool filled alone": 50,
    "ended length": 500,
    "ended stop": 200,
    "ended error": 50,
    "rows that run a placeholder": 1_000,
    "passes out of memory": 10,
}

_PROMPTS = st.builds(
    lambda stem, length, tail: stem[:length] + tail,
    st.sampled_from(STEMS),
    st.integers(0, 10),
    st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=4),
)


@st.composite
def _setups(draw: st.DrawFn) -> Setup:
    block_size = draw(st.integers(1, 4))
    num_blocks = draw(st.integers(12, 60)) // block_size
    budget = draw(st.sampled_from((1, 4, 10, 40)))
    window = draw(st.sampled_from((None, None, 2, 5, 9)))
    planned = st.lists(_PROMPTS.map(tuple), min_size=4, max_size=20).map(tuple)
    return Setup(
        block_size=block_size,
        num_blocks=num_blocks,
        swap_blocks=draw(st.sampled_from((0, 3, 8, 16))),
        max_num_seqs=draw(st.sampled_from((1, 3, 8))),
        budget=budget,
        admission=draw(st.sampled_from(AdmissionPolicy)),
        over_admits=draw(st.booleans()),
        ahead=draw(st.booleans()),
        short_of_memory=draw(st.sampled_from((0.0, 0.1))),
        preemption=draw(st.sampled_from(PreemptionPolicy)),
        swap_s_per_block=draw(st.sampled_from((0.0, 0.3, 9.0))),
        prefix_caching=draw(st.sampled_from((True, True, True, False))),
        window=fitting_window(window, budget, block_size, num_blocks),
        planned=draw(st.none() | planned),
    )


class EngineMachine(RuleBasedStateMachine):
    """Submits, forks, steps and aborts in the order that hypothesis likes least."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(setup=_setups())
    def start(self, setup: Setup) -> None:
        self.model = EngineModel(setup)

    @precondition(lambda self: len(self.model.live) < 14)
    @rule(
        prompt=_PROMPTS,
        lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
        priority=st.integers(0, 2),
    )
    def submit(self, prompt: list[int], lengths: list[int], priority: int) -> None:
        """One request, or several forks of one prompt."""
        for max_tokens in lengths:
            self.model.submit(prompt, max_tokens, priority)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.model.step()

    @precondition(lambda self: self.model.live)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        self.model.abort(which)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.drain()
            self.seen.update(self.model.seen)


def test_twenty_thousand_steps_of_everything_break_no_invariant() -> None:
    seen = EngineMachine.seen
    seen.clear()
    # How many steps an example drives is left to chance.
    rounds = 0
    while seen["steps"] < _STEPS:
        rounds += 1
        assert rounds <= 40, f"only {seen['steps']} steps were driven"
        run_state_machine_as_test(
            EngineMachine,
            settings=settings(
                max_examples=40,
                stateful_step_count=50,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(f"driven in {rounds} rounds: {dict(seen.most_common())}")


def test_twelve_thousand_seeded_steps_meet_everything_often() -> None:
    seen = drive(Random(0), 12_000)
    print(f"driven: {dict(seen.most_common())}")
    missed = {kind: seen[kind] for kind, least in _MUST_SEE.items() if seen[kind] < least}
    assert not missed, f"too few of these in {seen['steps']} steps: {missed}"


# -- planted faults -----------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def _drop_a_decrement(patch: pytest.MonkeyPatch) -> None:
    sound, calls = BlockPool.release, Counter[str]()

    def release(self: BlockPool, blocks: list[int]) -> None:
        calls["release"] += 1
        sound(self, blocks[1:] if calls["release"] % 20 == 0 else blocks)

    patch.setattr(BlockPool, "release", release)


def _release_twice(patch: pytest.MonkeyPatch) -> None:
    sound = BlockManager.release

    def release(self: BlockManager, request: Any) -> None:
        table = list(request.block_table)
        sound(self, request)
        self.pool.release(table[-1:])

    patch.setattr(BlockManager, "release", release)


def _reuse_a_block_under_its_old_key(patch: pytest.MonkeyPatch) -> None:
    def evict(self: BlockPool, block: int) -> None:
        self._cached.remove(block)
        self._free.append(block)

    patch.setattr(BlockPool, "_evict", evict)


def _count_hits_that_are_not_pinned(patch: pytest.MonkeyPatch) -> None:
    sound = BlockManager.plan_allocation
    patch.setattr(
        BlockManager,
        "plan_allocation",
        lambda self, request: replace(sound(self, request), pinned_blocks=0),
    )


def _allocate_before_the_hits_are_pinned(patch: pytest.MonkeyPatch) -> None:
    sound_pin, sound_allocate = BlockPool.pin, BlockPool.allocate
    late: list[int] = []

    def pin(self: BlockPool, blocks: list[int]) -> None:
        late.extend(blocks)

    def allocate(self: BlockPool, num_blocks: int) -> list[int] | None:
        allocated = sound_allocate(self, num_blocks)
        for block in late:
            if self.is_cached(block) or self.ref_counts[block]:
                sound_pin(self, [block])
        late.clear()
        return allocated

    patch.setattr(BlockPool, "pin", pin)
    patch.setattr(BlockPool, "allocate", allocate)


def _steal_a_hit_between_claim_and_take(patch: pytest.MonkeyPatch) -> None:
    sound = BlockManager.take

    def take(self: BlockManager, request: Any, allocation: Any) -> Any:
        stolen = self.pool.allocate(self.pool.num_available - allocation.new_blocks)
        self.pool.release(stolen or [])
        return sound(self, request, allocation)

    patch.setattr(BlockManager, "take", take)


def _store_one_slot_too_far(patch: pytest.MonkeyPatch) -> None:
    sound = scheduler_module.build_plan

    def build(*args: Any, **given: Any) -> Any:
        plan = sound(*args, **given)
        plan.slots[-1] += 1
        return plan

    patch.setattr(scheduler_module, "build_plan", build)


def _copy_from_a_block_that_is_not_held(patch: pytest.MonkeyPatch) -> None:
    def source_of(self: BlockManager, allocation: Any) -> int | None:
        return allocation.match.partial.block if allocation.match.partial else None

    patch.setattr(BlockManager, "_pin_copy_source", source_of)


def _copy_what_this_step_writes(patch: pytest.MonkeyPatch) -> None:
    sound = PrefixIndex.match

    def match(self: PrefixIndex, *given: Any, step: int) -> Any:
        return sound(self, *given, step=step + 1)

    patch.setattr(PrefixIndex, "match", match)


def _give_two_rows_the_same_swap_blocks(patch: pytest.MonkeyPatch) -> None:
    def allocate(self: SwapSpace, count: int) -> list[int] | None:
        return self._free[:count] if count <= len(self._free) else None

    patch.setattr(SwapSpace, "allocate", allocate)
    patch.setattr(SwapSpace, "release", lambda self, blocks: None)


def _swap_in_another_rows_blocks(patch: pytest.MonkeyPatch) -> None:
    sound_out, sound_back = Swapper.take_out, Swapper.bring_back
    victims: list[Any] = []

    def take_out(self: Swapper, victim: Any, copies: Any) -> bool:
        victims.append(victim)
        return sound_out(self, victim, copies)

    def bring_back(self: Swapper, request: Any, swapped: Any, matched: int, copies: Any) -> None:
        for other in victims:
            blocks = other.swapped.blocks if other.swapped else []
            if other is not request and len(blocks) >= len(swapped.blocks):
                swapped = replace(swapped, blocks=blocks[: len(swapped.blocks)])
        sound_back(self, request, swapped, matched, copies)

    patch.setattr(Swapper, "take_out", take_out)
    patch.setattr(Swapper, "bring_back", bring_back)


def _publish_a_block_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    sound = BlockManager.publish

    def publish(self: BlockManager, request: Any) -> None:
        early = request.num_uncomputed > 0
        request.num_computed += early
        sound(self, request)
        request.num_computed -= early

    patch.setattr(BlockManager, "publish", publish)


def _publish_a_tail_with_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    sound = BlockManager._publish_block

    def publish_block(self: BlockManager, request: Any, num_tokens: int) -> bool:
        return sound(self, request, min(num_tokens + 1, self.block_size))

    patch.setattr(BlockManager, "_publish_block", publish_block)


def _leave_what_stood_behind_a_failed_block(patch: pytest.MonkeyPatch) -> None:
    def discard(self: BlockManager, request: Any) -> None:
        request.publishes = False
        for block in request.block_table[self.first_private(request) :]:
            if block in self.index:
                self.index.remove(block)

    patch.setattr(BlockManager, "discard", discard)


def _match_a_wrong_neighbour(patch: pytest.MonkeyPatch) -> None:
    sound = PrefixIndex.match

    def match(
        self: PrefixIndex, tokens: Any, block_size: int, max_tokens: int, *, step: int
    ) -> Any:
        found = sound(self, tokens, block_size, max_tokens, step=step)
        children = list(self.root.children.values())
        full = [c for c in children if len(c.key) == block_size <= max_tokens]
        return replace(found, chain=full[:1], partial=None) if full and not found.chain else found

    patch.setattr(PrefixIndex, "match", match)


def _release_what_the_window_still_sees(patch: pytest.MonkeyPatch) -> None:
    sound = BlockManager.release_out_of_window

    def release(self: BlockManager, request: Any) -> None:
        request.num_computed += self.block_size
        sound(self, request)
        request.num_computed -= self.block_size

    patch.setattr(BlockManager, "release_out_of_window", release)


_FAULTS: tuple[Plant, ...] = (
    _drop_a_decrement,
    _release_twice,
    _reuse_a_block_under_its_old_key,
    _count_hits_that_are_not_pinned,
    _allocate_before_the_hits_are_pinned,
    _steal_a_hit_between_claim_and_take,
    _store_one_slot_too_far,
    _copy_from_a_block_that_is_not_held,
    _copy_what_this_step_writes,
    _give_two_rows_the_same_swap_blocks,
    _swap_in_another_rows_blocks,
    _publish_a_block_before_it_is_full,
    _publish_a_tail_with_a_token_too_many,
    _leave_what_stood_behind_a_failed_block,
    _match_a_wrong_neighbour,
    _release_what_the_window_still_sees,
)
# Rows share, make room and come back often.
_CROWDED: dict[str, Any] = {
    "over_admits": True,
    "max_num_seqs": 8,
    "swap_blocks": 16,
    "preemption": PreemptionPolicy.SWAP,
    "prefix_caching": True,
    "window": 5,
}


def test_without_a_fault_the_crowded_engine_runs_through() -> None:
    assert drive(Random(1), 3_000, **_CROWDED)["swap-ins"] > 100


@pytest.mark.parametrize("plant", _FAULTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_fault_is_caught_within_3000_steps(plant: Plant, monkeypatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        drive(Random(1), 3_000, **_CROWDED)


def test_a_failed_row_takes_what_others_left_behind_its_blocks_out_of_the_cache() -> None:
    scheduler = make_scheduler(6, 4)
    engine, _ = make_engine_over_fake(scheduler)
    # The short row hits the first block of the long one, and leaves its own behind it.
    long, short = make_requests(
        [[1] * 6, [1] * 4 + [2] * 5], [SamplingParams(max_tokens=9), SamplingParams(max_tokens=1)]
    )
    scheduler.add(long)
    scheduler.add(short)
    while short.finish_reason is None:
        engine.step()
    assert scheduler.blocks.pool.num_cached > 0
    scheduler.fail(long, RowError(RowErrorType.ENGINE_ERROR, "aborted"))
    check_invariants(scheduler)
    assert scheduler.blocks.pool.num_free == 6
    assert scheduler.take_finished() == [short, long]
    other = Request.create(2, [7] * 20, SamplingParams(max_tokens=1), max_model_len=99)
    run_all(engine, [other])
