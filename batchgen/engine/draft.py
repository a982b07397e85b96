"""The step being planned: which rows go on, and what is left of its budgets."""

from dataclasses import dataclass, field

import numpy as np

from batchgen.engine.plan_builder import Copies
from batchgen.engine.running import RunningRequests
from batchgen.engine.step import IntArray

# Logits that the logs of one step's prompts may ask for; bounds what the runtime holds of them.
_MOST_LOGITS = 256


def _no_seats() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Draft:
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

    def cut(self, running: RunningRequests, seats: IntArray, wanted: IntArray) -> IntArray:
        """Cut [R] wanted tokens of rows where the budgets of tokens and logits end.

        The logits are taken from their budget, the tokens are not.
        """
        lengths = _within(self.budget, wanted)
        logits = running.num_logits(seats, lengths)
        # One is the sample's own, which is there in any case.
        logits[logits <= 1] = 0
        allowed = _within(self.logits, logits)
        self.logits -= int(allowed.sum())
        return np.where(logits > 0, np.maximum(1, lengths - (logits - allowed)), lengths)

    def all_seats(self) -> IntArray:
        """Give [S] the seats of the step's rows, those that start in it last."""
        return np.concatenate((self.seats, np.array(self.started_seats, dtype=np.int64)))

    def all_lengths(self) -> IntArray:
        """Give [S] the tokens of each."""
        return np.concatenate((self.lengths, np.array(self.started_lengths, dtype=np.int64)))


def _within(budget: int, wanted: IntArray) -> IntArray:
    """Cut [R] wanted tokens off where the budget ends."""
    before = np.cumsum(wanted) - wanted
    cut: IntArray = np.minimum(wanted, np.maximum(0, budget - before))
    return cut
