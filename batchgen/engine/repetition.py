"""Repetition detection: outputs that go round in circles.

The rule: the last ``num_tokens`` tokens of the output are one sequence of tokens, said at
least three times in a row (the last time perhaps not to its end). So they repeat with some
period of at most a third of them: each token equals the one a period before it. vLLM has the
same idea under three numbers (``repetition_detection``); one is enough here, since it bounds
both how long a sequence may be and how often a short one is borne.
"""

import numpy as np
import numpy.typing as npt

_LEAST_TIMES = 3


class RepetitionWatch:
    """Watches the output of one request, token by token.

    Its state is a function of the tokens that were pushed: preemption changes nothing in it.

    Args:
        num_tokens: tokens that must repeat, at least 3.
    """

    __slots__ = ("_matched", "_needed", "_recent")

    def __init__(self, num_tokens: int) -> None:
        periods = np.arange(1, num_tokens // _LEAST_TIMES + 1, dtype=np.int32)
        # With period p the first p of the tokens have nothing to be equal to.
        self._needed: npt.NDArray[np.int32] = num_tokens - periods
        # How many of the newest tokens in a row equal the one a period before.
        self._matched: npt.NDArray[np.int32] = np.zeros(len(periods), np.int32)
        # The newest token first.
        self._recent: npt.NDArray[np.int32] = np.full(len(periods), -1, np.int32)

    def push(self, token_id: int) -> bool:
        """Take the next token of the output; say whether the rule holds now."""
        recent, matched = self._recent, self._matched
        matched += 1
        matched[recent != token_id] = 0
        recent[1:] = recent[:-1].copy()
        recent[0] = token_id
        return bool((matched >= self._needed).any())
