"""The token tree of a list of choices, and the choices' probabilities from its nodes' scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChoiceTree:
    """What has to be known after a prompt to know the probability of each of C choices.

    Attributes:
        choices: [C] the texts.
        paths: [nodes] the tokens from the prompt to each node at which choices part, or one
            of them goes on; the first is the prompt's end. A path stands behind its beginnings.
        next_tokens: [nodes] the tokens by which choices go on from each node.
    """

    choices: tuple[str, ...]
    paths: tuple[tuple[int, ...], ...]
    next_tokens: tuple[IntArray, ...]
    _spelled: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, spelled: Mapping[str, Sequence[int]]) -> Self:
        """Make the tree of choices and their tokens, which differ and are not empty."""
        following: dict[tuple[int, ...], set[int]] = {}
        for tokens in map(tuple, spelled.values()):
            for length in range(len(tokens)):
                following.setdefault(tokens[:length], set()).add(tokens[length])
        paths = sorted(following)
        return cls(
            choices=tuple(spelled),
            paths=tuple(paths),
            next_tokens=tuple(np.array(sorted(following[path])) for path in paths),
            _spelled=tuple(map(tuple, spelled.values())),
        )

    def log_probabilities(self, scores: Sequence[FloatArray]) -> FloatArray:
        """Return the [C] log-probabilities that the text after the prompt is each choice.

        A choice that is the beginning of another one counts as met where the text does not
        go on to the other; no end of sequence is asked for.

        Args:
            scores: [nodes] log-probabilities of each node's ``next_tokens``.
        """
        steps = {
            (*path, int(token)): float(score)
            for path, tokens, values in zip(self.paths, self.next_tokens, scores, strict=True)
            for token, score in zip(tokens, values, strict=True)
        }
        # Where a choice ends and others go on, it has what they leave.
        with np.errstate(divide="ignore"):
            ends = {
                path: float(np.log1p(-min(1.0, np.exp(values).sum())))
                for path, values in zip(self.paths, scores, strict=True)
            }
        return np.array(
            [
                sum(steps[tokens[: length + 1]] for length in range(len(tokens)))
                + ends.get(tokens, 0.0)
                for tokens in self._spelled
            ]
        )
