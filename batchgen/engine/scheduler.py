"""Schedule one step at a time: which request runs which tokens, and which is preempted.

There are no phases: a request's computed tokens chase its known tokens under one token
budget, running requests before swapped ones, those before waiting ones (after vLLM V1's
scheduler). All decisions are integers; the result is a frozen step plan. Waiting requests are
admitted in ``admission``, outputs processed in ``output_processor``, requests ended in
``stopping``.
"""

from bisect import bisect, insort
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from batchgen.engine.admission import Admission, AdmissionPolicy, Admitter
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.input_batch import InFlightStep, InFlightSteps, InputBatch, LogTarget
from batchgen.engine.output_processor import OutputProcessor
from batchgen.engine.plan_builder import Copies, PlanBuilder, build_plan
from batchgen.engine.preemption import PreemptionCosts, PreemptionPolicy, Swapper, SwapSpace
from batchgen.engine.queues import Queues, by_arrival
from batchgen.engine.request import Request, Status
from batchgen.engine.step import IntArray, StepOutput, StepPlan
from batchgen.engine.stopping import RequestFinisher, StopRules
from batchgen.errors import EngineError, RowError, RowErrorType


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's fixed bounds.

    Attributes:
        max_num_seqs: requests running at once.
        max_num_batched_tokens: tokens in one step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int


def _worth(request: Request) -> tuple[int, int, int]:
    """Order requests by what preempting them loses, the least first."""
    return -request.priority, request.num_output_tokens, -request.arrival


class Scheduler:
    """Holds the queues and plans one step at a time.

    Attributes:
        waiting, running, swapped: see :class:`~batchgen.engine.queues.Queues`.
        step_tokens: most tokens of a step, see :meth:`limit_step`.
    """

    def __init__(
        self,
        blocks: BlockManager,
        swap_space: SwapSpace,
        stop_rules: StopRules,
        limits: SchedulerLimits,
        *,
        admission: AdmissionPolicy = AdmissionPolicy.AUTO,
        preemption: PreemptionPolicy = PreemptionPolicy.AUTO,
        costs: PreemptionCosts | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.counters = SchedulerCounters()
        self.costs = costs or PreemptionCosts()
        self.step_tokens = limits.max_num_batched_tokens
        self._stop_rules = stop_rules
        self._limits = limits
        self._policies = admission, preemption
        self._clock = clock
        self._num_steps = 0
        self._begin(blocks, swap_space)

    def _begin(self, blocks: BlockManager, swap_space: SwapSpace) -> None:
        """Start without requests, over a pool of free blocks."""
        admission, preemption = self._policies
        counters, clock, max_num_seqs = self.counters, self._clock, self._limits.max_num_seqs
        self.blocks = blocks
        self.swap_space = swap_space
        self._queues = queues = Queues(InputBatch(max_num_seqs))
        self.waiting, self.running, self.swapped = queues.waiting, queues.running, queues.swapped
        self._admission = Admission(admission, blocks)
        self._swapper = Swapper(blocks, swap_space, preemption, self.costs, counters)
        self._in_flight = InFlightSteps()
        self._finisher = RequestFinisher(
            queues, blocks, self._swapper, counters, self._admission.lengths, self._in_flight, clock
        )
        self._output_processor = OutputProcessor(
            self.running, self._in_flight, self._stop_rules, self._finisher, counters, clock
        )
        self._admitter = Admitter(
            queues, blocks, self._admission, self._swapper, counters, max_num_seqs, clock
        )
        self._unplanned_swap_out: Copies = []

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self._queues.num_unfinished

    # -- from outside ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; one that can never fit the pool fails at once."""
        request.arrival = self._queues.num_arrived
        self._queues.num_arrived += 1
        if request.num_prompt_tokens > request.max_total_tokens:
            message = (
                f"the prompt and a choice come to {request.num_prompt_tokens} tokens, the model "
                f"takes {request.max_total_tokens}"
            )
            self.fail(request, RowError(RowErrorType.PROMPT_TOO_LONG, message))
            return
        needed = self.blocks.most_blocks_for(request.num_prompt_tokens + 1)
        if needed > self.blocks.pool.num_blocks:
            counters = self.counters
            counters.most_refused_blocks = max(counters.most_refused_blocks, needed)
            message = (
                f"the prompt of {request.num_prompt_tokens} tokens and one more need {needed} "
                f"blocks, the pool has {self.blocks.pool.num_blocks}; set pool.num_blocks to at "
                f"least {needed}"
            )
            self.fail(request, RowError(RowErrorType.EXCEEDS_KV_CAPACITY, message))
            return
        self.waiting.append(request)

    def reset(self) -> None:
        """Drop all requests and the cache.

        For after an error, which may have come in the middle of any change: nothing is known
        of who holds which block, nor which of the planned KV was written.
        """
        self._begin(self.blocks.emptied(), SwapSpace(self.swap_space.num_blocks))

    def take_finished(self) -> list[Request]:
        """Hand over the requests that ended since the last call."""
        return self._queues.take_finished()

    def fail(self, request: Request, error: RowError) -> None:
        """End a request, wherever it stands, without letting others use its KV."""
        self._finisher.fail(request, error)

    def schedule(self) -> StepPlan | None:
        """Plan the next step.

        Returns:
            The plan; None if no request is left to run, or where the last ones ended
            while memory was sought (:meth:`take_finished` has them: call again).

        Raises:
            EngineError: requests are left but none can run; the state is in the message.
        """
        builder = PlanBuilder(budget=self.step_tokens, swap_out=self._unplanned_swap_out)
        self._unplanned_swap_out = []
        self._in_flight.growth.clear()
        self.blocks.begin_step()
        self._continue_running(builder)
        if not builder.preempted:
            self._admitter.fill(builder)
        self._look_ahead()
        if not len(builder.all_indices()):
            if self.num_unfinished and not self._queues.finished and not self._in_flight.steps:
                raise EngineError(f"no request can be scheduled: {self.describe()}")
            # Nothing runs until the next plan, so the blocks are as they were until then.
            self._unplanned_swap_out = builder.swap_out
            return None
        return self._plan(builder)

    def advance(self) -> None:
        """Assume that all requests of the newest step go on, before its output is there.

        Called once after each :meth:`schedule` that returned a plan. Each output grows by a
        placeholder, a number below 0 (``StepPlan.token_ids``). A request that this brings to
        its length has ended: its blocks and its batch index are freed, and only its last token
        is still to come. For any other end :meth:`update` corrects the assumption.

        The next step may be scheduled before the output of this one is there, unless a sample
        needs the host first (``SampleBatch.needs_host``).
        """
        self.blocks.end_step()
        self._output_processor.append_placeholders()

    def update(self, output: StepOutput) -> None:
        """Take the output of the oldest step that :meth:`advance` was called for.

        A request that turns out to have ended may be part of the next step already, where it
        computes a token too many: that is removed from its account, and its token there will
        be dropped. Its blocks can be given away at once, since the device runs one step after
        another.
        """
        self._output_processor.process(output)

    def limit_step(self, num_tokens: int) -> None:
        """Schedule at most so many tokens a step from now on; the fixed limits still hold."""
        self.step_tokens = min(num_tokens, self._limits.max_num_batched_tokens)

    def demand_blocks(self) -> int:
        """Count the blocks that running and preempted requests want at this moment."""
        demand = self.blocks.pool.num_owned
        demand += self.swap_space.num_blocks - self.swap_space.num_free
        for request in self.waiting:
            if not request.account.num_preemptions:
                break  # preempted ones come first
            demand += self.blocks.most_blocks_for(len(request.token_ids))
        return demand

    def describe(self) -> str:
        """Describe queues and pool in one line."""
        pool = self.blocks.pool
        head = self.waiting[0] if self.waiting else None
        waits = f", first waiting needs {len(head.token_ids)} tokens" if head else ""
        return (
            f"{len(self.running)} running, {len(self.swapped)} swapped, "
            f"{len(self.waiting)} waiting{waits}; pool of {pool.num_blocks} blocks of "
            f"{self.blocks.block_size}: {pool.num_free} free, {pool.num_cached} cached, "
            f"{pool.num_owned} owned"
        )

    # -- one step ---------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Tell the blocks where the future begins; before any of them is released."""
        self.blocks.last_arrival = self._queues.last_arrival

    def _continue_running(self, builder: PlanBuilder) -> None:
        """Return the running rows their tokens, in the order of their start."""
        self._release_out_of_window()
        # Where all that the budget reaches have to leave, those after them take their place.
        while len(self.running) and not len(builder.indices):
            indices = self.running.indices()
            lengths = builder.cut(self.running, indices, self.running.uncomputed(indices))
            indices, lengths = indices[lengths > 0], lengths[lengths > 0]
            if not len(indices):
                break
            self._grow_tables(builder, indices, lengths)
            # Some may have had to leave.
            stayed = self.running.is_taken(indices)
            builder.indices, builder.lengths = indices[stayed], lengths[stayed]
        builder.budget -= int(builder.lengths.sum())
        self.running.advance(builder.indices, builder.lengths)
        self._publish_rows(builder.indices, builder.lengths)

    def _release_out_of_window(self) -> None:
        window = self.blocks.window
        if window is None:
            return
        indices = self.running.indices()
        num_computed = self.running.num_computed[indices]
        unseen = (num_computed - window.num_tokens + 1) // self.blocks.block_size
        for request in self.running.requests(indices[unseen > self.running.num_released[indices]]):
            self.blocks.release_out_of_window(request)
            self.running.take_release(request)

    def _grow_tables(self, builder: PlanBuilder, indices: IntArray, lengths: IntArray) -> None:
        """Grow the tables of rows that run out of slots in this step."""
        ends = self.running.num_computed[indices] + lengths
        short = ends > self.running.num_blocks[indices] * self.blocks.block_size
        requests = self.running.requests(indices[short])
        grown = []
        for request, end in zip(requests, ends[short].tolist(), strict=True):
            held, peak = len(request.block_table), request.account.peak_blocks
            if request.status is Status.RUNNING and self._grow_or_preempt(builder, request, end):
                builder.grown.add(request.request_id)
                self._in_flight.growth[request.request_id] = len(request.block_table) - held, peak
                grown.append(request)
        self.running.take_tables(grown)

    def _grow_or_preempt(self, builder: PlanBuilder, request: Request, num_tokens: int) -> bool:
        """Grow a running request, preempting others; False if it had to leave itself."""
        while not self.blocks.grow(request, num_tokens):
            candidates = [r for r in self.running if r.request_id not in builder.grown]
            victim = min(candidates, key=_worth)
            if victim is request and len(self.running) == 1:
                # It fills the pool alone: no preemption could ever help it.
                self._finisher.fill_pool(request)
                return False
            self._preempt(builder, victim)
            if victim is request:
                return False
        return True

    def _publish_rows(self, indices: IntArray, lengths: IntArray) -> None:
        """Enter what rows compute of their prompts in this step in the index."""
        starts = self.running.num_computed[indices] - lengths
        prefilling = starts < self.running.num_prompt_tokens[indices]
        for request in self.running.requests(indices[prefilling]):
            self.blocks.publish(request)

    def _plan(self, builder: PlanBuilder) -> StepPlan:
        indices, lengths = builder.all_indices(), builder.all_lengths()
        self._count(indices, lengths)
        sampling = np.flatnonzero(self.running.uncomputed(indices) == 0)
        sampled = indices[sampling]
        samples = self.running.samples(sampling, sampled, self._stop_rules.banned_now)
        log_targets: tuple[LogTarget, ...] = ()
        if (self.running.end_logits[indices] > 0).any():
            given, logged, log_targets = self.running.logged(indices, lengths, sampling)
            samples = replace(samples, given=given, logged=logged)
        self._num_steps += 1
        plan = build_plan(
            self.running,
            indices,
            lengths,
            samples,
            step=self._num_steps - 1,
            block_size=self.blocks.block_size,
            swap_out=builder.swap_out,
            swap_in=builder.swap_in,
            copies=builder.copies,
        )
        in_flight = InFlightStep(plan, self.running.snapshot(sampled), log_targets)
        self._in_flight.steps.append(in_flight)
        return plan

    def _count(self, indices: IntArray, lengths: IntArray) -> None:
        """Count a step's tokens as recomputed, prefill or decode tokens."""
        running = self.running
        ends = running.num_computed[indices]
        starts = ends - lengths
        again = np.maximum(0, np.minimum(running.max_computed[indices], ends) - starts)
        prefill = np.minimum(running.num_prompt_tokens[indices], ends) - starts - again
        prefill = np.maximum(0, prefill)
        recomputed = int(again.sum())
        self.counters.recomputed_tokens += recomputed
        self.counters.prefill_tokens += int(prefill.sum())
        self.counters.decode_tokens += int((lengths - again - prefill).sum())
        if recomputed:
            requests = self.running.requests(indices)
            for request, count in zip(requests, again.tolist(), strict=True):
                request.account.recomputed_tokens += count

    # -- preemption -------------------------------------------------------------------

    def _preempt(self, builder: PlanBuilder, victim: Request) -> None:
        builder.preempted = True
        self.counters.preemptions += 1
        victim.account.num_preemptions += 1
        self.running.leave(victim)
        victim.max_computed = max(victim.max_computed, victim.num_computed)
        self.blocks.publish_all(victim)
        if self.blocks.most_blocks_for(len(victim.token_ids)) > self.blocks.pool.num_blocks:
            # Even alone it could not hold its next token.
            self._finisher.fill_pool(victim)
            return
        if self._swapper.take_out(victim, builder.swap_out):
            victim.status = Status.SWAPPED
            insort(self.swapped, victim, key=by_arrival)
        else:
            victim.status = Status.WAITING
            # Only requests preempted before it can come first: this is a short search.
            self.waiting.insert(bisect(self.waiting, victim.arrival, key=by_arrival), victim)
            self._look_ahead()
        self.blocks.release(victim)
