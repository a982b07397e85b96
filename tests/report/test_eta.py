"""The time left, against simulated runs whose true end is known."""

from collections.abc import Callable, Sequence
from random import Random

import pytest

from batchgen.report.eta import Eta, Left, Pace

PROMPT_TOKENS = 20


def simulate(
    lengths: Sequence[int],
    limit: int,
    slots: int,
    step_s: Callable[[int, int], float],
    every_s: float,
) -> list[tuple[float, float | None]]:
    """Run rows of given lengths through a batch of slots.

    Returns:
        true and estimated seconds left at each look.
    """
    eta, waiting = Eta(), list(reversed(lengths))
    running: list[list[int]] = []
    now = prefill_s = decode_s = 0.0
    prefills = outputs = 0
    looks: list[tuple[float, float | None]] = []
    while waiting or running:
        started = min(len(waiting), slots - len(running))
        running += [[0, waiting.pop()] for _ in range(started)]
        fresh, rows = started * PROMPT_TOKENS, len(running) - started
        seconds = step_s(fresh, rows)
        eta.note_step(seconds, fresh + rows)
        share = fresh / max(1, fresh + rows)
        prefill_s, decode_s = prefill_s + seconds * share, decode_s + seconds * (1 - share)
        now += seconds
        prefills, outputs = prefills + fresh, outputs + len(running)
        for row in running:
            row[0] += 1
        for done, _ in (row for row in running if row[0] == row[1]):
            eta.note_output(done)
        running = [row for row in running if row[0] < row[1]]
        if not looks or now - looks[-1][0] >= every_s:
            left = Left(
                len(waiting) * PROMPT_TOKENS,
                len(waiting),
                [row[0] for row in running],
                [limit] * len(running),
            )
            pace = Pace(now, prefills, outputs, prefill_s, decode_s)
            looks.append((now, eta.seconds_left(pace, left)))
    return [(now - at, estimate) for at, estimate in looks]


def gpu_step_s(prefill_tokens: int, rows: int) -> float:
    """Weights are read in each step, whatever it does."""
    return 0.02 + 1e-5 * prefill_tokens + 2e-5 * rows


def cpu_step_s(prefill_tokens: int, rows: int) -> float:
    """Mostly a matter of the tokens."""
    return 0.02 + 2e-3 * (prefill_tokens + rows)


def ratios(looks: Sequence[tuple[float, float | None]], shares: Sequence[float]) -> list[float]:
    """Estimated over true seconds left, when these shares of the run's time are over."""
    total = looks[0][0]
    found = []
    for share in shares:
        true, estimate = next(look for look in looks if look[0] <= (1 - share) * total)
        assert estimate is not None
        found.append(estimate / true)
    return found


@pytest.mark.parametrize("step_s", [gpu_step_s, cpu_step_s])
def test_lengths_that_vary_are_foreseen_within_a_third_from_a_tenth_on(step_s) -> None:
    draw = Random(1)
    lengths = [1 + min(999, int(draw.expovariate(1 / 60))) for _ in range(6000)]
    looks = simulate(lengths, 1000, 128, step_s, 0.5)
    for ratio in ratios(looks, [0.1, 0.25, 0.5, 0.75, 0.9]):
        assert 0.75 < ratio < 4 / 3, ratio


@pytest.mark.parametrize("step_s", [gpu_step_s, cpu_step_s])
def test_fixed_lengths_are_foreseen_within_a_tenth_until_the_last_wave(step_s) -> None:
    looks = simulate([64] * 4000, 64, 128, step_s, 0.5)
    for ratio in ratios(looks, [0.1, 0.25, 0.5, 0.75]):
        assert 0.9 < ratio < 1.1, ratio


def test_a_slow_tail_is_told_when_it_is_all_that_is_left() -> None:
    # All rows are short but three, which never stop by themselves. Throughput says "soon"
    # from the first of their last 1,900 steps to the last one.
    draw = Random(2)
    lengths = [draw.randint(10, 60) for _ in range(2000)] + [2000] * 3
    looks = simulate(lengths, 2000, 64, gpu_step_s, 0.5)
    tail = [(true, estimate) for true, estimate in looks if 2 < true < 1700 * 0.02]
    assert len(tail) > 40
    for true, estimate in tail:
        assert estimate is not None
        assert 0.4 < estimate / true < 1.6, (true, estimate)


def test_a_tail_of_ordinary_rows_is_neither_promised_too_early_nor_drawn_out() -> None:
    draw = Random(3)
    lengths = [1 + min(1999, int(draw.lognormvariate(4, 0.7))) for _ in range(6000)]
    looks = simulate(lengths, 2000, 128, gpu_step_s, 0.5)
    total = looks[0][0]
    for true, estimate in looks:
        if true < 0.9 * total and estimate is not None:
            assert abs(estimate - true) < 0.25 * total, (true, estimate)


def test_nothing_is_promised_before_a_row_has_ended_and_nothing_is_left_at_the_end() -> None:
    eta = Eta()
    nothing = Pace(0.0, 0, 0, 0.0, 0.0)
    some = Pace(1.0, 100, 10, 0.5, 0.5)
    assert eta.seconds_left(nothing, Left(10, 5, [], [])) is None
    assert eta.seconds_left(some, Left(10, 5, [3], [10])) is None
    eta.note_output(4)
    assert eta.seconds_left(some, Left(10, 5, [3], [10])) is not None
    assert eta.seconds_left(some, Left(0, 0, [], [])) == 0.0


def test_a_row_never_has_more_left_than_its_limit_lets_it() -> None:
    eta = Eta()
    eta.seconds_left(Pace(0.0, 0, 0, 0.0, 0.0), Left(0, 0, [0], [10]))
    for _ in range(100):
        eta.note_step(1.0, 1)
    for length in (5, 500, 2000):
        eta.note_output(length)
    # A second a step, one row, nine of its ten tokens are there.
    left = eta.seconds_left(Pace(100.0, 0, 100, 0.0, 100.0), Left(0, 0, [9], [10]))
    assert left is not None
    assert 0.5 < left <= 1.0


@pytest.mark.filterwarnings("error")
def test_rows_that_generate_nothing_are_estimated_by_their_prompts() -> None:
    eta = Eta()
    eta.seconds_left(Pace(0.0, 0, 0, 0.0, 0.0), Left(200, 20, [], []))
    for _ in range(10):
        eta.note_step(1.0, 10)
        eta.note_output(0)
    left = eta.seconds_left(Pace(10.0, 100, 0, 10.0, 0.0), Left(100, 10, [0], [1]))
    assert left == pytest.approx(10.0, rel=0.2)
