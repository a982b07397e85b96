"""The running requests: as objects, and as columns that a step reads of all of them at once.

At a thousand rows a step has no time for a look at each object. While a request runs, the
columns are the truth for what every step changes (tokens known and computed); its object
is brought up to date whenever it is handed out. Growth, publishing and the end look at
objects; planning, counting and sampling look at columns.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.logprobs import TokenLogprobs, logged_tokens
from batchgen.engine.request import Request
from batchgen.engine.step import (
    IntArray,
    LoggedTokens,
    SampleBatch,
    ScoredSample,
    SpecialSample,
    StepPlan,
)

Mask = npt.NDArray[np.bool_]

# Sampled tokens that a column holds back from the object.
_MOST_RECENT = 64


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """The requests at some indices of the batch when a step was scheduled.

    An index is given to another request once its own has left, so ``started`` tells whether the
    request is still there (:meth:`InputBatch.is_current`).

    Attributes:
        indices: [S] indices of the requests that the step samples for.
        started: [S] serial numbers of their starts.
        requests: [S] the requests.
    """

    indices: IntArray
    started: IntArray
    requests: npt.NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class LogTarget:
    """The log that some entries of a step's output go into, from token ``first`` on."""

    log: TokenLogprobs
    first: int


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A scheduled step whose output is not processed yet.

    Attributes:
        plan: what it computes.
        sampled: the requests that it samples for, in the order of its samples.
        log_targets: where its log-probabilities go, in the order of ``plan.samples.logged``.
    """

    plan: StepPlan
    sampled: BatchSnapshot
    log_targets: tuple[LogTarget, ...]


@dataclass(slots=True)
class InFlightSteps:
    """The steps whose outputs are not processed yet: at most two, the oldest first.

    Attributes:
        steps: these steps.
        growth: by request id, the blocks that the newest step added to its table, and the
            peak of its account before; taken back if the request turns out to have ended.
    """

    steps: deque[InFlightStep] = field(default_factory=deque)
    growth: dict[int, tuple[int, int]] = field(default_factory=dict)


class InputBatch:
    """The running requests as arrays over ``max_num_seqs`` indices (vLLM's ``InputBatch``).

    A request keeps its index while it runs; entries at free indices mean nothing.

    Attributes:
        num_known, num_computed: [indices] tokens; the objects may be older than these two.
        last_token: [indices] the newest known token.
        num_blocks, num_released: [indices] entries of the block table; those out of the window.
        max_computed: [indices] tokens that were computed before it was last preempted.
        num_prompt_tokens, max_tokens, max_total_tokens: [indices] of the request.
        ignores_eos: [indices] an end of sequence does not end it.
        is_watched: [indices] only its object can say whether a token ends it.
        is_special: [indices] its samples need more than the columns hold.
        is_scored: [indices] it wants log-probabilities and no token.
        first_logits, end_logits: [indices] the positions of which logits are wanted for its log.
        tables: [indices, width] int32 block tables, 0 past a table's end.
    """

    def __init__(self, max_num_seqs: int) -> None:
        def column(dtype: Any) -> Any:
            return np.zeros(max_num_seqs, dtype=dtype)

        self.num_known: IntArray = column(np.int64)
        self.num_computed: IntArray = column(np.int64)
        self.last_token: IntArray = column(np.int64)
        self.num_blocks: IntArray = column(np.int64)
        self.num_released: IntArray = column(np.int64)
        self.max_computed: IntArray = column(np.int64)
        self.num_prompt_tokens: IntArray = column(np.int64)
        self.max_tokens: IntArray = column(np.int64)
        self.max_total_tokens: IntArray = column(np.int64)
        self.ignores_eos: Mask = column(np.bool_)
        self.is_watched: Mask = column(np.bool_)
        self.is_special: Mask = column(np.bool_)
        self.is_scored: Mask = column(np.bool_)
        self.first_logits: IntArray = column(np.int64)
        self.end_logits: IntArray = column(np.int64)
        self.tables = np.zeros((max_num_seqs, 16), dtype=np.int32)
        self._temperature = column(np.float64)
        self._top_p = column(np.float64)
        self._min_p = column(np.float64)
        self._top_k = column(np.int64)
        self._noise_key = column(np.uint64)
        self._recent = np.zeros((max_num_seqs, _MOST_RECENT), dtype=np.int32)
        self._num_recent: IntArray = column(np.int64)
        self._requests = np.full(max_num_seqs, None, dtype=object)
        self._is_taken: Mask = column(np.bool_)
        self._started: IntArray = column(np.int64)
        self._num_started = 0
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._order: IntArray | None = None

    def __len__(self) -> int:
        """Count the running requests."""
        return len(self.tables) - len(self._free)

    def __iter__(self) -> Iterator[Request]:
        """Walk over the requests, brought up to date, in the order of their start."""
        return iter(self.requests(self.indices()))

    def indices(self) -> IntArray:
        """Return the taken indices in the order in which their requests started."""
        if self._order is None:
            taken = np.flatnonzero(self._is_taken)
            self._order = taken[np.argsort(self._started[taken])]
        return self._order

    def requests(self, indices: IntArray) -> list[Request]:
        """Return the requests at some indices, brought up to date."""
        self.flush(indices)
        requests: list[Request] = self._requests[indices].tolist()
        return requests

    def flush(self, indices: IntArray) -> None:
        """Write what the arrays know of the requests at some indices to their objects."""
        requests = self._requests[indices].tolist()
        computed, counts = self.num_computed[indices].tolist(), self._num_recent[indices].tolist()
        for request, num_computed, count in zip(requests, computed, counts, strict=True):
            request.num_computed = num_computed
            if count:
                request.token_ids.extend(self._recent[request.batch_index, :count].tolist())
        self._num_recent[indices] = 0

    def is_taken(self, indices: IntArray) -> Mask:
        """Return which of some indices are taken."""
        return self._is_taken[indices]

    def snapshot(self, indices: IntArray) -> BatchSnapshot:
        """Remember the requests at some indices."""
        return BatchSnapshot(indices, self._started[indices], self._requests[indices])

    def is_current(self, snapshot: BatchSnapshot) -> Mask:
        """Return which requests of a snapshot are still at their indices."""
        indices = snapshot.indices
        stayed: Mask = self._is_taken[indices] & (self._started[indices] == snapshot.started)
        return stayed

    # -- changes ----------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """Add a request at a free index, with all it holds by now."""
        index = request.batch_index = self._free.pop()
        params = request.params
        self.num_known[index] = len(request.token_ids)
        self.num_computed[index] = request.num_computed
        self.last_token[index] = request.token_ids[-1]
        self.num_blocks[index] = 0
        self.num_released[index] = request.num_released
        self.max_computed[index] = request.max_computed
        self.num_prompt_tokens[index] = request.num_prompt_tokens
        self.max_tokens[index] = params.max_tokens
        self.max_total_tokens[index] = request.max_total_tokens
        self.ignores_eos[index] = params.ignore_eos
        is_constrained = request.constraint is not None
        self.is_watched[index] = (
            is_constrained
            or request.text_stop is not None
            or request.repetition is not None
            or bool(params.stop_token_ids)
        )
        self.is_special[index] = (
            is_constrained
            or params.changes_logits
            or params.min_tokens > 0
            or bool(request.bad_words)
        )
        self.is_scored[index] = request.is_scored
        self.first_logits[index] = request.first_logits
        self.end_logits[index] = 0 if request.logprobs is None else request.logprobs.end_logits
        self._temperature[index] = params.temperature
        self._top_p[index] = params.top_p
        self._min_p[index] = params.min_p
        self._top_k[index] = params.top_k
        self._noise_key[index] = request.noise_key
        self._num_recent[index] = 0
        self._requests[index] = request
        self._is_taken[index] = True
        self._started[index] = self._num_started
        self._num_started += 1
        self._order = None
        self.take_tables([request])

    def leave(self, request: Request) -> None:
        """Remove a request that stops running, and bring it up to date."""
        index = request.batch_index
        if index < 0:
            return
        self.flush(np.array([index]))
        self.tables[index, : self.num_blocks[index]] = 0
        self._requests[index] = None
        self._is_taken[index] = False
        self._free.append(index)
        self._order = None
        request.batch_index = -1

    def take_tables(self, requests: Iterable[Request]) -> None:
        """Take over what was appended to the tables of some requests."""
        for request in requests:
            index, table = request.batch_index, request.block_table
            filled = int(self.num_blocks[index])
            if len(table) > self.tables.shape[1]:
                missing = max(len(table), 2 * self.tables.shape[1]) - self.tables.shape[1]
                self.tables = np.pad(self.tables, ((0, 0), (0, missing)))
            if len(table) == filled + 1:
                self.tables[index, filled] = table[-1]
            else:
                self.tables[index, filled : len(table)] = table[filled:]
                # Blocks that are out of the window are none any more.
                self.tables[index, : request.num_released] = 0
            self.num_blocks[index] = len(table)

    def take_release(self, request: Request) -> None:
        """Take over that are out of the window leading blocks of a request's table."""
        self.tables[request.batch_index, : request.num_released] = 0
        self.num_released[request.batch_index] = request.num_released

    def advance(self, indices: IntArray, lengths: IntArray) -> None:
        """Count tokens as computed."""
        self.num_computed[indices] += lengths

    def append(self, indices: IntArray, tokens: IntArray) -> None:
        """Add a sampled token to each of some requests."""
        self.flush(indices[self._num_recent[indices] == _MOST_RECENT])
        self.num_known[indices] += 1
        self.last_token[indices] = tokens
        self._recent[indices, self._num_recent[indices]] = tokens
        self._num_recent[indices] += 1

    def settle(self, indices: IntArray, tokens: IntArray) -> None:
        """Replace the placeholder of each request's newest token by the sampled one."""
        self.last_token[indices] = tokens
        held_back = self._num_recent[indices] > 0
        columns = indices[held_back]
        self._recent[columns, self._num_recent[columns] - 1] = tokens[held_back]
        for index, token in zip(indices[~held_back], tokens[~held_back].tolist(), strict=True):
            self._requests[index].token_ids[-1] = token

    # -- what a step reads --------------------------------------------------------------

    def uncomputed(self, indices: IntArray) -> IntArray:
        """Count the known tokens that are still to be computed."""
        return self.num_known[indices] - self.num_computed[indices]

    def num_logits(self, indices: IntArray, lengths: IntArray) -> IntArray:
        """Count the logits that [R] rows want of their next [R] tokens for their logs."""
        starts = self.num_computed[indices]
        first = np.maximum(starts, self.first_logits[indices])
        count: IntArray = np.minimum(starts + lengths, self.end_logits[indices]) - first
        return np.maximum(0, count)

    def logged(
        self, indices: IntArray, lengths: IntArray, sampling: IntArray
    ) -> tuple[IntArray, tuple[LoggedTokens, ...], tuple[LogTarget, ...]]:
        """Return which logits of a step, whose tokens are counted already, go into logs.

        Args:
            indices: [R] the rows.
            lengths: [R] tokens of each.
            sampling: [S] the rows that sample.

        Returns:
            [P] places among the step's tokens, the tokens that are logged, and the log that
            each item of them goes into.
        """
        ends = self.num_computed[indices]
        firsts = np.maximum(ends - lengths, self.first_logits[indices])
        lasts = np.minimum(ends, self.end_logits[indices])
        rows = np.flatnonzero(firsts < lasts)
        requests = self.requests(indices[rows])
        logs = [
            (row, first, last, request.logprobs, request.token_ids)
            for row, first, last, request in zip(
                rows.tolist(), firsts[rows].tolist(), lasts[rows].tolist(), requests, strict=True
            )
            if request.logprobs is not None
        ]
        logged = logged_tokens(logs, sampling)
        starts = np.cumsum(lengths) - ends
        counts = np.array([len(each.token_ids) for each in logged], dtype=np.int64)
        places = np.repeat(starts[rows] + firsts[rows], counts)
        targets = tuple(LogTarget(log, first + 1) for _, first, _, log, _ in logs)
        return places + _counting(counts), logged, targets

    def num_held_blocks(self) -> int:
        """Count the entries of all block tables, shared blocks once for each table."""
        indices = self.indices()
        return int((self.num_blocks[indices] - self.num_released[indices]).sum())

    def samples(
        self, rows: IntArray, indices: IntArray, banned: Callable[[Request], tuple[int, ...]]
    ) -> SampleBatch:
        """Describe the tokens to sample.

        Args:
            rows: [S] rows of the step.
            indices: [S] the indices of their requests.
            banned: gives the tokens that a request may not generate now.
        """
        return SampleBatch(
            rows=rows,
            temperature=self._temperature[indices],
            top_p=self._top_p[indices],
            min_p=self._min_p[indices],
            top_k=self._top_k[indices],
            noise_keys=self._noise_key[indices],
            positions=self.num_known[indices] - self.num_prompt_tokens[indices],
            special=tuple(
                SpecialSample(
                    index=index,
                    params=request.params,
                    token_ids=request.token_ids,
                    num_prompt_tokens=request.num_prompt_tokens,
                    banned=banned(request),
                    constraint=request.constraint,
                    forced=request.forced[0] if request.forced else None,
                    has_bad_words=bool(request.bad_words),
                )
                for index, request in self._marked(self.is_special, indices)
            ),
            scored=tuple(
                ScoredSample(index, request.scored_tokens)
                for index, request in self._marked(self.is_scored, indices)
                if request.scored_tokens is not None
            ),
        )

    def _marked(self, marks: Mask, indices: IntArray) -> Iterator[tuple[int, Request]]:
        """Walk over those of [S] requests that are marked, and where they stand."""
        at = np.flatnonzero(marks[indices])
        return zip(at.tolist(), self.requests(indices[at]), strict=True)


def _counting(sizes: IntArray) -> IntArray:
    """Count from 0 in each of some stretches, one after the other."""
    counted: IntArray = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return counted
