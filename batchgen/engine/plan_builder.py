"""From the scheduler's decisions to the arrays of a step plan."""

import numpy as np

from batchgen.engine.running import RunningRequests
from batchgen.engine.step import IntArray, SampleBatch, StepPlan

Copies = list[tuple[int, int]]


def build_plan(
    running: RunningRequests,
    seats: IntArray,
    lengths: IntArray,
    samples: SampleBatch,
    *,
    step: int,
    block_size: int,
    swap_out: Copies,
    swap_in: Copies,
    copies: Copies,
) -> StepPlan:
    """Make the plan of a step.

    Args:
        running: the running requests; the step's tokens are counted as computed already.
        seats: [R] the rows.
        lengths: [R] tokens that each row runs.
        samples: the tokens to sample.
        step: the step's number.
        block_size: tokens in a block.
        swap_out, swap_in, copies: pairs of source and target.
    """
    context_lens = running.num_computed[seats]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    row_of_token = np.repeat(np.arange(len(seats)), lengths)
    # Position of a token: its row's first position plus its place in the row.
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] + lengths - context_lens, lengths)
    widest = int(running.num_blocks[seats].max())
    tables = running.tables[seats, :widest]
    blocks = tables[row_of_token, positions // block_size].astype(np.int64)
    return StepPlan(
        step=step,
        token_ids=_token_ids(running, seats, starts),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        query_starts=starts,
        context_lens=context_lens,
        block_tables=tables,
        samples=samples,
        swap_out=_pairs(swap_out),
        swap_in=_pairs(swap_in),
        copies=_pairs(copies),
    )


def _token_ids(running: RunningRequests, seats: IntArray, starts: IntArray) -> IntArray:
    """Collect the tokens: of most rows the one sampled last, of the others a slice."""
    tokens = np.empty(starts[-1], dtype=np.int64)
    tokens[starts[1:] - 1] = running.last_token[seats]
    lengths = np.diff(starts)
    sliced = np.flatnonzero((lengths > 1) | (running.uncomputed(seats) > 0))
    for row, request in zip(sliced.tolist(), running.requests(seats[sliced]), strict=True):
        end = request.num_computed
        tokens[starts[row] : starts[row + 1]] = request.token_ids[end - lengths[row] : end]
    return tokens


def _pairs(copies: Copies) -> IntArray:
    return np.array(copies, dtype=np.int64).reshape(-1, 2)
