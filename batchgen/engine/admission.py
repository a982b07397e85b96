"""How much memory a request must find before it starts."""

from bisect import bisect_right
from collections import deque
from enum import StrEnum
from itertools import accumulate

from batchgen.engine.request import Request

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
        self._lengths: list[int] = []
        self._sums_from: list[int] = []

    def add(self, length: int) -> None:
        """Take note of a finished row."""
        self._recent.append(length)
        self._lengths = []

    def expect(self, so_far: int, max_tokens: int) -> int:
        """Give the output tokens to expect of a row that has some already.

        It is the mean over the finished rows that went on beyond that point.
        """
        if not self._recent:
            return max(so_far + 1, round(max_tokens * _FIRST_GUESS))
        if not self._lengths:
            self._lengths = sorted(self._recent)
            self._sums_from = [*accumulate(reversed(self._lengths), initial=0)][::-1]
        at = bisect_right(self._lengths, so_far)
        longer = len(self._lengths) - at
        mean = -(-self._sums_from[at] // longer) if longer else so_far + 1
        return min(max_tokens, mean)


class Admission:
    """Counts the blocks to keep free for what rows may still come to need."""

    def __init__(self, policy: AdmissionPolicy, block_size: int, num_blocks: int) -> None:
        self.lengths = OutputLengths()
        self._policy = policy
        self._block_size = block_size
        self._num_blocks = num_blocks

    def growth(self, request: Request, held: int) -> int:
        """Give the blocks to keep free for a request that holds ``held``."""
        worst = self._blocks_beyond(held, request.max_total_tokens)
        policy = self._policy_for(request)
        if not worst or policy is AdmissionPolicy.WORST_CASE:
            return worst
        if policy is AdmissionPolicy.PROMPT:
            return 1
        output = self.lengths.expect(request.num_output_tokens, request.params.max_tokens)
        expected = self._blocks_beyond(held, request.num_prompt_tokens + output)
        # One block at least: no preemption before a block's length is used up.
        return min(worst, max(1, expected))

    def _policy_for(self, request: Request) -> AdmissionPolicy:
        if self._policy is not AdmissionPolicy.AUTO:
            return self._policy
        params = request.params
        if params.ignore_eos or 4 * params.max_tokens <= request.num_prompt_tokens:
            return AdmissionPolicy.WORST_CASE
        return AdmissionPolicy.EXPECTED

    def _blocks_beyond(self, held: int, total_tokens: int) -> int:
        """Count missing blocks; a request's last token is never stored."""
        blocks = -(-(total_tokens - 1) // self._block_size)
        return max(0, min(blocks, self._num_blocks) - held)
