"""Walks through all or some of the outputs that a constraint allows."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from batchgen.sampling import Structure
from batchgen.structured.constraint import TokenConstraint
from batchgen.structured.grammars import Grammars


def grammars_of(tokenizer: Any, *, eos: tuple[int, ...] = (), padding: int = 0) -> Grammars:
    ends = frozenset(eos or (tokenizer.eos_token_id,))
    return Grammars(tokenizer, len(tokenizer) + padding, lambda: ends)


def allowed(constraint: TokenConstraint) -> list[int]:
    """The ids whose bits are set, read one by one."""
    mask = np.zeros((1, constraint.source.num_words), dtype=np.int32)
    constraint.source.fill([constraint], mask)
    words = mask[0].tolist()
    return [32 * at + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1]


def after(grammars: Grammars, structure: Structure, tokens: list[int]) -> TokenConstraint:
    """A constraint behind some tokens."""
    constraint = grammars.constraint(structure)
    for token in tokens:
        constraint.push(token)
    return constraint


def outputs(
    grammars: Grammars, structure: Structure, ends: set[int], longest: int = 12
) -> Iterator[list[int]]:
    """All outputs of at most ``longest`` tokens, by depth-first search."""
    waiting: list[list[int]] = [[]]
    while waiting:
        tokens = waiting.pop()
        constraint = after(grammars, structure, tokens)
        if constraint.is_complete:
            yield tokens
            continue
        ids = allowed(constraint)
        if ends & set(ids):
            assert ends <= set(ids)
            yield tokens
        if len(tokens) < longest:
            waiting += [[*tokens, token] for token in ids if token not in ends]


def random_output(
    grammars: Grammars, structure: Structure, ends: set[int], rng: random.Random, longest: int = 300
) -> list[int] | None:
    """One output by fair choice among the allowed tokens; None where it grows too long."""
    constraint, tokens = grammars.constraint(structure), []
    while len(tokens) < longest:
        token = rng.choice(allowed(constraint))
        if token in ends:
            return tokens
        constraint.push(token)
        tokens.append(token)
        if constraint.is_complete:
            return tokens
    return None
