"""From the scheduler's decisions to the arrays of a step plan."""

from array import array

import numpy as np
import numpy.typing as npt

from batchgen.engine.request import Request
from batchgen.engine.step import IntArray, Sample, StepPlan


class PlanBuilder:
    """Builds step plans; keeps the running requests' block tables as one matrix.

    A running request has a seat: a row of the matrix. Its table only grows while it
    runs, so a step copies no more than what was appended since the last one.
    """

    def __init__(self, block_size: int, max_num_seqs: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((max_num_seqs, 16), dtype=np.int32)
        self._filled = [0] * max_num_seqs
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))
        self._step = 0

    def leave(self, request: Request) -> None:
        """Give up the seat of a request that stops running."""
        if request.seat >= 0:
            self._free_seats.append(request.seat)
            request.seat = -1

    def build(
        self,
        rows: list[tuple[Request, int]],
        samples: tuple[Sample, ...],
        swap_out: list[tuple[int, int]],
        swap_in: list[tuple[int, int]],
        copies: list[tuple[int, int]],
    ) -> StepPlan:
        """Make the plan for rows of (request, tokens to run), already counted as computed."""
        token_ids = array("i")
        for request, num_tokens in rows:
            end = request.num_computed
            token_ids.extend(request.token_ids[end - num_tokens : end])
        lengths = np.array([num_tokens for _, num_tokens in rows], dtype=np.int64)
        context_lens = np.array([request.num_computed for request, _ in rows], dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        row_of_token = np.repeat(np.arange(len(rows)), lengths)
        # Position of a token: its row's first position plus its place in the row.
        first = context_lens - lengths
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - first, lengths)
        tables = self._gather_tables(rows)
        blocks = tables[row_of_token, positions // self._block_size].astype(np.int64)
        plan = StepPlan(
            step=self._step,
            token_ids=np.frombuffer(token_ids, dtype=np.int32).astype(np.int64),
            positions=positions,
            slots=blocks * self._block_size + positions % self._block_size,
            query_starts=starts,
            context_lens=context_lens,
            block_tables=tables,
            samples=samples,
            swap_out=_pairs(swap_out),
            swap_in=_pairs(swap_in),
            copies=_pairs(copies),
        )
        self._step += 1
        return plan

    def _gather_tables(self, rows: list[tuple[Request, int]]) -> npt.NDArray[np.int32]:
        widest = max(len(request.block_table) for request, _ in rows)
        if widest > self._tables.shape[1]:
            wider = max(widest, 2 * self._tables.shape[1])
            missing = wider - self._tables.shape[1]
            self._tables = np.pad(self._tables, ((0, 0), (0, missing)))
        for request, _ in rows:
            self._update_seat(request)
        seats = [request.seat for request, _ in rows]
        lengths = np.array([len(request.block_table) for request, _ in rows])
        tables = self._tables[seats, :widest]
        tables[np.arange(widest) >= lengths[:, None]] = 0
        return tables

    def _update_seat(self, request: Request) -> None:
        if request.seat < 0:
            request.seat = self._free_seats.pop()
            self._filled[request.seat] = 0
        filled, table = self._filled[request.seat], request.block_table
        if filled < len(table):
            self._tables[request.seat, filled : len(table)] = table[filled:]
            self._filled[request.seat] = len(table)


def _pairs(copies: list[tuple[int, int]]) -> IntArray:
    return np.array(copies, dtype=np.int64).reshape(-1, 2)
