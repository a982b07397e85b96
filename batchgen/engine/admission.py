"""How much memory a request must find before it starts."""

from collections import deque
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.request import Request
from batchgen.engine.running import RunningRequests
from batchgen.engine.step import IntArray

# The expectation looks at this many of the rows that finished last.
_RECENT = 512
# Until rows have finished, a row is expected to use this share of its max_tokens.
_FIRST_GUESS = 0.25


class AdmissionPolicy(StrEnum):
    """What a request must find free before it starts, beside its known tokens' blocks.

    ``worst_case`` reserves all that every running row may still come to need, so that
    nothing is ever preempted. ``prompt`` reserves one block for each row that can still
    grow. ``expected`` reserves what the lengths of finished rows suggest. ``auto`` is the
    worst case for rows where it is near or certain (``max_tokens`` adds at most a quarter
    to the prompt, or ``ignore_eos`` is set), else expected. Where a reservation was too
    small, preemption is the safety net.
    """

    AUTO = "auto"
    WORST_CASE = "worst_case"
    EXPECTED = "expected"
    PROMPT = "prompt"


class OutputLengths:
    """Output lengths of the rows that finished last, to expect other rows' by."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._expected: IntArray | None = None

    def add(self, length: int) -> None:
        """Take note of a finished row."""
        self._recent.append(length)
        self._expected = None

    def expect(self, so_far: IntArray, max_tokens: IntArray) -> IntArray:
        """Give the output tokens to expect of rows that have some already.

        It is the mean over the finished rows that went on beyond that point.
        """
        if not self._recent:
            guess = np.round(max_tokens * _FIRST_GUESS).astype(np.int64)
            return np.maximum(so_far + 1, guess)
        if self._expected is None:
            self._expected = _means_beyond(np.array(self._recent))
        known = self._expected
        mean = known[np.minimum(so_far, len(known) - 1)]
        return np.minimum(max_tokens, np.where(so_far < len(known), mean, so_far + 1))


def _means_beyond(lengths: IntArray) -> IntArray:
    """Give for each number of tokens below the highest the mean of the lengths above it."""
    ordered = np.sort(lengths)
    sums_from = np.append(np.cumsum(ordered[::-1])[::-1], 0)
    at = np.searchsorted(ordered, np.arange(max(1, int(ordered[-1]))), side="right")
    means: IntArray = -(-sums_from[at] // np.maximum(1, len(ordered) - at))
    return means


class Admission:
    """Counts the blocks to keep free for what rows may still come to need."""

    def __init__(self, policy: AdmissionPolicy, blocks: BlockManager) -> None:
        self.lengths = OutputLengths()
        self._policy = policy
        self._block_size = blocks.block_size
        # No row ever holds more than this.
        self._most_blocks = min(blocks.pool.num_blocks, blocks.most_blocks_for(1 << 60))

    def growth(self, request: Request, held: int) -> int:
        """Give the blocks to keep free for a request that is to hold ``held``."""
        params = request.params
        growth = self._growth(
            np.array([held]),
            np.array([request.num_prompt_tokens]),
            np.array([request.num_output_tokens]),
            np.array([params.max_tokens]),
            np.array([request.max_total_tokens]),
            np.array([params.ignore_eos]),
        )
        return int(growth[0])

    def growth_of_all(self, running: RunningRequests) -> int:
        """Give the blocks to keep free for all running requests."""
        seats = running.seats()
        prompts = running.num_prompt_tokens[seats]
        growth = self._growth(
            running.num_blocks[seats] - running.num_released[seats],
            prompts,
            running.num_known[seats] - prompts,
            running.max_tokens[seats],
            running.max_total_tokens[seats],
            running.ignores_eos[seats],
        )
        return int(growth.sum())

    def _growth(
        self,
        held: IntArray,
        num_prompt_tokens: IntArray,
        num_output_tokens: IntArray,
        max_tokens: IntArray,
        max_total_tokens: IntArray,
        ignores_eos: npt.NDArray[np.bool_],
    ) -> IntArray:
        """Give [R] blocks to keep free for R rows that hold some already."""
        worst = self._blocks_beyond(held, max_total_tokens)
        if self._policy is AdmissionPolicy.WORST_CASE:
            return worst
        if self._policy is AdmissionPolicy.PROMPT:
            # Behind a window a prompt takes its blocks step by step: that is reserved, too.
            return np.minimum(
                worst, np.maximum(1, self._blocks_beyond(held, num_prompt_tokens + 1))
            )
        output = self.lengths.expect(num_output_tokens, max_tokens)
        expected = self._blocks_beyond(held, num_prompt_tokens + output)
        # One block at least: no preemption before a block's length is used up.
        expected = np.minimum(worst, np.maximum(1, expected))
        if self._policy is AdmissionPolicy.EXPECTED:
            return expected
        return np.where(ignores_eos | (4 * max_tokens <= num_prompt_tokens), worst, expected)

    def _blocks_beyond(self, held: IntArray, total_tokens: IntArray) -> IntArray:
        """Count missing blocks; a request's last token is never stored."""
        blocks = -(-(total_tokens - 1) // self._block_size)
        return np.maximum(0, np.minimum(blocks, self._most_blocks) - held)
