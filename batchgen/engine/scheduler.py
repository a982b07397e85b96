"""Which request runs which tokens next, and who makes room when memory runs out.

There are no phases: a request's computed tokens chase its known tokens under one token
budget, running requests before swapped ones, those before waiting ones (after vLLM V1's
scheduler). All decisions are integers; the result is a frozen step plan.
"""

from bisect import bisect, insort
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from batchgen.engine.admission import Admission, AdmissionPolicy
from batchgen.engine.block_manager import BlockManager, Claim
from batchgen.engine.costs import PreemptionCosts
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.plan_builder import Copies, build_plan
from batchgen.engine.request import FinishReason, Request, Status, SwappedBlocks
from batchgen.engine.running import RunningRequests, Sitting
from batchgen.engine.step import NO_LEGAL_TOKEN, Constraint, IntArray, StepPlan
from batchgen.engine.stopping import StopRules
from batchgen.engine.swap import PreemptionPolicy, Swapper, SwapSpace
from batchgen.errors import EngineError, RowError, RowErrorType

# Rows that let their leader go first in one step; bounds the search behind them.
_MAX_DEFERRED = 128
# Logits that the logs of one step's prompts may ask for; bounds what the runtime holds of them.
_MOST_LOGITS = 256
# Tokens that a row must gain to wait although the step has room for it.
_WORTH_WAITING_TOKENS = 4


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's fixed bounds.

    Attributes:
        max_num_seqs: requests running at once.
        max_num_batched_tokens: tokens in one step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int


def _no_seats() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _Step:
    """The step being planned.

    Attributes:
        budget: tokens that are left.
        logits: logits that are left for the logs of prompts.
        seats, lengths: the running rows that go on, and tokens of each.
        started_seats, started_lengths: the same of rows that start in this step.
        grown: ids of running requests that took blocks in this step.
        kept: blocks to keep free for the running rows' growth; None until it is asked for.
    """

    budget: int
    logits: int = _MOST_LOGITS
    seats: IntArray = field(default_factory=_no_seats)
    lengths: IntArray = field(default_factory=_no_seats)
    started_seats: list[int] = field(default_factory=list)
    started_lengths: list[int] = field(default_factory=list)
    swap_out: Copies = field(default_factory=list)
    swap_in: Copies = field(default_factory=list)
    copies: Copies = field(default_factory=list)
    grown: set[int] = field(default_factory=set)
    kept: int | None = None
    preempted: bool = False


def _within(budget: int, wanted: IntArray) -> IntArray:
    """Cut [R] wanted tokens off where the budget ends."""
    before = np.cumsum(wanted) - wanted
    cut: IntArray = np.minimum(wanted, np.maximum(0, budget - before))
    return cut


def _without_token(request: Request, mark: int) -> RowError:
    """Say why a request got no token."""
    if mark != NO_LEGAL_TOKEN:
        message = "the model's logits are not numbers (NaN) for this row"
        return RowError(RowErrorType.ENGINE_ERROR, message)
    message = f"after {request.num_output_tokens} tokens of output no token is allowed any more"
    problem = request.constraint.problem if request.constraint is not None else None
    return RowError(
        RowErrorType.UNSATISFIABLE_CONSTRAINT,
        f"{message}: {problem or 'what structured.* allows, min_tokens holds back'}",
    )


def _settle_forced(request: Request, constraint: Constraint) -> None:
    """Settle the tokens that the constraint leaves no choice for.

    They are the same as if they had been taken without a step, but each is sampled, since
    its log-probability is wanted.
    """
    request.forced = request.forced[1:] if request.forced else constraint.forced()


def _by_arrival(request: Request) -> int:
    return request.arrival


def _worth(request: Request) -> tuple[int, int, int]:
    """Order requests by what is lost if they make room, the least first."""
    return -request.priority, request.num_output_tokens, -request.arrival


class Scheduler:
    """Holds the queues and plans one step at a time.

    A request is in exactly one of ``waiting``, ``running`` and ``swapped`` until it
    leaves through :meth:`_finish`, the one exit, which frees all it holds.

    Attributes:
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
        self.counters = SchedulerCounters()
        self.costs = costs or PreemptionCosts()
        self.waiting: deque[Request] = deque()
        self.running = RunningRequests(limits.max_num_seqs)
        self.swapped: list[Request] = []
        self._stop_rules = stop_rules
        self.step_tokens = limits.max_num_batched_tokens
        self._limits = limits
        self._admission = Admission(admission, blocks)
        self._swapper = Swapper(blocks, swap_space, preemption, self.costs, self.counters)
        self._clock = clock
        self._sampled = _no_seats()
        # Who samples in the plans whose tokens are not read yet: at most two.
        self._unread: deque[Sitting] = deque()
        self._num_ending = 0
        self._unplanned_swap_out: Copies = []
        # By request: blocks that the last plan added to its table, and its peak before.
        self._growth: dict[int, tuple[int, int]] = {}
        self._num_steps = 0
        self._finished: list[Request] = []
        self._arrivals = 0

    @property
    def num_unfinished(self) -> int:
        """Requests in any queue."""
        return len(self.waiting) + len(self.running) + len(self.swapped) + self._num_ending

    # -- from outside ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; one that can never fit the pool fails at once."""
        request.arrival = self._arrivals
        self._arrivals += 1
        if request.num_prompt_tokens > request.max_total_tokens:
            message = (
                f"the prompt and a choice come to {request.num_prompt_tokens} tokens, the model "
                f"takes {request.max_total_tokens}"
            )
            self.fail(request, RowError(RowErrorType.PROMPT_TOO_LONG, message))
            return
        needed = self.blocks.most_blocks_for(request.num_prompt_tokens + 1)
        if needed > self.blocks.pool.num_blocks:
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
        finished, self._finished = self._finished, []
        return finished

    def schedule(self) -> StepPlan | None:
        """Plan the next step.

        Returns:
            The plan; None where no request is left to run, or where the last ones ended
            while memory was sought (:meth:`take_finished` has them: call again).

        Raises:
            EngineError: requests are left but none can run; the state is in the message.
        """
        step = _Step(budget=self.step_tokens, swap_out=self._unplanned_swap_out)
        self._unplanned_swap_out = []
        self._growth.clear()
        self.blocks.begin_step()
        self._continue_running(step)
        if not step.preempted:
            self._resume_swapped(step)
            self._admit_waiting(step)
        self._look_ahead()
        seats = np.concatenate((step.seats, np.array(step.started_seats, dtype=np.int64)))
        if not len(seats):
            if self.num_unfinished and not self._finished and not self._unread:
                raise EngineError(f"no request can be scheduled: {self.describe()}")
            # Nothing runs until the next plan, so the blocks are as they were until then.
            self._unplanned_swap_out = step.swap_out
            return None
        lengths = np.concatenate((step.lengths, np.array(step.started_lengths, dtype=np.int64)))
        return self._plan(step, seats, lengths)

    def commit(self, plan: StepPlan, tokens: npt.ArrayLike) -> None:
        """Take the sampled tokens of a plan, in the order of its samples.

        Args:
            plan: the plan that :meth:`schedule` returned last.
            tokens: one token a sample; ``NO_TOKEN`` where the logits were not numbers,
                ``NO_LEGAL_TOKEN`` where every token was ruled out.
        """
        assert len(self._unread) == 1
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
        unread = self._unread[-1]
        assert len(unread.seats) == len(plan.samples)
        places = np.flatnonzero(self.running.still_sits(unread))
        seats = unread.seats[places]
        scored = self.running.is_scored[seats]
        self.running.append(seats[~scored], -1 - places[~scored])
        full = self.running.num_known[seats] >= self.running.max_total_tokens[seats]
        for request in self.running.requests(seats[scored | full]):
            self._leave_early(request)

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
        unread, chosen = self._unread.popleft(), np.asarray(tokens, dtype=np.int64)
        assert len(chosen) == len(unread.seats) == len(plan.samples)
        there = self.running.still_sits(unread)
        seats, good = unread.seats, there & (chosen >= 0)
        self.running.settle(seats[good], chosen[good])
        self.counters.sampled_tokens += int(good.sum())
        self._note_first_tokens(seats[good])
        looking = ~good
        looking[good] = self._stop_rules.may_end(self.running, seats[good])
        ended = np.flatnonzero(looking)
        requests: list[Request] = unread.requests[ended].tolist()
        self.running.requests(seats[ended[there[ended]]])
        for request, token in zip(requests, chosen[ended].tolist(), strict=True):
            if request.status is not Status.FINISHED:
                self._resolve_one(request, token)

    def _resolve_one(self, request: Request, token: int) -> None:
        """Give a request the token that it waited for, and end it where that ends it."""
        if token < 0:
            if request.has_unread_token:
                request.token_ids.pop()
            self.fail(request, _without_token(request, token))
            return
        if request.scores is not None:
            request.timeline.first_token = self._clock()
            self._finish(request, FinishReason.STOP, None)
            return
        if request.has_unread_token:
            request.token_ids[-1] = token
            self.counters.sampled_tokens += 1
            if request.timeline.first_token is None:
                request.timeline.first_token = self._clock()
        reasons = self._stop_rules.check(request)
        if reasons is None and request.status is Status.ENDING:
            reasons = FinishReason.LENGTH, None
        if reasons is None and request.constraint is not None:
            if request.params.logprobs is not None:
                _settle_forced(request, request.constraint)
            else:
                reasons = self._take_forced(request, request.constraint)
        if reasons is not None:
            self._withdraw(request)
            self._finish(request, *reasons)

    def _leave_early(self, request: Request) -> None:
        """Let a request go whose last token is sampled, but not read."""
        request.left_in_index = self.blocks.private_nodes(request)
        self.running.leave(request)
        self.blocks.release(request)
        request.status = Status.ENDING
        self._num_ending += 1
        if request.scores is None:
            self._admission.lengths.add(request.num_output_tokens)

    def _fill_pool(self, request: Request) -> None:
        """End a request that no memory could ever help: its length is what it has."""
        if request.has_unread_token:
            self._leave_early(request)
        else:
            self._finish(request, FinishReason.LENGTH, None)

    def _take_back_growth(self, request: Request) -> None:
        """Take from a request's account what it took for a step after its end."""
        seat = request.seat
        if not self._unread or self.running.num_computed[seat] < self.running.num_known[seat]:
            return
        self.counters.decode_tokens -= 1
        if request.request_id in self._growth:
            self.blocks.take_back(request, *self._growth[request.request_id])

    def _take_forced(
        self, request: Request, constraint: Constraint
    ) -> tuple[FinishReason, str | None] | None:
        """Append the tokens that the constraint leaves no choice for.

        The next step computes them together, as a chunk. Returns what ended the request, or
        None.
        """
        seat = np.array([request.seat])
        for token in constraint.forced():
            self.running.append(seat, np.array([token]))
            self.running.requests(seat)
            self.counters.sampled_tokens += 1
            self.counters.forced_tokens += 1
            reasons = self._stop_rules.check(request)
            if reasons is not None:
                return reasons
        return None

    def _note_first_tokens(self, seats: IntArray) -> None:
        running = self.running
        first = running.num_known[seats] == running.num_prompt_tokens[seats] + 1
        now = self._clock()
        for request in running.requests(seats[first]):
            request.timeline.first_token = now

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
        self.blocks.last_arrival = (self.waiting[0].arrival if self.waiting else self._arrivals) - 1

    def _continue_running(self, step: _Step) -> None:
        """Give the running rows their tokens, in the order of their start."""
        self._release_behind_windows()
        # Where all that the budget reaches have to leave, those behind them take their place.
        while len(self.running) and not len(step.seats):
            seats = self.running.seats()
            lengths = _within(step.budget, self.running.uncomputed(seats))
            lengths = self._within_logits(step, seats, lengths)
            seats, lengths = seats[lengths > 0], lengths[lengths > 0]
            if not len(seats):
                break
            self._make_room_for(step, seats, lengths)
            # Some may have had to leave.
            stayed = self.running.is_taken(seats)
            step.seats, step.lengths = seats[stayed], lengths[stayed]
        step.budget -= int(step.lengths.sum())
        self.running.advance(step.seats, step.lengths)
        self._publish_rows(step.seats, step.lengths)

    def _within_logits(self, step: _Step, seats: IntArray, lengths: IntArray) -> IntArray:
        """Cut [R] lengths where the logs of the rows would ask for too many logits."""
        wanted = self.running.num_logits(seats, lengths)
        # One is the sample's own, which is there in any case.
        wanted[wanted <= 1] = 0
        allowed = _within(step.logits, wanted)
        step.logits -= int(allowed.sum())
        return np.where(wanted > 0, np.maximum(1, lengths - (wanted - allowed)), lengths)

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

    def _make_room_for(self, step: _Step, seats: IntArray, lengths: IntArray) -> None:
        """Grow the tables of rows that run out of slots in this step."""
        ends = self.running.num_computed[seats] + lengths
        short = ends > self.running.num_blocks[seats] * self.blocks.block_size
        requests = self.running.requests(seats[short])
        grown = []
        for request, end in zip(requests, ends[short].tolist(), strict=True):
            held, peak = len(request.block_table), request.account.peak_blocks
            if request.status is Status.RUNNING and self._make_room(step, request, end):
                step.grown.add(request.request_id)
                self._growth[request.request_id] = len(request.block_table) - held, peak
                grown.append(request)
        self.running.take_tables(grown)

    def _make_room(self, step: _Step, request: Request, num_tokens: int) -> bool:
        """Grow a running request, preempting others; False where it had to leave itself."""
        while not self.blocks.grow(request, num_tokens):
            candidates = [r for r in self.running if r.request_id not in step.grown]
            victim = min(candidates, key=_worth)
            if victim is request and len(self.running) == 1:
                # It fills the pool alone: no preemption could ever help it.
                self._fill_pool(request)
                return False
            self._preempt(step, victim)
            if victim is request:
                return False
        return True

    def _publish_rows(self, seats: IntArray, lengths: IntArray) -> None:
        """Enter what rows compute of their prompts in this step in the index."""
        starts = self.running.num_computed[seats] - lengths
        prefilling = starts < self.running.num_prompt_tokens[seats]
        for request in self.running.requests(seats[prefilling]):
            self.blocks.publish(request)

    def _plan(self, step: _Step, seats: IntArray, lengths: IntArray) -> StepPlan:
        self._count(seats, lengths)
        sampling = np.flatnonzero(self.running.uncomputed(seats) == 0)
        self._sampled = seats[sampling]
        self._unread.append(self.running.sitting(self._sampled))
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
            swap_out=step.swap_out,
            swap_in=step.swap_in,
            copies=step.copies,
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

    # -- admission --------------------------------------------------------------------

    def _resume_swapped(self, step: _Step) -> None:
        while self.swapped and self._has_place(step) and self._swap_in(step, self.swapped[0]):
            self.swapped.pop(0)

    def _admit_waiting(self, step: _Step) -> None:
        """Start waiting rows: first those that gain nothing by waiting, then the others.

        A row that shares a part of a block with one that started in this very step would
        have to compute it; in the next step it is copied. Rows further back that depend
        on nobody take its place meanwhile. Where they do not fill the step, rows start
        all the same that would gain but little.
        """
        deferred: list[Request] = []
        while self._may_admit(step) and len(deferred) < _MAX_DEFERRED:
            request = self.waiting.popleft()
            claim = self.blocks.claim(request)
            if claim.match.num_pending_tokens:
                deferred.append(request)
            elif not self._start_if_it_fits(step, request, claim):
                break
        still_waiting = [request for request in deferred if not self._start_early(step, request)]
        self.waiting.extendleft(reversed(still_waiting))

    def _may_admit(self, step: _Step) -> bool:
        return bool(self.waiting) and not self.swapped and self._has_place(step)

    def _has_place(self, step: _Step) -> bool:
        return step.budget > 0 and len(self.running) < self._limits.max_num_seqs

    def _start_early(self, step: _Step, request: Request) -> bool:
        if not self._has_place(step):
            return False
        claim = self.blocks.claim(request)
        if claim.match.num_pending_tokens >= _WORTH_WAITING_TOKENS:
            return False
        fits = self._fits(step, request, claim.needed, claim.held)
        if fits:
            self._start(step, request, claim)
        return fits

    def _start_if_it_fits(self, step: _Step, request: Request, claim: Claim) -> bool:
        if self._fits(step, request, claim.needed, claim.held):
            self._start(step, request, claim)
            return True
        self.waiting.appendleft(request)
        return False

    def _start(self, step: _Step, request: Request, claim: Claim) -> None:
        self._take(step, request, claim)
        if request.timeline.admitted is None:
            request.timeline.admitted = self._clock()
            request.account.cached_tokens = request.num_computed
            self.counters.cached_tokens += request.num_computed
            self.counters.started_requests += 1
        self._run(step, request)

    def _take(self, step: _Step, request: Request, claim: Claim) -> None:
        copy = self.blocks.take(request, claim)
        if copy is not None:
            step.copies.append(copy)

    def _fits(self, step: _Step, request: Request, needed: int, held: int) -> bool:
        """Whether taking ``needed`` available blocks leaves what the policy keeps free.

        Where it does, the request's own growth is kept free from now on; ``held`` is what
        it then has, shared blocks included.
        """
        available = self.blocks.pool.num_available
        if needed > available:
            return False
        if not len(self.running):
            step.kept = self._admission.growth(request, held)
            return True
        if step.kept is None:
            step.kept = self._admission.growth_of_all(self.running)
        growth = self._admission.growth(request, held)
        if needed + step.kept + growth > available:
            return False
        step.kept += growth
        return True

    def _run(self, step: _Step, request: Request) -> None:
        """Let a request that has its blocks start."""
        request.status = Status.RUNNING
        self.running.join(request)
        seat = np.array([request.seat])
        wanted = np.array([min(request.num_uncomputed, step.budget)])
        num_tokens = int(self._within_logits(step, seat, wanted)[0])
        request.num_computed += num_tokens
        self.running.num_computed[seat] = request.num_computed
        step.budget -= num_tokens
        step.started_seats.append(request.seat)
        step.started_lengths.append(num_tokens)
        self.blocks.publish(request)

    # -- preemption -------------------------------------------------------------------

    def _preempt(self, step: _Step, victim: Request) -> None:
        step.preempted = True
        self.counters.preemptions += 1
        victim.account.num_preemptions += 1
        self.running.leave(victim)
        victim.max_computed = max(victim.max_computed, victim.num_computed)
        self.blocks.publish_all(victim)
        if self.blocks.most_blocks_for(len(victim.token_ids)) > self.blocks.pool.num_blocks:
            # Even alone it could not hold its next token.
            self._fill_pool(victim)
            return
        if self._swapper.take_out(victim, step.swap_out):
            victim.status = Status.SWAPPED
            insort(self.swapped, victim, key=_by_arrival)
        else:
            victim.status = Status.WAITING
            # Only requests preempted before it can stand in front: this is a short search.
            self.waiting.insert(bisect(self.waiting, victim.arrival, key=_by_arrival), victim)
            self._look_ahead()
        self.blocks.release(victim)

    def _swap_in(self, step: _Step, request: Request) -> bool:
        """Bring a swapped request back to run; False where there is no room yet.

        Leading blocks come from the index where they are still there, the rest from
        the CPU pool. Where neither has a block, the request is computed again.
        """
        assert request.swapped is not None
        if request.swapped.behind_window:
            return self._swap_in_behind_window(step, request, request.swapped)
        claim = self.blocks.claim(request)
        if not self._fits(step, request, claim.needed, claim.held):
            return False
        copy, request.swapped = request.swapped, None
        num_matched = len(claim.match.chain)
        if num_matched >= copy.first:
            # The CPU pool has all that follows; no part of a block need be copied.
            self.blocks.take(request, replace(claim, match=claim.match.whole_blocks()))
            self._swapper.bring_back(request, copy, num_matched, step.swap_in)
        else:
            self._take(step, request, claim)
        self.swap_space.release(copy.blocks)
        self._run(step, request)
        return True

    def _swap_in_behind_window(self, step: _Step, request: Request, copy: SwappedBlocks) -> bool:
        needed = self.blocks.needed_behind_window(request)
        if not self._fits(step, request, needed, needed):
            return False
        self.blocks.take_behind_window(request)
        request.swapped = None
        self._swapper.bring_back(request, copy, copy.first, step.swap_in)
        self.swap_space.release(copy.blocks)
        self._run(step, request)
        return True

    # -- the one exit -----------------------------------------------------------------

    def fail(self, request: Request, error: RowError) -> None:
        """End a request, wherever it stands, without letting others use its KV."""
        self._withdraw(request)
        request.error = error
        self.blocks.discard(request)
        self._finish(request, FinishReason.ERROR, None)

    def _withdraw(self, request: Request) -> None:
        """Take a request that is about to end out of its queue."""
        if request.status is Status.WAITING and request.arrival >= 0:
            with suppress(ValueError):
                self.waiting.remove(request)
        elif request.status is Status.SWAPPED:
            self.swapped.remove(request)
        elif request.status is Status.RUNNING:
            self._take_back_growth(request)

    def _finish(self, request: Request, reason: FinishReason, stop_reason: str | None) -> None:
        self.running.leave(request)
        if request.has_unread_token:
            request.token_ids.pop()
        was_ending = request.status is Status.ENDING
        self._num_ending -= was_ending
        request.left_in_index = []
        self.blocks.release(request)
        if request.swapped is not None:
            self.swap_space.release(request.swapped.blocks)
            request.swapped = None
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.timeline.finished = self._clock()
        self.counters.finished_requests += 1
        if request.error is None and request.scores is None and not was_ending:
            self._admission.lengths.add(request.num_output_tokens)
        self._finished.append(request)
