"""The running requests: as objects, and as columns that a step reads of all of them at once.

At a thousand rows a step has no time for a look at each object. While a request runs, the
columns are the truth for what every step changes (tokens known and computed); its object
is brought up to date whenever it is handed out. Growth, publishing and the end look at
objects; planning, counting and sampling look at columns.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.logprobs import logged_tokens
from batchgen.engine.request import Request
from batchgen.engine.step import (
    IntArray,
    LoggedTokens,
    SampleBatch,
    ScoredSample,
    SpecialSample,
)

Mask = npt.NDArray[np.bool_]

# Sampled tokens that a column holds back from the object.
_MOST_RECENT = 64


@dataclass(frozen=True, slots=True)
class Sitting:
    """Who sat in some seats at a moment: [S] seats, numbers of their starts, requests."""

    seats: IntArray
    started: IntArray
    requests: npt.NDArray[np.object_]


class RunningRequests:
    """Requests with a seat, which is an entry in every column and a row of the table matrix.

    Entries of empty seats mean nothing.

    Attributes:
        num_known, num_computed: [seats] tokens; the objects lag behind these two.
        last_token: [seats] the newest known token.
        num_blocks, num_released: [seats] entries of the block table; those a window has left.
        max_computed: [seats] tokens that were computed before it last made room.
        num_prompt_tokens, max_tokens, max_total_tokens: [seats] of the request.
        ignores_eos: [seats] an end of sequence does not end it.
        is_watched: [seats] only its object can say whether a token ends it.
        is_special: [seats] its samples need more than the columns hold.
        is_scored: [seats] it wants log-probabilities and no token.
        first_logits, end_logits: [seats] the positions of which logits are wanted for its log.
        tables: [seats, width] int32 block tables, 0 behind a table's end.
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
        return iter(self.requests(self.seats()))

    def seats(self) -> IntArray:
        """Give the taken seats in the order in which their requests started."""
        if self._order is None:
            taken = np.flatnonzero(self._is_taken)
            self._order = taken[np.argsort(self._started[taken])]
        return self._order

    def requests(self, seats: IntArray) -> list[Request]:
        """Give the requests in some seats, brought up to date."""
        requests: list[Request] = self._requests[seats].tolist()
        computed, counts = self.num_computed[seats].tolist(), self._num_recent[seats].tolist()
        for request, num_computed, count in zip(requests, computed, counts, strict=True):
            request.num_computed = num_computed
            if count:
                request.token_ids.extend(self._recent[request.seat, :count].tolist())
        self._num_recent[seats] = 0
        return requests

    def is_taken(self, seats: IntArray) -> Mask:
        """Say which of some seats are taken."""
        return self._is_taken[seats]

    def sitting(self, seats: IntArray) -> Sitting:
        """Note who sits in some seats."""
        return Sitting(seats, self._started[seats], self._requests[seats])

    def still_sits(self, sitting: Sitting) -> Mask:
        """Say which of those who sat there have not left since."""
        seats = sitting.seats
        stayed: Mask = self._is_taken[seats] & (self._started[seats] == sitting.started)
        return stayed

    # -- changes ----------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """Give a request a seat, with all it holds by now."""
        seat = request.seat = self._free.pop()
        params = request.params
        self.num_known[seat] = len(request.token_ids)
        self.num_computed[seat] = request.num_computed
        self.last_token[seat] = request.token_ids[-1]
        self.num_blocks[seat] = 0
        self.num_released[seat] = request.num_released
        self.max_computed[seat] = request.max_computed
        self.num_prompt_tokens[seat] = request.num_prompt_tokens
        self.max_tokens[seat] = params.max_tokens
        self.max_total_tokens[seat] = request.max_total_tokens
        self.ignores_eos[seat] = params.ignore_eos
        is_constrained = request.constraint is not None
        self.is_watched[seat] = (
            is_constrained
            or request.text_stop is not None
            or request.repetition is not None
            or bool(params.stop_token_ids)
        )
        self.is_special[seat] = (
            is_constrained
            or params.changes_logits
            or params.min_tokens > 0
            or bool(request.bad_words)
        )
        self.is_scored[seat] = request.scores is not None
        self.first_logits[seat] = request.first_logits
        self.end_logits[seat] = 0 if request.logprobs is None else request.logprobs.end_logits
        self._temperature[seat] = params.temperature
        self._top_p[seat] = params.top_p
        self._min_p[seat] = params.min_p
        self._top_k[seat] = params.top_k
        self._noise_key[seat] = request.noise_key
        self._num_recent[seat] = 0
        self._requests[seat] = request
        self._is_taken[seat] = True
        self._started[seat] = self._num_started
        self._num_started += 1
        self._order = None
        self.take_tables([request])

    def leave(self, request: Request) -> None:
        """Free the seat of a request that stops running, and bring it up to date."""
        seat = request.seat
        if seat < 0:
            return
        self.requests(np.array([seat]))
        self.tables[seat, : self.num_blocks[seat]] = 0
        self._requests[seat] = None
        self._is_taken[seat] = False
        self._free.append(seat)
        self._order = None
        request.seat = -1

    def take_tables(self, requests: Iterable[Request]) -> None:
        """Take over what was appended to the tables of some requests."""
        for request in requests:
            seat, table = request.seat, request.block_table
            filled = int(self.num_blocks[seat])
            if len(table) > self.tables.shape[1]:
                missing = max(len(table), 2 * self.tables.shape[1]) - self.tables.shape[1]
                self.tables = np.pad(self.tables, ((0, 0), (0, missing)))
            if len(table) == filled + 1:
                self.tables[seat, filled] = table[-1]
            else:
                self.tables[seat, filled : len(table)] = table[filled:]
                # Blocks that the window has left are none any more.
                self.tables[seat, : request.num_released] = 0
            self.num_blocks[seat] = len(table)

    def take_release(self, request: Request) -> None:
        """Take over that the window has left leading blocks of a request's table."""
        self.tables[request.seat, : request.num_released] = 0
        self.num_released[request.seat] = request.num_released

    def advance(self, seats: IntArray, lengths: IntArray) -> None:
        """Count tokens as computed."""
        self.num_computed[seats] += lengths

    def append(self, seats: IntArray, tokens: IntArray) -> None:
        """Add a sampled token to each of some requests."""
        self.requests(seats[self._num_recent[seats] == _MOST_RECENT])
        self.num_known[seats] += 1
        self.last_token[seats] = tokens
        self._recent[seats, self._num_recent[seats]] = tokens
        self._num_recent[seats] += 1

    def settle(self, seats: IntArray, tokens: IntArray) -> None:
        """Put tokens in the place of what stands for each request's newest one."""
        self.last_token[seats] = tokens
        held_back = self._num_recent[seats] > 0
        columns = seats[held_back]
        self._recent[columns, self._num_recent[columns] - 1] = tokens[held_back]
        for seat, token in zip(seats[~held_back], tokens[~held_back].tolist(), strict=True):
            self._requests[seat].token_ids[-1] = token

    # -- what a step reads --------------------------------------------------------------

    def uncomputed(self, seats: IntArray) -> IntArray:
        """Count the known tokens that are still to be computed."""
        return self.num_known[seats] - self.num_computed[seats]

    def num_logits(self, seats: IntArray, lengths: IntArray) -> IntArray:
        """Count the logits that [R] rows want of their next [R] tokens for their logs."""
        starts = self.num_computed[seats]
        first = np.maximum(starts, self.first_logits[seats])
        count: IntArray = np.minimum(starts + lengths, self.end_logits[seats]) - first
        return np.maximum(0, count)

    def logged(
        self, seats: IntArray, lengths: IntArray, sampling: IntArray
    ) -> tuple[IntArray, tuple[LoggedTokens, ...]]:
        """Say which logits of a step, whose tokens are counted already, go into logs.

        Args:
            seats: [R] the rows.
            lengths: [R] tokens of each.
            sampling: [S] the rows that sample.

        Returns:
            [P] places among the step's tokens, and where the logits go.
        """
        ends = self.num_computed[seats]
        firsts = np.maximum(ends - lengths, self.first_logits[seats])
        lasts = np.minimum(ends, self.end_logits[seats])
        rows = np.flatnonzero(firsts < lasts)
        requests = self.requests(seats[rows])
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
        return places + _counting(counts), logged

    def num_held_blocks(self) -> int:
        """Count the entries of all block tables, shared blocks once for each table."""
        seats = self.seats()
        return int((self.num_blocks[seats] - self.num_released[seats]).sum())

    def samples(
        self, rows: IntArray, seats: IntArray, banned: Callable[[Request], tuple[int, ...]]
    ) -> SampleBatch:
        """Describe the tokens to sample.

        Args:
            rows: [S] rows of the step.
            seats: [S] the seats of their requests.
            banned: gives the tokens that a request may not generate now.
        """
        return SampleBatch(
            rows=rows,
            temperature=self._temperature[seats],
            top_p=self._top_p[seats],
            min_p=self._min_p[seats],
            top_k=self._top_k[seats],
            noise_keys=self._noise_key[seats],
            positions=self.num_known[seats] - self.num_prompt_tokens[seats],
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
                for index, request in self._marked(self.is_special, seats)
            ),
            scored=tuple(
                ScoredSample(index, request.scored_tokens, request.scores)
                for index, request in self._marked(self.is_scored, seats)
                if request.scored_tokens is not None and request.scores is not None
            ),
        )

    def _marked(self, marks: Mask, seats: IntArray) -> Iterator[tuple[int, Request]]:
        """Walk over those of [S] requests that are marked, and where they stand."""
        at = np.flatnonzero(marks[seats])
        return zip(at.tolist(), self.requests(seats[at]), strict=True)


def _counting(sizes: IntArray) -> IntArray:
    """Count from 0 in each of some stretches, one behind the other."""
    counted: IntArray = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return counted
