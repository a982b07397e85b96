"""Process a step's output: append sampled tokens, detect the end of requests.

In two phases, a step apart when steps overlap (after vLLM V1's asynchronous scheduling).
First every request is assumed to go on and gets a placeholder for its token, so that the next
step can be scheduled; then the output replaces placeholders and says which requests ended.
"""

from collections.abc import Callable

import numpy as np

from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.input_batch import InFlightStep, InFlightSteps, InputBatch
from batchgen.engine.request import FinishReason, Request, Status
from batchgen.engine.step import NO_LEGAL_TOKEN, Constraint, IntArray, StepOutput
from batchgen.engine.stopping import RequestFinisher, StopRules
from batchgen.errors import RowError, RowErrorType

_Ending = tuple[FinishReason, str | None]


class OutputProcessor:
    """Appends placeholders, then replaces them by the output of the step."""

    def __init__(
        self,
        running: InputBatch,
        in_flight: InFlightSteps,
        stop_rules: StopRules,
        exits: RequestFinisher,
        counters: SchedulerCounters,
        clock: Callable[[], float],
    ) -> None:
        self._running = running
        self._in_flight = in_flight
        self._stop_rules = stop_rules
        self._finisher = exits
        self._counters = counters
        self._clock = clock

    def append_placeholders(self) -> None:
        """Add a placeholder to each request that the newest step samples for.

        See :meth:`Scheduler.advance`.
        """
        running, sampled = self._running, self._in_flight.steps[-1].sampled
        places = np.flatnonzero(running.is_current(sampled))
        indices = sampled.indices[places]
        scored = running.is_scored[indices]
        running.append(indices[~scored], -1 - places[~scored])
        full = running.num_known[indices] >= running.max_total_tokens[indices]
        for request in running.requests(indices[scored | full]):
            self._finisher.release_early(request)

    def process(self, output: StepOutput) -> None:
        """Take the output of the oldest step in flight; see :meth:`Scheduler.update`."""
        running, chosen = self._running, output.token_ids
        step = self._in_flight.steps.popleft()
        sampled = step.sampled
        assert len(chosen) == len(sampled.indices)
        _store_scores_and_logprobs(step, output)
        current = running.is_current(sampled)
        indices, good = sampled.indices, current & (chosen >= 0)
        running.settle(indices[good], chosen[good])
        self._counters.sampled_tokens += int(good.sum())
        self._note_first_tokens(indices[good])
        checked = ~good
        checked[good] = self._stop_rules.may_end(running, indices[good])
        places = np.flatnonzero(checked)
        requests: list[Request] = sampled.requests[places].tolist()
        running.flush(indices[places[current[places]]])
        for request, token in zip(requests, chosen[places].tolist(), strict=True):
            if request.status is not Status.FINISHED:
                self._process_one(request, token)

    def _process_one(self, request: Request, token: int) -> None:
        """Take the sampled token of a request, and end the request if that ends it."""
        if token < 0:
            if request.has_placeholder:
                request.token_ids.pop()
            self._finisher.fail(request, _without_token(request, token))
            return
        if request.is_scored:
            request.timeline.first_token = self._clock()
            self._finisher.finish(request, FinishReason.STOP, None)
            return
        if request.has_placeholder:
            request.token_ids[-1] = token
            self._counters.sampled_tokens += 1
            if request.timeline.first_token is None:
                request.timeline.first_token = self._clock()
        ending = self._ending_of(request)
        if ending is not None:
            self._finisher.finish(request, *ending)

    def _ending_of(self, request: Request) -> _Ending | None:
        """Return what has ended a request, if anything, after its forced tokens."""
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
        """Append the forced tokens: those that the constraint leaves no choice for.

        The next step computes them together, as a chunk. Returns what ended the request, or
        None.
        """
        index = np.array([request.batch_index])
        for token in constraint.forced():
            self._running.append(index, np.array([token]))
            self._running.flush(index)
            self._counters.sampled_tokens += 1
            self._counters.forced_tokens += 1
            ending = self._stop_rules.check(request)
            if ending is not None:
                return ending
        return None

    def _note_first_tokens(self, indices: IntArray) -> None:
        running = self._running
        first = running.num_known[indices] == running.num_prompt_tokens[indices] + 1
        now = self._clock()
        for request in running.requests(indices[first]):
            request.timeline.first_token = now


def _without_token(request: Request, mark: int) -> RowError:
    """Return the error of a request that got no token."""
    if mark != NO_LEGAL_TOKEN:
        message = "the model's logits are not numbers (NaN) for this row"
        return RowError(RowErrorType.ENGINE_ERROR, message)
    message = f"after {request.num_output_tokens} tokens of output no token is allowed any more"
    problem = request.constraint.problem if request.constraint is not None else None
    return RowError(
        RowErrorType.UNSATISFIABLE_CONSTRAINT,
        f"{message}: {problem or 'what structured.* allows, min_tokens holds back'}",
    )


def _store_scores_and_logprobs(step: InFlightStep, output: StepOutput) -> None:
    """Hand the log-probabilities of a step to the requests that asked for them."""
    samples = step.plan.samples
    for scored, scores in zip(samples.scored, output.scores, strict=True):
        step.sampled.requests[scored.index].scores = scores
    for logged, target, entries in zip(
        samples.logged, step.log_targets, output.logprobs, strict=True
    ):
        target.log.rows(target.first, target.first + logged.num_entries).put(entries)


def _settle_forced(request: Request, constraint: Constraint) -> None:
    """Settle the tokens that the constraint leaves no choice for.

    They are the same as if they had been taken without a step, but each is sampled, since
    its log-probability is wanted.
    """
    request.forced = request.forced[1:] if request.forced else constraint.forced()
