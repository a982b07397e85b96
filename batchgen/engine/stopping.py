"""When a request has generated its last token."""

import numpy as np
import numpy.typing as npt

from batchgen.engine.request import FinishReason, Request
from batchgen.engine.running import RunningRequests
from batchgen.engine.step import IntArray


class StopRules:
    """The model's end-of-sequence ids and the rules that a request's parameters add."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int64)

    def may_end(self, running: RunningRequests, seats: IntArray) -> npt.NDArray[np.bool_]:
        """Say which of [S] rows :meth:`check` has to look at; it says no for all others."""
        full = running.num_known[seats] >= running.max_total_tokens[seats]
        at_eos = np.isin(running.last_token[seats], self._eos)
        ends: npt.NDArray[np.bool_] = full | running.is_watched[seats] | at_eos
        return ends

    def check(self, request: Request) -> tuple[FinishReason, str | None] | None:
        """Say whether the newest token ends the request.

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
        """List the tokens that ``min_tokens`` or a bad word holds back from the next sample."""
        params = request.params
        bad = _ends_of_bad_words(request) if request.bad_words else ()
        if request.num_output_tokens >= params.min_tokens:
            return bad
        eos = () if params.ignore_eos else tuple(sorted(self.eos_token_ids))
        return eos + params.stop_token_ids + bad


def _end_of(request: Request, *, repeats: bool) -> tuple[FinishReason, None] | None:
    """Say whether a request ends that no token or text has stopped."""
    if request.constraint is not None and request.constraint.is_complete:
        return FinishReason.STOP, None
    if repeats:
        return FinishReason.REPETITION, None
    if len(request.token_ids) >= request.max_total_tokens:
        return FinishReason.LENGTH, None
    return None


def _ends_of_bad_words(request: Request) -> tuple[int, ...]:
    """List the last tokens of the bad words of which all the rest stands at the output's end."""
    longest = max(map(len, request.bad_words)) - 1
    begin = max(request.num_prompt_tokens, len(request.token_ids) - longest)
    tail = tuple(request.token_ids[begin:])
    return tuple(
        word[-1]
        for word in request.bad_words
        if not word[:-1] or tail[1 - len(word) :] == word[:-1]
    )
