"""Where every layer's attention slides, a row holds only what its window can still see."""

import pytest

from batchgen.engine.preemption import PreemptionPolicy
from batchgen.sampling import SamplingParams
from tests.support.drive import make_engine_over_fake, make_requests, make_scheduler, run_all
from tests.support.fake_model import generate

_WINDOW, _BUDGET, _SIZE = 32, 24, 4
# What a row sees and computes in a step, beginning anywhere in a block.
_MOST = -(-(_WINDOW + _BUDGET) // _SIZE) + 1


def test_a_long_row_holds_a_window_of_blocks_however_long_it_gets() -> None:
    scheduler = make_scheduler(_MOST, _SIZE, budget=_BUDGET, window=_WINDOW)
    engine, _ = make_engine_over_fake(scheduler, window=_WINDOW)
    prompt = list(range(300))
    (row,) = run_all(engine, make_requests([prompt], SamplingParams(max_tokens=400)))
    assert row.output_token_ids == generate(prompt, 400)
    assert row.account.peak_blocks <= _MOST < 700 // _SIZE
    # Once it decodes it needs the window and the block that it writes.
    assert row.account.freed_blocks >= 690 // _SIZE


def test_rows_that_slide_need_a_fraction_of_the_pool_of_rows_that_do_not() -> None:
    prompts = [[i, *range(200)] for i in range(6)]
    blocks = 6 * _MOST
    peaks = {}
    for window in (_WINDOW, None):
        scheduler = make_scheduler(blocks, _SIZE, budget=_BUDGET, window=window)
        engine, _ = make_engine_over_fake(scheduler, window=window)
        rows = run_all(engine, make_requests(prompts, SamplingParams(max_tokens=60)))
        for prompt, row in zip(prompts, rows, strict=True):
            assert row.output_token_ids == generate(prompt, 60)
        peaks[window] = engine.stats.peak_running
    assert (peaks[_WINDOW], peaks[None]) == (6, 1)


@pytest.mark.parametrize("preemption", [PreemptionPolicy.SWAP, PreemptionPolicy.RECOMPUTE])
def test_a_row_whose_first_blocks_are_gone_comes_back_from_either_way(preemption) -> None:
    scheduler = make_scheduler(
        _MOST + 1, _SIZE, budget=_BUDGET, window=_WINDOW, swap_blocks=64, preemption=preemption
    )
    # Both start, although two windows with the blocks in work do not fit side by side.
    scheduler._admission.growth = lambda request, held: 0
    scheduler._admission.growth_of_all = lambda running: 0
    engine, _ = make_engine_over_fake(scheduler, window=_WINDOW)
    prompts = [[7, *range(150)], [8, *range(150)]]
    rows = run_all(engine, make_requests(prompts, SamplingParams(max_tokens=60)))
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.output_token_ids == generate(prompt, 60)
    assert scheduler.counters.preemptions > 0
    swapped = scheduler.counters.swapped_in_blocks
    assert (swapped > 0) == (preemption is PreemptionPolicy.SWAP)


def test_a_shared_prefix_is_held_only_as_far_as_the_window_sees_it() -> None:
    scheduler = make_scheduler(200, _SIZE, budget=_BUDGET, window=_WINDOW)
    engine, _ = make_engine_over_fake(scheduler, window=_WINDOW)
    shared = list(range(120))
    run_all(engine, make_requests([[*shared, 1]], SamplingParams(max_tokens=1)))
    (row,) = run_all(engine, make_requests([[*shared, 2, 3]], SamplingParams(max_tokens=1)))
    assert row.account.cached_tokens == 120
    assert row.account.hit_blocks <= _WINDOW // _SIZE + 1
