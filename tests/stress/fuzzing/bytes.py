"""Edits of a file's bytes: what a bad disk, a cut transfer or a stray editor does."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hypothesis import strategies as st


class How(StrEnum):
    """What is done to the bytes."""

    CUT = "cut"
    FLIP = "flip"
    PUT = "put"
    INSERT = "insert"
    REMOVE = "remove"
    APPEND = "append"


@dataclass(frozen=True)
class Edit:
    """One edit.

    Attributes:
        how: which.
        at: where, counted from the end, modulo the file's length.
        data: the bytes that it takes, puts in or flips with.
    """

    how: How
    at: int
    data: bytes


def edits(at_least: int = 0) -> st.SearchStrategy[tuple[Edit, ...]]:
    """Give strategies of a few edits, more of them near the end, where Parquet has its footer."""
    # A position's size is drawn first, so that all distances from the end are as likely.
    position = st.integers(0, 16).flatmap(lambda bits: st.integers(0, 1 << bits))
    one = st.builds(Edit, st.sampled_from(How), position, st.binary(min_size=1, max_size=8))
    return st.lists(one, min_size=at_least, max_size=3).map(tuple)


def apply(given: Sequence[Edit], content: bytes) -> bytes:
    """Give the content after the edits."""
    for edit in given:
        content = _applied(edit, content)
    return content


def _applied(edit: Edit, content: bytes) -> bytes:
    at = len(content) - 1 - edit.at % max(1, len(content))
    before, after, data = content[:at], content[at:], edit.data
    match edit.how:
        case How.CUT:
            return before
        case How.FLIP:
            flipped = (a ^ (b | 1) for a, b in zip(after, data, strict=False))
            return before + bytes(flipped) + after[len(data) :]
        case How.PUT:
            return before + data + after[len(data) :]
        case How.INSERT:
            return before + data + after
        case How.REMOVE:
            return before + after[len(data) :]
        case How.APPEND:
            return content + data
