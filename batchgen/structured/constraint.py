"""A request's constraint: a grammar and how much of it the output has used up."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par


class Masks:
    """Fills the masks of many constraints at once, on several threads and without the GIL.

    See :class:`batchgen.engine.step.MaskSource`.
    """

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self.num_words = -(-vocabulary.vocab_size // 32)
        self._executor = LLExecutor()

    def fill(self, constraints: Sequence["TokenConstraint"], masks: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that each constraint allows next; none after a failure."""
        matchers = [constraint.matcher for constraint in constraints]
        fill_next_token_bitmask_par(
            self._executor, [(matcher, row) for row, matcher in enumerate(matchers)], masks
        )
        for row, matcher in enumerate(matchers):
            # Where it has failed, the library would end the output as if all were well.
            if matcher.is_error():
                masks[row] = 0


class TokenConstraint:
    """What one output has to be; see :class:`batchgen.engine.step.Constraint`."""

    __slots__ = ("_matcher", "_template", "source")

    def __init__(self, template: LLMatcher, source: Masks) -> None:
        self.source = source
        self._template = template
        self._matcher: LLMatcher | None = None

    @property
    def matcher(self) -> LLMatcher:
        """The grammar behind the tokens so far; waiting requests have none of their own."""
        if self._matcher is None:
            self._matcher = self._template.deep_copy()
        return self._matcher

    @property
    def is_complete(self) -> bool:
        """Whether the output is finished and nothing may follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def problem(self) -> str | None:
        """Why no token is allowed, where the grammar itself has failed."""
        error = self.matcher.get_error()
        return error.splitlines()[0] if error else None

    def push(self, token_id: int) -> None:
        """Take the next token of the output."""
        self.matcher.consume_token(token_id)

    def forced(self) -> list[int]:
        """Return the next tokens as long as only one is allowed."""
        return self.matcher.compute_ff_tokens()
