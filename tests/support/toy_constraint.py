"""A constraint without a grammar: a function from the output so far to the allowed tokens."""

from collections.abc import Callable, Sequence

from batchgen.engine.step import MaskWords

VOCAB = 1000


class ToySource:
    """Fills masks bit by bit."""

    num_words = -(-VOCAB // 32)

    def fill(self, constraints: Sequence["ToyConstraint"], masks: MaskWords) -> None:
        bits = masks.view("uint32")
        for row, constraint in enumerate(constraints):
            for token in constraint.allowed():
                if token < VOCAB:
                    bits[row, token // 32] |= 1 << (token % 32)


class ToyConstraint:
    """Allows what a rule says; complete where it says nothing more after at least a token.

    Args:
        rule: from the output so far to the tokens that may follow.
        forces: whether it gives tokens away that are the only ones.
    """

    def __init__(self, rule: Callable[[list[int]], set[int]], *, forces: bool = True) -> None:
        self.source = ToySource()
        self.problem: str | None = None
        self.tokens: list[int] = []
        self._rule = rule
        self._forces = forces

    def allowed(self) -> set[int]:
        """The tokens that may follow."""
        return self._rule(self.tokens)

    @property
    def is_complete(self) -> bool:
        return bool(self.tokens) and not self.allowed() and self.problem is None

    def push(self, token_id: int) -> None:
        assert token_id in self.allowed(), f"{token_id} after {self.tokens} is not allowed"
        self.tokens.append(token_id)

    def forced(self) -> list[int]:
        tokens = list(self.tokens)
        while self._forces and len(self._rule(tokens)) == 1:
            tokens += self._rule(tokens)
        return tokens[len(self.tokens) :]
