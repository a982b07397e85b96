"""The engine: schedules, executes and commits steps until all requests have ended.

Two ways to order that. One step after the other: plan, run, read the tokens, commit. Or one
ahead: while a step runs, the next is planned and enqueued behind it, on the assumption that
no row ends in between; sampled tokens go from step to step on the device, and what the host
reads is a step old. That assumption fails where a row meets an end of sequence or a stop
string: it has then computed one token too many, which nobody sees. A row that reaches its
length is no surprise and leaves in time. Tokens are the same either way. So are the rows'
accounts as long as rows end by length; a row that ends by surprise gives its place and its
blocks a step later, so others may start a step later and find another cache.

A step with rows whose next input the host must know (:meth:`SampleBatch.needs_host`:
structured outputs, penalties, bad words, scored choices, logs) is read before the next is
planned.

A step that finds no memory on the device is finished in smaller pieces
(:mod:`batchgen.engine.pieces`), and no later step is as large.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from batchgen.engine.pieces import cut, with_tokens
from batchgen.engine.request import Request
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.stats import EngineStats
from batchgen.engine.step import IntArray, StepPlan
from batchgen.errors import EngineError, OutOfDeviceMemoryError

# Passes that find no memory before the engine gives up, with no whole step in between.
_MOST_SHORT_PASSES = 32
# Whole steps after which steps may be twice as large again.
_STEPS_TO_GROW = 256


class Executor(Protocol):
    """Runs step plans on a device."""

    def execute(self, plan: StepPlan) -> IntArray:
        """Run a plan; return its S sampled tokens, or what stands for one (``NO_TOKEN``).

        Raises:
            OutOfDeviceMemoryError: the forward pass found no memory; the plan's copies are
                done.
        """


class Arrival(Protocol):
    """Sampled tokens on their way to the host."""

    def tokens(self) -> IntArray:
        """Wait for the S tokens."""


class Launcher(Protocol):
    """Enqueues step plans on a device that does one after another."""

    def launch(self, plan: StepPlan) -> Arrival:
        """Enqueue a plan behind the last one, whose tokens it may run.

        Raises:
            OutOfDeviceMemoryError: as for :meth:`Executor.execute`.
        """


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Tokens that are there."""

    found: IntArray

    def tokens(self) -> IntArray:
        return self.found


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step under way.

    Attributes:
        plan: what it computes.
        arrival: its tokens.
        launched: when it was enqueued, in seconds.
        decoded, recomputed: tokens of the plan that are rows' own, and that are not new.
        is_read: its tokens are to be read before the next step is planned.
    """

    plan: StepPlan
    arrival: Arrival
    launched: float
    decoded: int
    recomputed: int
    is_read: bool


class Engine:
    """Runs requests through a scheduler and an executor.

    Args:
        lookahead: requests pulled from the source before they can run; memory stays
            bounded however many there are.
        launcher: enqueues steps one ahead; None runs one after the other through the
            executor.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        lookahead: int = 1024,
        launcher: Launcher | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._executor = executor
        self._launcher = launcher
        self._flight: _Flight | None = None
        self._arrived = 0.0
        self._short_passes = 0
        self._whole_steps = 0
        self._lookahead = lookahead
        self._clock = clock

    def run(self, requests: Iterable[Request]) -> Iterator[list[Request]]:
        """Run all requests.

        Yields:
            After each step the requests that ended in it, possibly none, so that the
            caller can look at signals and progress between steps.

        Raises:
            EngineError: nothing can be scheduled although requests are left.
        """
        source = iter(requests)
        while True:
            missing = self._lookahead - len(self.scheduler.waiting)
            for request in islice(source, max(0, missing)):
                self.scheduler.add(request)
            ran = self.step()
            finished = self.scheduler.take_finished()
            yield finished
            if not (ran or finished or self.scheduler.num_unfinished):
                return

    def step(self) -> bool:
        """Plan, execute and commit one step; False where there was nothing to run.

        One step ahead, it plans and enqueues one step and commits the one before.

        Raises:
            EngineError: nothing can be scheduled, or the executor failed.
        """
        if self._launcher is not None:
            return self._step_ahead(self._launcher)
        started = self._clock()
        planned = self._plan()
        if planned is None:
            return False
        plan, decoded, recomputed = planned
        launched = self._clock()
        with self._on_device(plan):
            tokens = self._execute(plan)
        executed = self._clock()
        self._note_time(plan, executed - launched, decoded, recomputed)
        self.scheduler.commit(plan, tokens)
        self.stats.scheduler_s += launched - started + self._clock() - executed
        return True

    def _step_ahead(self, launcher: Launcher) -> bool:
        started = self._clock()
        planned = self._plan()
        before, self._flight = self._flight, None
        if planned is not None:
            plan, decoded, recomputed = planned
            launched = self._clock()
            self.stats.scheduler_s += launched - started
            with self._on_device(plan):
                arrival, is_read = self._launch(launcher, plan, before)
            self._flight = _Flight(plan, arrival, launched, decoded, recomputed, is_read)
        if before is not None:
            self.scheduler.resolve(before.plan, self._land(before))
        if self._flight is not None:
            if self._flight.is_read:
                flight, self._flight = self._flight, None
                self.scheduler.commit(flight.plan, self._land(flight))
            else:
                self.scheduler.expect(self._flight.plan)
        return planned is not None or before is not None

    def _plan(self) -> tuple[StepPlan, int, int] | None:
        """Plan a step; also give its tokens that are rows' own, and that are not new."""
        counters = self.scheduler.counters
        before = counters.decode_tokens, counters.recomputed_tokens
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.stats.note_pool(self.scheduler, plan)
        decoded = counters.decode_tokens - before[0]
        return plan, decoded, counters.recomputed_tokens - before[1]

    def _launch(
        self, launcher: Launcher, plan: StepPlan, before: _Flight | None
    ) -> tuple[Arrival, bool]:
        """Enqueue a plan; also say whether its tokens are to be read at once."""
        try:
            arrival = launcher.launch(plan)
        except OutOfDeviceMemoryError as error:
            if before is not None:
                plan = with_tokens(plan, before.arrival.tokens())
            return _Arrived(self._in_pieces(plan, error)), True
        self._note_whole_step()
        return arrival, plan.samples.needs_host

    def _execute(self, plan: StepPlan) -> IntArray:
        try:
            tokens = self._executor.execute(plan)
        except OutOfDeviceMemoryError as error:
            return self._in_pieces(plan, error)
        self._note_whole_step()
        return tokens

    def _in_pieces(self, plan: StepPlan, error: OutOfDeviceMemoryError) -> IntArray:
        """Finish a step in halves, and these in halves again, as often as it takes.

        Raises:
            EngineError: there is no memory for a single token, or step after step runs out.
        """
        self.stats.out_of_memory += 1
        self._short_passes += 1
        self._whole_steps = 0
        half = plan.num_tokens // 2
        if not half or self._short_passes > _MOST_SHORT_PASSES:
            raise EngineError(
                f"the device found no memory for {self._short_passes} passes in a row, the last "
                f"of {plan.num_tokens} tokens; lower pool.gpu_memory_utilization or "
                f"engine.max_num_seqs: {error}"
            ) from error
        self.scheduler.limit_step(min(half, self.scheduler.step_tokens))
        return np.concatenate([self._execute_piece(piece) for piece in cut(plan, half)])

    def _execute_piece(self, piece: StepPlan) -> IntArray:
        try:
            return self._executor.execute(piece)
        except OutOfDeviceMemoryError as error:
            return self._in_pieces(piece, error)

    def _note_whole_step(self) -> None:
        """After enough steps without trouble, let them grow again."""
        self._short_passes = 0
        self._whole_steps += 1
        if self._whole_steps % _STEPS_TO_GROW == 0:
            self.scheduler.limit_step(2 * self.scheduler.step_tokens)

    def _land(self, flight: _Flight) -> IntArray:
        """Wait for a step's tokens. It ran from the end of the one before."""
        with self._on_device(flight.plan):
            tokens = flight.arrival.tokens()
        began, self._arrived = max(flight.launched, self._arrived), self._clock()
        seconds = self._arrived - began
        self._note_time(flight.plan, seconds, flight.decoded, flight.recomputed)
        return tokens

    @contextmanager
    def _on_device(self, plan: StepPlan) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            state = self.scheduler.describe()
            raise EngineError(f"step {plan.step} failed: {error} ({state})") from error

    def _note_time(self, plan: StepPlan, seconds: float, decoded: int, recomputed: int) -> None:
        self.scheduler.costs.observe_step(plan.num_tokens, seconds)
        self.stats.note_time(plan.num_tokens, seconds, decoded, recomputed)
