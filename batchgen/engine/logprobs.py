"""The log-probabilities of a request's tokens, gathered step by step.

The entry of token ``i`` comes from the logits at position ``i - 1``. A request computes its
positions in order, and where it takes KV from the cache, that is only for positions whose
entries it has or does not want (:attr:`TokenLogprobs.first_logits`); so each entry is made once,
whatever the chunks, hits and preemptions on the way.
"""

from collections.abc import Sequence

import numpy as np

from batchgen.engine.step import IntArray, LoggedTokens, LogprobRows
from batchgen.sampling import SamplingParams

# Entries that room is made for at once; waiting requests have none.
_FIRST_ROOM = 64
# A position after all others.
NEVER = 1 << 40


class TokenLogprobs:
    """Entries for the tokens of one request, from one of them on.

    Attributes:
        first: the first token that has an entry.
        end: the token after the last one that gets an entry.
        num_best: alternatives in an entry.
    """

    def __init__(self, first: int, end: int, num_best: int) -> None:
        self.first = first
        self.end = end
        self.num_best = num_best
        self._rows = _room(0, num_best)

    @classmethod
    def wanted(
        cls, params: SamplingParams, num_prompt_tokens: int, *, with_prompt: bool
    ) -> "TokenLogprobs | None":
        """Make what some parameters ask for; None if that is nothing.

        Args:
            params: with ``logprobs`` and ``prompt_logprobs``.
            num_prompt_tokens: of the request.
            with_prompt: whether ``prompt_logprobs`` counts.
        """
        prompt = params.prompt_logprobs if with_prompt else None
        if prompt is None and params.logprobs is None:
            return None
        first = num_prompt_tokens if prompt is None else 1
        end = num_prompt_tokens if params.logprobs is None else NEVER
        return cls(first, end, max(prompt or 0, params.logprobs or 0))

    @property
    def first_logits(self) -> int:
        """The first position whose logits are wanted."""
        return self.first - 1

    @property
    def end_logits(self) -> int:
        """The position after the last one whose logits are wanted."""
        return self.end - 1

    def rows(self, begin: int, end: int) -> LogprobRows:
        """Return the entries of the tokens from ``begin`` to ``end``, to be written or read."""
        have, needed = len(self._rows.ranks), end - self.first
        if needed > have:
            larger = _room(max(needed, 2 * have, _FIRST_ROOM), self.num_best)
            larger[:have].put(self._rows)
            self._rows = larger
        return self._rows[begin - self.first : end - self.first]


def _room(size: int, num_best: int) -> LogprobRows:
    return LogprobRows(
        np.zeros((size, 1 + num_best), np.int32),
        np.zeros((size, 1 + num_best), np.float32),
        np.zeros(size, np.int32),
    )


def logged_tokens(
    logs: Sequence[tuple[int, int, int, TokenLogprobs, Sequence[int]]], samples: IntArray
) -> tuple[LoggedTokens, ...]:
    """Return the tokens of a step whose log-probabilities are wanted, an item for each log.

    Args:
        logs: for each row that keeps a log, in row order: its number, the positions of which
            the step's logits are wanted (first, and the one after the last), the log, and the
            request's known tokens.
        samples: [S] the rows that sample, ascending.
    """
    found: list[LoggedTokens] = []
    given = 0
    for row, first, end, log, token_ids in logs:
        is_sampled = end == len(token_ids)
        known = token_ids[first + 1 : end + 1]
        found.append(
            LoggedTokens(
                index=len(found),
                first=given,
                token_ids=np.array(known, dtype=np.int64),
                sample=int(np.searchsorted(samples, row)) if is_sampled else -1,
                num_best=log.num_best,
            )
        )
        given += len(known)
    return tuple(found)
