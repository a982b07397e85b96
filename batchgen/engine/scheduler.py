"""Which request runs which tokens next, and who makes room when memory runs out.

There are no phases: a request's computed tokens chase its known tokens under one token
budget, running requests before swapped ones, those before waiting ones (after vLLM V1's
scheduler). All decisions are integers; the result is a frozen step plan. Who starts is in
``starts``, what sampled tokens change in ``outcomes``, how a request leaves in ``exits``.
"""

from bisect import bisect, insort
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchgen.engine.admission import Admission, AdmissionPolicy
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.costs import PreemptionCosts
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.draft import Draft
from batchgen.engine.exits import Exits
from batchgen.engine.outcomes import Outcomes
from batchgen.engine.plan_builder import Copies, build_plan
from batchgen.engine.queues import Queues, by_arrival
from batchgen.engine.request import Request, Status
from batchgen.engine.running import RunningRequests
from batchgen.engine.starts import Starts
from batchgen.engine.step import IntArray, StepPlan
from batchgen.engine.stopping import StopRules
from batchgen.engine.swap import PreemptionPolicy, Swapper, SwapSpace
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
    """Order requests by what is lost if they make room, the least first."""
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
        self.blocks = blocks
        self.swap_space = swap_space
        self.counters = counters = SchedulerCounters()
        self.costs = costs or PreemptionCosts()
        self.step_tokens = limits.max_num_batched_tokens
        self._queues = queues = Queues(RunningRequests(limits.max_num_seqs))
        self.waiting, self.running, self.swapped = queues.waiting, queues.running, queues.swapped
        self._stop_rules = stop_rules
        self._limits = limits
        self._admission = Admission(admission, blocks)
        self._swapper = Swapper(blocks, swap_space, preemption, self.costs, counters)
        self._exits = Exits(queues, blocks, self._swapper, counters, self._admission.lengths, clock)
        self._outcomes = Outcomes(self.running, stop_rules, self._exits, counters, clock)
        self._starts = Starts(
            queues, blocks, self._admission, self._swapper, counters, limits.max_num_seqs, clock
        )
        self._unread = self._exits.unread
        self._sampled: IntArray = np.empty(0, dtype=np.int64)
        self._unplanned_swap_out: Copies = []
        self._num_steps = 0

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

    def take_finished(self) -> list[Request]:
        """Hand over the requests that ended since the last call."""
        return self._queues.take_finished()

    def fail(self, request: Request, error: RowError) -> None:
        """End a request, wherever it stands, without letting others use its KV."""
        self._exits.fail(request, error)

    def schedule(self) -> StepPlan | None:
        """Plan the next step.

        Returns:
            The plan; None where no request is left to run, or where the last ones ended
            while memory was sought (:meth:`take_finished` has them: call again).

        Raises:
            EngineError: requests are left but none can run; the state is in the message.
        """
        draft = Draft(budget=self.step_tokens, swap_out=self._unplanned_swap_out)
        self._unplanned_swap_out = []
        self._unread.growth.clear()
        self.blocks.begin_step()
        self._continue_running(draft)
        if not draft.preempted:
            self._starts.fill(draft)
        self._look_ahead()
        if not len(draft.all_seats()):
            if self.num_unfinished and not self._queues.finished and not self._unread.sittings:
                raise EngineError(f"no request can be scheduled: {self.describe()}")
            # Nothing runs until the next plan, so the blocks are as they were until then.
            self._unplanned_swap_out = draft.swap_out
            return None
        return self._plan(draft)

    def commit(self, plan: StepPlan, tokens: npt.ArrayLike) -> None:
        """Take the sampled tokens of a plan, in the order of its samples.

        Args:
            plan: the plan that :meth:`schedule` returned last.
            tokens: one token a sample; ``NO_TOKEN`` where the logits were not numbers,
                ``NO_LEGAL_TOKEN`` where every token was ruled out.
        """
        assert len(self._unread.sittings) == 1
        self.expect(plan)
        self.resolve(plan, tokens)

    def expect(self, plan: StepPlan) -> None:
        """Go on from a plan whose tokens are not read yet, so that the next can be planned.

        Whatever is sampled, each row's output grows by one token, for which a number below 0
        stands (``StepPlan.token_ids``). A row that this brings to its length has ended: it
        leaves its blocks and its seat, and only its last token is still to be read. Any other
        row is taken to go on; :meth:`resolve` knows better a step later.

        No sample of the plan may need the host before the next step
        (``SampleBatch.needs_host``).
        """
        self.blocks.end_step()
        assert len(self._unread.sittings[-1].seats) == len(plan.samples)
        self._outcomes.expect()

    def resolve(self, plan: StepPlan, tokens: npt.ArrayLike) -> None:
        """Take the tokens of the oldest plan that :meth:`expect` was called for.

        A row that turns out to have ended may be part of the next plan already, where it
        computes a token more than it should: that is taken back from its account, and its
        token there will be dropped. Its blocks can be given away at once, since the device
        does one step after another.

        Args:
            plan: the plan.
            tokens: as for :meth:`commit`.
        """
        assert len(self._unread.sittings[0].seats) == len(plan.samples)
        self._outcomes.resolve(tokens)

    def limit_step(self, num_tokens: int) -> None:
        """Plan no step of more tokens from now on; the limits hold all the same."""
        self.step_tokens = min(num_tokens, self._limits.max_num_batched_tokens)

    def demand_blocks(self) -> int:
        """Count the blocks that running and preempted requests want at this moment."""
        demand = self.blocks.pool.num_owned
        demand += self.swap_space.num_blocks - self.swap_space.num_free
        for request in self.waiting:
            if not request.account.num_preemptions:
                break  # preempted ones stand in front
            demand += self.blocks.most_blocks_for(len(request.token_ids))
        return demand

    def describe(self) -> str:
        """Say in a line how queues and pool stand."""
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

    def _continue_running(self, draft: Draft) -> None:
        """Give the running rows their tokens, in the order of their start."""
        self._release_behind_windows()
        # Where all that the budget reaches have to leave, those behind them take their place.
        while len(self.running) and not len(draft.seats):
            seats = self.running.seats()
            lengths = draft.cut(self.running, seats, self.running.uncomputed(seats))
            seats, lengths = seats[lengths > 0], lengths[lengths > 0]
            if not len(seats):
                break
            self._make_room_for(draft, seats, lengths)
            # Some may have had to leave.
            stayed = self.running.is_taken(seats)
            draft.seats, draft.lengths = seats[stayed], lengths[stayed]
        draft.budget -= int(draft.lengths.sum())
        self.running.advance(draft.seats, draft.lengths)
        self._publish_rows(draft.seats, draft.lengths)

    def _release_behind_windows(self) -> None:
        window = self.blocks.window
        if window is None:
            return
        seats = self.running.seats()
        num_computed = self.running.num_computed[seats]
        unseen = (num_computed - window.num_tokens + 1) // self.blocks.block_size
        for request in self.running.requests(seats[unseen > self.running.num_released[seats]]):
            self.blocks.release_behind_window(request)
            self.running.take_release(request)

    def _make_room_for(self, draft: Draft, seats: IntArray, lengths: IntArray) -> None:
        """Grow the tables of rows that run out of slots in this step."""
        ends = self.running.num_computed[seats] + lengths
        short = ends > self.running.num_blocks[seats] * self.blocks.block_size
        requests = self.running.requests(seats[short])
        grown = []
        for request, end in zip(requests, ends[short].tolist(), strict=True):
            held, peak = len(request.block_table), request.account.peak_blocks
            if request.status is Status.RUNNING and self._make_room(draft, request, end):
                draft.grown.add(request.request_id)
                self._unread.growth[request.request_id] = len(request.block_table) - held, peak
                grown.append(request)
        self.running.take_tables(grown)

    def _make_room(self, draft: Draft, request: Request, num_tokens: int) -> bool:
        """Grow a running request, preempting others; False where it had to leave itself."""
        while not self.blocks.grow(request, num_tokens):
            candidates = [r for r in self.running if r.request_id not in draft.grown]
            victim = min(candidates, key=_worth)
            if victim is request and len(self.running) == 1:
                # It fills the pool alone: no preemption could ever help it.
                self._exits.fill_pool(request)
                return False
            self._preempt(draft, victim)
            if victim is request:
                return False
        return True

    def _publish_rows(self, seats: IntArray, lengths: IntArray) -> None:
        """Enter what rows compute of their prompts in this step in the index."""
        starts = self.running.num_computed[seats] - lengths
        prefilling = starts < self.running.num_prompt_tokens[seats]
        for request in self.running.requests(seats[prefilling]):
            self.blocks.publish(request)

    def _plan(self, draft: Draft) -> StepPlan:
        seats, lengths = draft.all_seats(), draft.all_lengths()
        self._count(seats, lengths)
        sampling = np.flatnonzero(self.running.uncomputed(seats) == 0)
        self._sampled = seats[sampling]
        self._unread.sittings.append(self.running.sitting(self._sampled))
        samples = self.running.samples(sampling, self._sampled, self._stop_rules.banned_now)
        if (self.running.end_logits[seats] > 0).any():
            given, logged = self.running.logged(seats, lengths, sampling)
            samples = replace(samples, given=given, logged=logged)
        self._num_steps += 1
        return build_plan(
            self.running,
            seats,
            lengths,
            samples,
            step=self._num_steps - 1,
            block_size=self.blocks.block_size,
            swap_out=draft.swap_out,
            swap_in=draft.swap_in,
            copies=draft.copies,
        )

    def _count(self, seats: IntArray, lengths: IntArray) -> None:
        """Tell the tokens of a step apart: again, prompt, own."""
        running = self.running
        ends = running.num_computed[seats]
        starts = ends - lengths
        again = np.maximum(0, np.minimum(running.max_computed[seats], ends) - starts)
        prefill = np.minimum(running.num_prompt_tokens[seats], ends) - starts - again
        prefill = np.maximum(0, prefill)
        recomputed = int(again.sum())
        self.counters.recomputed_tokens += recomputed
        self.counters.prefill_tokens += int(prefill.sum())
        self.counters.decode_tokens += int((lengths - again - prefill).sum())
        if recomputed:
            requests = self.running.requests(seats)
            for request, count in zip(requests, again.tolist(), strict=True):
                request.account.recomputed_tokens += count

    # -- preemption -------------------------------------------------------------------

    def _preempt(self, draft: Draft, victim: Request) -> None:
        draft.preempted = True
        self.counters.preemptions += 1
        victim.account.num_preemptions += 1
        self.running.leave(victim)
        victim.max_computed = max(victim.max_computed, victim.num_computed)
        self.blocks.publish_all(victim)
        if self.blocks.most_blocks_for(len(victim.token_ids)) > self.blocks.pool.num_blocks:
            # Even alone it could not hold its next token.
            self._exits.fill_pool(victim)
            return
        if self._swapper.take_out(victim, draft.swap_out):
            victim.status = Status.SWAPPED
            insort(self.swapped, victim, key=by_arrival)
        else:
            victim.status = Status.WAITING
            # Only requests preempted before it can stand in front: this is a short search.
            self.waiting.insert(bisect(self.waiting, victim.arrival, key=by_arrival), victim)
            self._look_ahead()
        self.blocks.release(victim)
