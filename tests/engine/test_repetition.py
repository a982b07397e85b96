"""Outputs that go round in circles."""

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.core import EngineCore
from batchgen.engine.repetition import RepetitionWatch
from batchgen.engine.request import FinishReason
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.fake_model import FakeExecutor


def _repeats(tokens: list[int], count: int) -> bool:
    """The rule, word for word."""
    tail = tokens[-count:]
    periods = range(1, count // 3 + 1)
    return len(tail) == count and any(tail[p:] == tail[:-p] for p in periods)


_tokens = st.integers(0, 2) | st.sampled_from([0, 1])
_loops = st.builds(
    lambda head, loop, times, tail: [*head, *loop * times, *tail],
    st.lists(_tokens, max_size=4),
    st.lists(_tokens, min_size=1, max_size=5),
    st.integers(1, 6),
    st.lists(_tokens, max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(tokens=_loops, count=st.integers(3, 16))
def test_the_watch_says_what_the_rule_says_after_each_token(tokens, count):
    watch = RepetitionWatch(count)
    for length, token in enumerate(tokens, start=1):
        assert watch.push(token) == _repeats(tokens[:length], count)


class _Loops(FakeExecutor):
    """Returns 30 to 34 once, then 40 41 42 for ever."""

    def _sample(self, history, samples, index) -> int:
        position = samples.positions[index]
        return 30 + position if position < 5 else 40 + (position - 5) % 3


def _run(swap_blocks: int = 0, num_blocks: int = 64, prompts: int = 1, **params):
    scheduler = make_scheduler(num_blocks, 4, swap_blocks=swap_blocks)
    engine = EngineCore(scheduler, _Loops(4))
    given_ = SamplingParams(max_tokens=40, **params)
    requests = run_all(engine, make_requests([[i + 1] * 9 for i in range(prompts)], given_))
    return requests, scheduler


def test_a_loop_ends_the_output_with_its_own_reason_as_soon_as_the_rule_holds():
    (request,), _ = _run(stop_on_repetition=10)
    assert request.output_token_ids == [30, 31, 32, 33, 34, *[40, 41, 42] * 3, 40]
    assert request.finish_reason is FinishReason.REPETITION
    assert request.stop_reason is None


def test_it_is_off_by_default_a_short_rule_does_not_see_a_long_loop_and_min_tokens_counts():
    for params in ({}, {"stop_on_repetition": 8}):
        (request,), _ = _run(**params)
        assert request.finish_reason is FinishReason.LENGTH
    (request,), _ = _run(stop_on_repetition=10, min_tokens=20)
    assert request.num_output_tokens == 21


def test_preemption_changes_nothing_in_it():
    (alone,), _ = _run(stop_on_repetition=10)
    for swap_blocks in (0, 32):
        requests, scheduler = _run(
            stop_on_repetition=10, num_blocks=12, swap_blocks=swap_blocks, prompts=4
        )
        assert scheduler.counters.preemptions > 0
        assert {tuple(request.output_token_ids) for request in requests} == {
            tuple(alone.output_token_ids)
        }
