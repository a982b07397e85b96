"""The engine core: schedules steps, runs them and processes their outputs until all have ended.

Steps overlap if asked to: while one runs on the device, the next is scheduled and enqueued, on
the assumption that no request ends in between (after vLLM V1's asynchronous scheduling).
Sampled tokens go from step to step on the device, and the output that the host processes is a
step old. The assumption fails if a request meets an end of sequence or a stop string: it has
then computed one token too many, which is discarded. A request that reaches its length is no
surprise and ends in time. Tokens are the same either way. So are the block accounts as long as
requests end by length; a request that ends by surprise frees its batch index and its blocks a
step later, so others may be admitted a step later and find another cache.

A step with samples whose next input the host must know (:meth:`SampleBatch.needs_host`:
structured outputs, penalties, bad words, scored choices, log-probabilities) is waited for
before the next is scheduled.

A step that finds no memory on the device is finished in micro-batches
(:mod:`batchgen.engine.micro_batches`), and no later step is as large.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from batchgen.engine.micro_batches import join_outputs, split_plan, substitute_tokens
from batchgen.engine.request import Request
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.stats import EngineStats
from batchgen.engine.step import StepOutput, StepPlan
from batchgen.errors import EngineError, OutOfDeviceMemoryError

# Passes that find no memory before the engine gives up, with no whole step in between.
_MOST_SHORT_PASSES = 32
# Whole steps after which steps may be twice as large again.
_STEPS_TO_GROW = 256


class PendingOutput(Protocol):
    """The output of a step that may still be running."""

    def result(self) -> StepOutput:
        """Wait for it; called again, return the same."""


class Executor(Protocol):
    """Runs step plans on a device, one after another."""

    def execute(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a plan after the last one, whose sampled tokens it may run.

        Raises:
            OutOfDeviceMemoryError: the forward pass found no memory; the plan's copies are
                done.
        """


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """The output of a step that has run."""

    output: StepOutput

    def result(self) -> StepOutput:
        """Return it."""
        return self.output


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step that was handed to the executor.

    Attributes:
        plan: what it computes.
        output: what it will come to.
        launched: when it was enqueued, in seconds.
        decoded, recomputed: decode tokens of the plan, and tokens computed again.
        must_wait: the next step cannot be scheduled before its output is processed.
    """

    plan: StepPlan
    output: PendingOutput
    launched: float
    decoded: int
    recomputed: int
    must_wait: bool


class EngineCore:
    """Runs requests through a scheduler and an executor.

    Args:
        lookahead: requests pulled from the source before they can run; memory stays
            bounded however many there are.
        overlap: whether a step is scheduled while the one before it runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        lookahead: int = 1024,
        overlap: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._executor = executor
        self._overlap = overlap
        self._in_flight: _InFlightStep | None = None
        self._is_broken_off = False
        self._last_output_at = 0.0
        self._short_passes = 0
        self._whole_steps = 0
        self._lookahead = lookahead
        self._clock = clock

    def run(self, requests: Iterable[Request]) -> Iterator[list[Request]]:
        """Run all requests; what an earlier run that did not reach its end left is dropped.

        Yields:
            After each step the requests that ended in it, possibly none, so that the
            caller can look at signals and progress between steps.

        Raises:
            EngineError: nothing can be scheduled although requests are left.
        """
        if self._is_broken_off:
            self.reset()
        self._is_broken_off = True
        source = iter(requests)
        while True:
            missing = self._lookahead - len(self.scheduler.waiting)
            for request in islice(source, max(0, missing)):
                self.scheduler.add(request)
            ran = self.step()
            finished = self.scheduler.take_finished()
            yield finished
            if not (ran or finished or self.scheduler.num_unfinished):
                self._is_broken_off = False
                return

    def reset(self) -> None:
        """Drop all requests and the cache, after a run that did not reach its end."""
        self._in_flight = None
        self.scheduler.reset()
        self._is_broken_off = False

    def step(self) -> bool:
        """Schedule and start a step, then process the output of the step in flight.

        Without overlap, or if the new step must be waited for, its output is processed too.

        Returns:
            False if there was nothing to run or to process.

        Raises:
            EngineError: nothing can be scheduled, or the executor failed.
        """
        previous, self._in_flight = self._in_flight, None
        step = self._start(previous)
        if previous is not None:
            self._process(previous, is_exposed=step is None)
        if step is None:
            return previous is not None
        self.scheduler.advance()
        if step.must_wait:
            self._process(step, is_exposed=True)
        else:
            self._in_flight = step
        return True

    def _start(self, previous: _InFlightStep | None) -> _InFlightStep | None:
        """Schedule a step and enqueue it; None if there is nothing to run."""
        counters = self.scheduler.counters
        decoded, recomputed = counters.decode_tokens, counters.recomputed_tokens
        with self._scheduling(is_exposed=previous is None):
            plan = self.scheduler.schedule()
            if plan is None:
                return None
            self.stats.note_pool(self.scheduler, plan)
        launched = self._clock()
        must_wait = plan.samples.needs_host or not self._overlap
        with self._on_device(plan):
            try:
                output = self._executor.execute(plan)
                self._note_whole_step()
            except OutOfDeviceMemoryError as error:
                must_wait = True
                if previous is not None:
                    plan = substitute_tokens(plan, previous.output.result().token_ids)
                output = FinishedOutput(self._in_micro_batches(plan, error))
        return _InFlightStep(
            plan=plan,
            output=output,
            launched=launched,
            decoded=counters.decode_tokens - decoded,
            recomputed=counters.recomputed_tokens - recomputed,
            must_wait=must_wait,
        )

    def _process(self, step: _InFlightStep, *, is_exposed: bool) -> None:
        """Wait for a step's output and hand it to the scheduler; see :meth:`_scheduling`."""
        with self._on_device(step.plan):
            output = step.output.result()
        # It ran from the end of the step before it.
        began, self._last_output_at = max(step.launched, self._last_output_at), self._clock()
        seconds = self._last_output_at - began
        self.scheduler.costs.observe_step(step.plan.num_tokens, seconds)
        self.stats.note_time(step.plan.num_tokens, seconds, step.decoded, step.recomputed)
        with self._scheduling(is_exposed=is_exposed):
            self.scheduler.update(output)

    @contextmanager
    def _scheduling(self, *, is_exposed: bool) -> Iterator[None]:
        """Count the time of some work as the scheduler's, unless a step is in flight.

        It is a part of that step's time then.
        """
        started = self._clock()
        yield
        if is_exposed:
            self.stats.scheduler_s += self._clock() - started

    # -- out of memory ------------------------------------------------------------------

    def _in_micro_batches(self, plan: StepPlan, error: OutOfDeviceMemoryError) -> StepOutput:
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
        parts = split_plan(plan, half)
        return join_outputs(plan, parts, [self._execute_micro_batch(part) for part in parts])

    def _execute_micro_batch(self, plan: StepPlan) -> StepOutput:
        try:
            return self._executor.execute(plan).result()
        except OutOfDeviceMemoryError as error:
            return self._in_micro_batches(plan, error)

    def _note_whole_step(self) -> None:
        """After enough steps without trouble, let them grow again."""
        self._short_passes = 0
        self._whole_steps += 1
        if self._whole_steps % _STEPS_TO_GROW == 0:
            self.scheduler.limit_step(2 * self.scheduler.step_tokens)

    @contextmanager
    def _on_device(self, plan: StepPlan) -> Iterator[None]:
        """Turn any error into an :class:`EngineError` that names the step."""
        try:
            yield
        except Exception as error:
            state = self.scheduler.describe()
            raise EngineError(f"step {plan.step} failed: {error} ({state})") from error
