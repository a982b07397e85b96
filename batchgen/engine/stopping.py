"""When a request ends, and the one way out that frees all it holds."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from batchgen.engine.admission import OutputLengths
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.input_batch import InFlightSteps, InputBatch
from batchgen.engine.preemption import Swapper
from batchgen.engine.queues import Queues
from batchgen.engine.request import FinishReason, Request, Status
from batchgen.engine.step import IntArray
from batchgen.errors import RowError


class StopRules:
    """The model's end-of-sequence ids and the rules that a request's parameters add."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int64)

    def may_end(self, running: InputBatch, indices: IntArray) -> npt.NDArray[np.bool_]:
        """Return which of [S] requests :meth:`check` has to look at; all others go on."""
        full = running.num_known[indices] >= running.max_total_tokens[indices]
        at_eos = np.isin(running.last_token[indices], self._eos)
        ends: npt.NDArray[np.bool_] = full | running.is_watched[indices] | at_eos
        return ends

    def check(self, request: Request) -> tuple[FinishReason, str | None] | None:
        """Return what the newest token ends the request with, if it does.

        Only generated tokens count. The order is: stop string, end of sequence, stop
        token, an output that its constraint lets nothing follow, repetition, length.

        Returns:
            The finish reason and the stop reason (None for an end of sequence, else the
            token id or the string), or None to go on.
        """
        params = request.params
        token = request.token_ids[-1]
        matched = request.text_stop.push(token) if request.text_stop else None
        repeats = request.repetition is not None and request.repetition.push(token)
        constraint = request.constraint
        if constraint is not None:
            constraint.push(token)
        may_stop = request.num_output_tokens > params.min_tokens
        if may_stop and matched is not None:
            request.stopped_by_text = True
            return FinishReason.STOP, matched
        if may_stop and token in self.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if may_stop and token in params.stop_token_ids:
            return FinishReason.STOP, str(token)
        return _end_of(request, repeats=may_stop and repeats)

    def banned_now(self, request: Request) -> tuple[int, ...]:
        """List the tokens that ``min_tokens`` or a bad word rules out for the next sample."""
        params = request.params
        bad = _ends_of_bad_words(request) if request.bad_words else ()
        if request.num_output_tokens >= params.min_tokens:
            return bad
        eos = () if params.ignore_eos else tuple(sorted(self.eos_token_ids))
        return eos + params.stop_token_ids + bad


def _end_of(request: Request, *, repeats: bool) -> tuple[FinishReason, None] | None:
    """Return how a request ends that no token or text has stopped, if it does."""
    if request.constraint is not None and request.constraint.is_complete:
        return FinishReason.STOP, None
    if repeats:
        return FinishReason.REPETITION, None
    if len(request.token_ids) >= request.max_total_tokens:
        return FinishReason.LENGTH, None
    return None


def _ends_of_bad_words(request: Request) -> tuple[int, ...]:
    """List the last tokens of the bad words whose other tokens are the end of the output."""
    longest = max(map(len, request.bad_words)) - 1
    begin = max(request.num_prompt_tokens, len(request.token_ids) - longest)
    tail = tuple(request.token_ids[begin:])
    return tuple(
        word[-1]
        for word in request.bad_words
        if not word[:-1] or tail[1 - len(word) :] == word[:-1]
    )


class RequestFinisher:
    """Ends requests: the single place that frees what they hold."""

    def __init__(
        self,
        queues: Queues,
        blocks: BlockManager,
        swapper: Swapper,
        counters: SchedulerCounters,
        lengths: OutputLengths,
        in_flight: InFlightSteps,
        clock: Callable[[], float],
    ) -> None:
        self._queues = queues
        self._blocks = blocks
        self._swapper = swapper
        self._counters = counters
        self._lengths = lengths
        self._clock = clock
        self._in_flight = in_flight

    def release_early(self, request: Request) -> None:
        """Free what a request holds whose last token is sampled but not processed yet."""
        request.left_in_index = self._blocks.private_nodes(request)
        self._queues.running.leave(request)
        self._blocks.release(request)
        request.status = Status.ENDING
        self._queues.num_ending += 1
        if not request.is_scored:
            self._lengths.add(request.num_output_tokens)

    def fill_pool(self, request: Request) -> None:
        """End a request that fills the pool alone, with the output that it has."""
        if request.has_placeholder:
            self.release_early(request)
        else:
            self._finish(request, FinishReason.LENGTH, None)

    def fail(self, request: Request, error: RowError) -> None:
        """End a request in whatever state it is, without letting others use its KV."""
        self._withdraw(request)
        request.error = error
        self._blocks.discard(request)
        self._finish(request, FinishReason.ERROR, None)

    def finish(self, request: Request, reason: FinishReason, stop_reason: str | None) -> None:
        """End a request in whatever state it is, with its reason."""
        self._withdraw(request)
        self._finish(request, reason, stop_reason)

    def _withdraw(self, request: Request) -> None:
        """Remove a request that is about to end from its queue."""
        self._queues.withdraw(request)
        if request.status is Status.RUNNING:
            self._take_back_growth(request)

    def _take_back_growth(self, request: Request) -> None:
        """Remove from a request's account what a step after its end took."""
        running, index = self._queues.running, request.batch_index
        is_ahead = running.num_computed[index] >= running.num_known[index]
        if not (self._in_flight.steps and is_ahead):
            return
        self._counters.decode_tokens -= 1
        if request.request_id in self._in_flight.growth:
            self._blocks.take_back(request, *self._in_flight.growth[request.request_id])

    def _finish(self, request: Request, reason: FinishReason, stop_reason: str | None) -> None:
        self._queues.running.leave(request)
        if request.has_placeholder:
            request.token_ids.pop()
        was_ending = request.status is Status.ENDING
        self._queues.num_ending -= was_ending
        request.left_in_index = []
        self._blocks.release(request)
        if request.swapped is not None:
            self._swapper.release(request.swapped)
            request.swapped = None
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.timeline.finished = self._clock()
        self._counters.finished_requests += 1
        if request.error is None and not request.is_scored and not was_ending:
            self._lengths.add(request.num_output_tokens)
        self._queues.finished.append(request)
