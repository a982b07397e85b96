"""What attention works on: a step's rows, the segments that rows share, and parts of results.

Tensors of one dimension are contiguous; numbers are int32 or int64 and stay on the device: the
host never reads them.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedRows:
    """R rows of a packed batch.

    Attributes:
        query_starts: [R + 1] tokens at which rows begin; a row's queries are its last tokens.
        context_lens: [R] tokens that a row has in the pool, its queries included. 0 is a padded
            row; tokens behind ``query_starts[R]`` are padding too.
        max_query_len: an upper bound of a row's queries. Where it is 1 and there are as many
            tokens as rows, row ``r`` is token ``r``.
        key_starts: [R] leading tokens that are left out, because a shared segment holds them;
            None if there are none.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    key_starts: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SharedSegments:
    """G ranges of packed tokens that each see the whole of a range of keys.

    The keys are those of one row of the block table, between two of its places. A token may be
    in several segments: each of its P places there has a result of its own.

    Attributes:
        place_starts: [G + 1] where the places of each segment begin in P.
        first_tokens: [G] the packed token at a segment's first place; the others follow it.
        table_rows: [G] rows of the block table.
        key_starts, key_ends: [G] the keys.
        token_places: [T, L] places of each token, -1 where it has fewer than L.
        num_places: P, or an upper bound of it.
        max_query_len: an upper bound of a segment's tokens.
    """

    place_starts: torch.Tensor
    first_tokens: torch.Tensor
    table_rows: torch.Tensor
    key_starts: torch.Tensor
    key_ends: torch.Tensor
    token_places: torch.Tensor
    num_places: int
    max_query_len: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Results of attention to S parts of the keys, for P query places.

    Attributes:
        out: [S, P, Hq, Dv] float32; undefined where ``lse`` is -inf.
        lse: [S, P, Hq] float32 log-sum-exp of the scores; -inf where no key was seen.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class Carry:
    """What rows have seen so far, from the segments' launch to that of their own keys.

    The latter goes on where the former stopped, so the sum is that of one launch, to the bit.

    Attributes:
        mixed: [T, Hq, Dv] float32 sums of weighted values.
        sums: [2, T, Hq] float32 highest scores in units of log(2), and sums of weights.
    """

    mixed: torch.Tensor
    sums: torch.Tensor


def new_carry(query: torch.Tensor, value_size: int) -> Carry:
    """Allocate what is carried, unwritten."""
    shape = query.shape[:2]
    mixed = query.new_empty((*shape, value_size), dtype=torch.float32)
    return Carry(mixed, query.new_empty((2, *shape), dtype=torch.float32))


def new_parts(query: torch.Tensor, value_size: int, num_splits: int, num_places: int) -> Parts:
    """Allocate parts, unwritten."""
    shape = (num_splits, num_places, query.shape[1])
    out = query.new_empty((*shape, value_size), dtype=torch.float32)
    return Parts(out, query.new_empty(shape, dtype=torch.float32))


@dataclass(frozen=True, slots=True)
class KVScales:
    """What one layer's keys and values are divided by when stored, and multiplied by when read.

    Attributes:
        key: [Hkv] float32.
        value: [Hkv] float32.
    """

    key: torch.Tensor
    value: torch.Tensor
