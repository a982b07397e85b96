"""What becomes of the rows of a plan once its tokens are sampled, and once they are read.

The two moments may lie a step apart (after the asynchronous scheduling of vLLM V1): first
every row is taken to go on, so that the next step can be planned, then the tokens say who
has ended.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.exits import Exits
from batchgen.engine.request import FinishReason, Request, Status
from batchgen.engine.running import RunningRequests
from batchgen.engine.step import NO_LEGAL_TOKEN, Constraint, IntArray
from batchgen.engine.stopping import StopRules
from batchgen.errors import RowError, RowErrorType

_Ending = tuple[FinishReason, str | None]


class Outcomes:
    """Gives requests the tokens that they were waiting for."""

    def __init__(
        self,
        running: RunningRequests,
        stop_rules: StopRules,
        exits: Exits,
        counters: SchedulerCounters,
        clock: Callable[[], float],
    ) -> None:
        self._running = running
        self._stop_rules = stop_rules
        self._exits = exits
        self._counters = counters
        self._clock = clock

    def expect(self) -> None:
        """Let the rows of the newest plan go on, or end if this token is their last.

        See ``Scheduler.expect``.
        """
        running, unread = self._running, self._exits.unread.sittings[-1]
        places = np.flatnonzero(running.still_sits(unread))
        seats = unread.seats[places]
        scored = running.is_scored[seats]
        running.append(seats[~scored], -1 - places[~scored])
        full = running.num_known[seats] >= running.max_total_tokens[seats]
        for request in running.requests(seats[scored | full]):
            self._exits.leave_early(request)

    def resolve(self, tokens: npt.ArrayLike) -> None:
        """Settle the tokens of the oldest plan that :meth:`expect` was called for.

        See ``Scheduler.resolve``.
        """
        running, chosen = self._running, np.asarray(tokens, dtype=np.int64)
        unread = self._exits.unread.sittings.popleft()
        assert len(chosen) == len(unread.seats)
        there = running.still_sits(unread)
        seats, good = unread.seats, there & (chosen >= 0)
        running.settle(seats[good], chosen[good])
        self._counters.sampled_tokens += int(good.sum())
        self._note_first_tokens(seats[good])
        looking = ~good
        looking[good] = self._stop_rules.may_end(running, seats[good])
        ended = np.flatnonzero(looking)
        requests: list[Request] = unread.requests[ended].tolist()
        # Brings the objects up to date.
        running.requests(seats[ended[there[ended]]])
        for request, token in zip(requests, chosen[ended].tolist(), strict=True):
            if request.status is not Status.FINISHED:
                self._resolve_one(request, token)

    def _resolve_one(self, request: Request, token: int) -> None:
        """Give a request the token that it waited for, and end it where that ends it."""
        if token < 0:
            if request.has_unread_token:
                request.token_ids.pop()
            self._exits.fail(request, _without_token(request, token))
            return
        if request.scores is not None:
            request.timeline.first_token = self._clock()
            self._exits.finish(request, FinishReason.STOP, None)
            return
        if request.has_unread_token:
            request.token_ids[-1] = token
            self._counters.sampled_tokens += 1
            if request.timeline.first_token is None:
                request.timeline.first_token = self._clock()
        ending = self._ending_of(request)
        if ending is not None:
            self._exits.finish(request, *ending)

    def _ending_of(self, request: Request) -> _Ending | None:
        """Say what has ended a request, after the tokens that follow without a choice."""
        ending = self._stop_rules.check(request)
        if ending is None and request.status is Status.ENDING:
            return FinishReason.LENGTH, None
        if ending is not None or request.constraint is None:
            return ending
        if request.params.logprobs is None:
            return self._take_forced(request, request.constraint)
        _settle_forced(request, request.constraint)
        return None

    def _take_forced(self, request: Request, constraint: Constraint) -> _Ending | None:
        """Append the tokens that the constraint leaves no choice for.

        The next step computes them together, as a chunk. Returns what ended the request, or
        None.
        """
        seat = np.array([request.seat])
        for token in constraint.forced():
            self._running.append(seat, np.array([token]))
            self._running.requests(seat)
            self._counters.sampled_tokens += 1
            self._counters.forced_tokens += 1
            ending = self._stop_rules.check(request)
            if ending is not None:
                return ending
        return None

    def _note_first_tokens(self, seats: IntArray) -> None:
        running = self._running
        first = running.num_known[seats] == running.num_prompt_tokens[seats] + 1
        now = self._clock()
        for request in running.requests(seats[first]):
            request.timeline.first_token = now


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
