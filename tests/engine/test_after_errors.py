"""An engine goes on after a run that was broken off, wherever that was."""

import sys
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest

from batchgen.engine.core import EngineCore
from batchgen.errors import EngineError
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.engine_model import random_prompt
from tests.support.fake_model import FakeExecutor, generate
from tests.support.invariants import check_invariants


class _InterruptAtLine:
    """Raises KeyboardInterrupt at one of the lines that the engine runs, counted from 0."""

    def __init__(self, line: int | None) -> None:
        self.lines = 0
        self._line = line

    def __enter__(self) -> "_InterruptAtLine":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        is_engine = "/batchgen/engine/" in frame.f_code.co_filename
        return self._count if is_engine else None

    def _count(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            self.lines += 1
            if self.lines - 1 == self._line:
                raise KeyboardInterrupt
        return self._count


def _engine(*, overlap: bool) -> tuple[EngineCore, FakeExecutor]:
    scheduler = make_scheduler(16, 4, swap_blocks=6, budget=20)
    executor = FakeExecutor(4, before=lambda plan: check_invariants(scheduler, plan))
    return EngineCore(scheduler, executor, overlap=overlap), executor


def _goes_on(engine: EngineCore, executor: FakeExecutor, prompts: list[list[int]]) -> None:
    # What was written before the interruption may not be read.
    executor.slots.clear()
    rows = run_all(engine, make_requests(prompts, SamplingParams(max_tokens=9)))
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.output_token_ids == generate(prompt, 9)


def _prompts(seed: int) -> list[list[int]]:
    rng = Random(seed)
    return [list(random_prompt(rng)) for _ in range(7)]


@pytest.mark.parametrize("overlap", [False, True])
def test_t24_an_interrupt_at_any_line_of_the_engine_leaves_one_that_works(overlap: bool) -> None:
    prompts, params = _prompts(0), SamplingParams(max_tokens=9)

    def run(engine: EngineCore, line: int | None) -> int:
        with _InterruptAtLine(line) as interrupt:
            for _ in engine.run(make_requests(prompts, params)):
                pass
        return interrupt.lines

    lines = run(_engine(overlap=overlap)[0], None)
    assert lines > 5000
    for line in sorted(Random(1).sample(range(lines), 25)):
        engine, executor = _engine(overlap=overlap)
        with pytest.raises(KeyboardInterrupt):
            run(engine, line)
        _goes_on(engine, executor, _prompts(2))


@pytest.mark.parametrize("overlap", [False, True])
def test_t24_after_a_failed_step_a_caller_that_left_or_a_source_that_broke(overlap: bool) -> None:
    engine, executor = _engine(overlap=overlap)
    requests = make_requests(_prompts(3), SamplingParams(max_tokens=9))

    def source() -> Any:
        yield from requests[:3]
        raise ValueError("no more rows")

    with pytest.raises(ValueError, match="no more rows"):
        list(engine.run(source()))
    _goes_on(engine, executor, _prompts(4))

    healthy, last = executor._before, len(executor.plans) + 4

    def fail(plan: Any) -> None:
        if len(executor.plans) == last:
            raise RuntimeError("the device is gone")

    executor._before = fail
    with pytest.raises(EngineError, match="the device is gone"):
        list(engine.run(make_requests(_prompts(5), SamplingParams(max_tokens=9))))
    executor._before = healthy
    _goes_on(engine, executor, _prompts(5))

    for steps, _ in enumerate(engine.run(make_requests(_prompts(6), SamplingParams(max_tokens=9)))):
        if steps == 3:
            break
    assert engine.scheduler.num_unfinished
    _goes_on(engine, executor, _prompts(6))


def test_t24_a_run_that_reached_its_end_leaves_its_cache() -> None:
    engine, executor = _engine(overlap=False)
    _goes_on(engine, executor, [[5] * 9])
    before = engine.scheduler.counters.cached_tokens
    rows = run_all(engine, make_requests([[5] * 9], SamplingParams(max_tokens=2)))
    assert engine.scheduler.counters.cached_tokens - before == 8
    assert rows[0].output_token_ids == generate([5] * 9, 2)
