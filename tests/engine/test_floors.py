"""Computed prefill tokens against the floor E_1, on four kinds of data sets and two pools."""

from itertools import pairwise

import numpy as np
import pytest

from batchgen.engine.step import StepOutput
from batchgen.prompts.future import PlannedFuture
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler

Prompts = list[list[int]]
_OUTPUT = 8
_ROWS = 16


def _few_shot(rng: np.random.Generator) -> Prompts:
    head = _tokens(rng, 850)
    return [head + _tokens(rng, rng.integers(20, 60)) for _ in range(150)]


def _multi_turn(rng: np.random.Generator) -> Prompts:
    system, prompts = _tokens(rng, 30), []
    for _ in range(40):
        conversation = list(system)
        for _ in range(4):
            conversation += _tokens(rng, rng.integers(20, 120))
            prompts.append(list(conversation))
            conversation += _tokens(rng, rng.integers(50, 150))
    return prompts


def _documents(rng: np.random.Generator) -> Prompts:
    system, prompts = _tokens(rng, 40), []
    for _ in range(14):
        document = system + _tokens(rng, rng.integers(300, 700))
        prompts += [document + _tokens(rng, rng.integers(10, 30)) for _ in range(10)]
    return prompts


def _chats(rng: np.random.Generator) -> Prompts:
    system = _tokens(rng, 25)
    return [system + _tokens(rng, 1 + rng.lognormal(4.3, 1)) for _ in range(150)]


_SETS = {"few_shot": _few_shot, "multi_turn": _multi_turn, "documents": _documents, "chats": _chats}


def _tokens(rng: np.random.Generator, count: float) -> list[int]:
    return rng.integers(0, 40_000, int(count)).tolist()


def _shared(before: list[int], row: list[int]) -> int:
    most = min(len(before), len(row) - 1)
    return next((i for i in range(most) if before[i] != row[i]), most)


def _live_paths(prompts: Prompts, size: int) -> int:
    """Most blocks that the prefix tree of 16 neighbouring rows and their outputs takes."""
    most = 0
    for end in range(1, len(prompts) + 1):
        window = prompts[max(0, end - _ROWS) : end]
        own = (
            -(-(len(row) + _OUTPUT) // size) - _shared(before, row) // size
            for before, row in pairwise([[], *window])
        )
        most = max(most, sum(own))
    return most


@pytest.mark.parametrize("pool", ["everything", "live paths"])
@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("name", sorted(_SETS))
def test_prefix_order_computes_at_most_two_percent_above_the_floor(name, size, pool) -> None:
    prompts = sorted(_SETS[name](np.random.default_rng(7)))
    lcp = [_shared(before, row) for before, row in pairwise([[], *prompts])]
    floor = sum(map(len, prompts)) - sum(lcp)
    longest = max(map(len, prompts)) + _OUTPUT
    blocks = sum(-(-(len(row) + _OUTPUT) // size) for row in prompts)
    if pool == "live paths":
        blocks = 2 * -(-longest // size) + _live_paths(prompts, size)
    future = PlannedFuture(np.arange(len(prompts)), np.array(lcp))
    scheduler = make_scheduler(blocks, size, budget=512, max_num_seqs=_ROWS, future=future)
    for request in make_requests(prompts, SamplingParams(max_tokens=_OUTPUT, ignore_eos=True)):
        scheduler.add(request)
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.advance()
        scheduler.update(StepOutput(np.array([1] * len(plan.samples))))
    assert floor <= scheduler.counters.prefill_tokens <= 1.02 * floor
    assert scheduler.counters.preemptions == 0
