"""From the scheduler's decisions to the arrays of a step plan."""

from dataclasses import dataclass, field

import numpy as np

from batchgen.engine.input_batch import InputBatch
from batchgen.engine.step import IntArray, SampleBatch, StepPlan

Copies = list[tuple[int, int]]


def build_plan(
    running: InputBatch,
    indices: IntArray,
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
        indices: [R] the rows.
        lengths: [R] tokens that each row runs.
        samples: the tokens to sample.
        step: the step's number.
        block_size: tokens in a block.
        swap_out, swap_in, copies: pairs of source and target.
    """
    context_lens = running.num_computed[indices]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    row_of_token = np.repeat(np.arange(len(indices)), lengths)
    # Position of a token: its row's first position plus its place in the row.
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] + lengths - context_lens, lengths)
    widest = int(running.num_blocks[indices].max())
    tables = running.tables[indices, :widest]
    blocks = tables[row_of_token, positions // block_size].astype(np.int64)
    return StepPlan(
        step=step,
        token_ids=_token_ids(running, indices, starts),
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


def _token_ids(running: InputBatch, indices: IntArray, starts: IntArray) -> IntArray:
    """Collect the tokens: of most rows the one sampled last, of the others a slice."""
    tokens = np.empty(starts[-1], dtype=np.int64)
    tokens[starts[1:] - 1] = running.last_token[indices]
    lengths = np.diff(starts)
    sliced = np.flatnonzero((lengths > 1) | (running.uncomputed(indices) > 0))
    for row, request in zip(sliced.tolist(), running.requests(indices[sliced]), strict=True):
        end = request.num_computed
        tokens[starts[row] : starts[row + 1]] = request.token_ids[end - lengths[row] : end]
    return tokens


def _pairs(copies: Copies) -> IntArray:
    return np.array(copies, dtype=np.int64).reshape(-1, 2)


# Logits that the logs of one step's prompts may ask for; bounds what the runtime holds of them.
_MOST_LOGITS = 256


def _no_indices() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class PlanBuilder:
    """The step being planned.

    Attributes:
        budget: tokens that are left.
        logits: logits that are left for the logs of prompts.
        indices, lengths: the running rows that go on, and tokens of each.
        started_indices, started_lengths: the same of rows that start in this step.
        grown: ids of running requests that took blocks in this step.
        kept: blocks to keep free for the running rows' growth; None until it is asked for.
    """

    budget: int
    logits: int = _MOST_LOGITS
    indices: IntArray = field(default_factory=_no_indices)
    lengths: IntArray = field(default_factory=_no_indices)
    started_indices: list[int] = field(default_factory=list)
    started_lengths: list[int] = field(default_factory=list)
    swap_out: Copies = field(default_factory=list)
    swap_in: Copies = field(default_factory=list)
    copies: Copies = field(default_factory=list)
    grown: set[int] = field(default_factory=set)
    kept: int | None = None
    preempted: bool = False

    def cut(self, running: InputBatch, indices: IntArray, wanted: IntArray) -> IntArray:
        """Cut [R] wanted tokens of rows where the budgets of tokens and logits end.

        The logits are taken from their budget, the tokens are not.
        """
        lengths = _within(self.budget, wanted)
        logits = running.num_logits(indices, lengths)
        # One is the sample's own, which is there in any case.
        logits[logits <= 1] = 0
        allowed = _within(self.logits, logits)
        self.logits -= int(allowed.sum())
        return np.where(logits > 0, np.maximum(1, lengths - (logits - allowed)), lengths)

    def all_indices(self) -> IntArray:
        """Return [S] the indices of the step's rows, those that start in it last."""
        return np.concatenate((self.indices, np.array(self.started_indices, dtype=np.int64)))

    def all_lengths(self) -> IntArray:
        """Return [S] the tokens of each."""
        return np.concatenate((self.lengths, np.array(self.started_lengths, dtype=np.int64)))


def _within(budget: int, wanted: IntArray) -> IntArray:
    """Cut [R] wanted tokens off where the budget ends."""
    before = np.cumsum(wanted) - wanted
    cut: IntArray = np.minimum(wanted, np.maximum(0, budget - before))
    return cut
