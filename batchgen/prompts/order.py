"""The order of rows, what their prefixes share, and the least prefill that is left.

Everything here is a pure function over rows of token ids. ``ids`` gives a row's ids
``[L]``; rows are named by their store row.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IdsOf = Callable[[int], npt.NDArray[np.int32]]
Rows = npt.NDArray[np.int64]


def prefix_order(ids: IdsOf, rows: Rows) -> Rows:
    """Sort rows by their token ids, which walks their prefix tree depth first.

    A row that is a prefix of another comes before it; equal rows keep their order. Takes
    four bytes of memory a token, and some two seconds for 100,000 rows of 1,000 tokens
    that share prefixes, since big-endian bytes compare as the ids do.
    """
    keys = [ids(row).astype(">i4").tobytes() for row in rows.tolist()]
    ranking = sorted(range(len(keys)), key=keys.__getitem__)
    return rows[np.asarray(ranking, dtype=np.int64)]


def length_order(lengths: Rows, rows: Rows) -> Rows:
    """Sort rows by their prompt's length ``lengths[row]``, longest first, ties in order."""
    return rows[np.argsort(-lengths[rows].astype(np.int64), kind="stable")]


def neighbour_lcp(ids: IdsOf, rows: Rows) -> Rows:
    """Return how many leading ids each row shares with the row before it.

    Returns:
        ``[len(rows)]``, 0 for the first row. A row's last token must be computed for its
        logits, so a row of L tokens shares at most L - 1.
    """
    shared = np.zeros(len(rows), dtype=np.int64)
    before: npt.NDArray[np.int32] | None = None
    for at, row in enumerate(rows.tolist()):
        current = ids(row)
        if before is not None:
            shared[at] = min(common_prefix(before, current), len(current) - 1)
        before = current
    return shared


def common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Return how many leading ids two rows share."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    at = int(differs.argmax()) if length else 0
    return at if length and differs[at] else length


def prefill_tokens(lengths: Rows, lcp: Rows, block_size: int = 1) -> int:
    """Return the tokens to compute where each row reuses whole blocks of its neighbour.

    ``E_B = sum(L_i - B * floor(lcp_i / B))``. Over rows in prefix order this is the floor
    for blocks of B tokens, since a row's longest match among all rows before it is then
    the row just before it; with blocks of one token it is ``E_1``.

    Args:
        lengths, lcp: ``[rows]`` in the same order.
    """
    return int(lengths.sum() - (lcp // block_size * block_size).sum())


def repeat_rows(lengths: Rows, lcp: Rows, times: Rows) -> tuple[Rows, Rows]:
    """Put each row's further samples after it, as rows with the same prompt.

    Returns:
        lengths and lcp ``[times.sum()]``; a repeated row shares all but its last token.
    """
    first = np.zeros(int(times.sum()), dtype=bool)
    starts = np.cumsum(times) - times
    first[starts] = True
    repeated = np.repeat(lengths.astype(np.int64), times)
    return repeated, np.where(first, np.repeat(lcp, times), repeated - 1)


def find_duplicates(
    ids: IdsOf, rows: Rows, result_keys: Sequence[Hashable | None]
) -> tuple[Rows, dict[int, list[int]]]:
    """Find rows whose result is bound to be another row's.

    Args:
        result_keys: for each of ``rows`` what its result depends on besides its ids, or
            None where it depends on noise of its own.

    Returns:
        The rows to compute, in order, and for each that stands for others their rows.
    """
    seen: dict[tuple[Hashable, bytes], list[int]] = {}
    kept: list[int] = []
    duplicates: dict[int, list[int]] = {}
    for row, key in zip(rows.tolist(), result_keys, strict=True):
        if key is not None:
            digest = hashlib.blake2b(ids(row).tobytes(), digest_size=16).digest()
            candidates = seen.setdefault((key, digest), [])
            same = next((c for c in candidates if np.array_equal(ids(c), ids(row))), None)
            if same is not None:
                duplicates.setdefault(same, []).append(row)
                continue
            candidates.append(row)
        kept.append(row)
    return np.asarray(kept, dtype=np.int64), duplicates


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """A prefix that several requests share and that cannot be longer for all of them.

    Attributes:
        tokens: length of the shared prefix.
        rows: requests that share it, a request for each random sample.
        remainder: tokens of the prefix behind its last whole block.
        tokens_saved: tokens that need not be computed because these requests share this
            prefix, beyond what they share in a wider group already.
        tokens_lost: shared tokens behind the last whole block where these requests part:
            computed again if only whole blocks were shared.
        position: place in prefix order of the first request.
    """

    tokens: int
    rows: int
    remainder: int
    tokens_saved: int
    tokens_lost: int
    position: int


def prefix_groups(lcp: Rows, block_size: int, limit: int) -> list[PrefixGroup]:
    """Return the prefix tree's inner nodes that save most, largest saving first.

    Over all nodes ``tokens_saved`` sums to ``sum(L) - E_1`` and ``tokens_lost`` to
    ``E_B - E_1``. The nodes are the intervals of the lcp array (Abouelhoda, Kurtz and
    Ohlebusch, 2004).

    Args:
        lcp: ``[rows]`` in prefix order.
    """
    groups: list[PrefixGroup] = []
    # Open nodes from the root down: prefix length, first position, pairs that part here.
    open_nodes: list[tuple[int, int, int]] = [(0, 0, 0)]
    for at, shared in enumerate([*lcp[1:].tolist(), 0], start=1):
        start = at - 1
        while open_nodes[-1][0] > shared:
            tokens, start, partings = open_nodes.pop()
            wider = max(shared, open_nodes[-1][0])
            remainder = tokens % block_size
            rows = at - start
            saved = (rows - 1) * (tokens - wider)
            groups.append(PrefixGroup(tokens, rows, remainder, saved, partings * remainder, start))
        if open_nodes[-1][0] < shared:
            open_nodes.append((shared, start, 1))
        else:
            tokens, first, partings = open_nodes[-1]
            open_nodes[-1] = (tokens, first, partings + 1)
    groups.sort(key=lambda group: (-group.tokens_saved, group.position))
    return groups[:limit]
