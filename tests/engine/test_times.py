"""The times of the engine's parts are of disjoint spans."""

from itertools import count

import pytest

from batchgen.engine.core import EngineCore
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.fake_model import FakeExecutor


@pytest.mark.parametrize("stop_ids", [(), (5,)])
@pytest.mark.parametrize("overlap", [False, True])
def test_t18_the_parts_come_to_no_more_than_the_whole(
    overlap: bool, stop_ids: tuple[int, ...]
) -> None:
    # Time passes by being asked for, and in long spans inside the scheduler.
    ticks = count()
    scheduler = make_scheduler(40, 4, budget=24)
    schedule, update, advance = scheduler.schedule, scheduler.update, scheduler.advance

    def slow(work):
        def done(*given):
            for _ in range(50):
                next(ticks)
            return work(*given)

        return done

    scheduler.schedule, scheduler.update = slow(schedule), slow(update)
    scheduler.advance = slow(advance)
    executor = FakeExecutor(4)
    engine = EngineCore(scheduler, executor, overlap=overlap, clock=lambda: float(next(ticks)))
    params = SamplingParams(max_tokens=9, stop_token_ids=stop_ids)
    run_all(engine, make_requests([[n] * 9 for n in range(1, 9)], params))
    stats, whole = engine.stats, float(next(ticks))
    parts = stats.prefill_s + stats.decode_s + stats.scheduler_s
    assert parts <= whole
    # What is left over is the time between steps.
    assert parts >= 0.9 * whole
    assert (stats.scheduler_s < 0.2 * whole) == overlap
