"""Log-probabilities of tokens as an Arrow column.

One list for each row, one entry in it for each token, and an entry is a list again: the token
itself first, then the likeliest ones in its place, the best first, without the token itself
where it is one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_CANDIDATE = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32()), ("rank", pa.int32())])
LOGPROBS_TYPE = pa.list_(pa.list_(_CANDIDATE))


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """The log-probabilities of N tokens of one row, each beside the K likeliest in its place.

    Attributes:
        token_ids: [N, 1 + K] the token itself, then the likeliest.
        logprobs: [N, 1 + K].
        ranks: [N] of the token itself; 1 is the likeliest.
        has_first: whether a token without an entry stands before them, as a prompt's first.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    has_first: bool = False

    @property
    def size_bytes(self) -> int:
        """About what it takes in Arrow memory."""
        return 12 * self.token_ids.size + 4 * len(self.ranks)

    @property
    def cumulative(self) -> float:
        """The log-probability of all the tokens together."""
        return float(self.logprobs[:, 0].sum(dtype=np.float64))


def logprob_array(values: Sequence[RowLogprobs | None]) -> pa.Array:
    """Put rows into an array of ``LOGPROBS_TYPE``."""
    rows = [(value, _kept(value)) for value in values if value is not None]
    candidates = pa.StructArray.from_arrays(
        [
            _joined([row.token_ids[kept] for row, kept in rows], np.int32),
            _joined([row.logprobs[kept] for row, kept in rows], np.float32),
            _joined([_ranks(row)[kept] for row, kept in rows], np.int32),
        ],
        fields=list(_CANDIDATE),
    )
    counts, nulls = [], []
    for row, kept in rows:
        counts += [np.zeros(int(row.has_first)), kept.sum(axis=1)]
        nulls += [np.full(int(row.has_first), True), np.full(len(kept), False)]
    tokens = pa.ListArray.from_arrays(
        _offsets(_joined(counts, np.int32)), candidates, mask=pa.array(_joined(nulls, np.bool_))
    )
    lengths = [0 if row is None else len(row.ranks) + row.has_first for row in values]
    absent = pa.array([row is None for row in values], pa.bool_())
    return pa.ListArray.from_arrays(_offsets(np.array(lengths)), tokens, mask=absent)


def _kept(row: RowLogprobs) -> npt.NDArray[np.bool_]:
    """Say which [N, 1 + K] candidates stand in the output: the token itself only once."""
    kept: npt.NDArray[np.bool_] = row.token_ids != row.token_ids[:, :1]
    kept[:, 0] = True
    return kept


def _ranks(row: RowLogprobs) -> npt.NDArray[np.int32]:
    ranks = np.broadcast_to(np.arange(row.token_ids.shape[1], dtype=np.int32), row.token_ids.shape)
    return np.concatenate([row.ranks[:, None], ranks[:, 1:]], axis=1)


def _offsets(lengths: npt.NDArray[Any]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _joined(parts: Sequence[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *parts]).astype(kind)
