"""The order of rows, what their prefixes share, and the least prefill that is left.

Everything here is a pure function over rows of token ids. ``ids`` gives a row's ids
``[L]``; rows are named by their store row.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

IdsOf = Callable[[int], npt.NDArray[np.int32]]
Rows = npt.NDArray[np.int64]

_SLICE = 1 << 12
# A bytes object, two list items and an integer.
_KEY_OBJECT_BYTES = 100


def prefix_order(ids: IdsOf, rows: Rows, *, run_bytes: int = 64 << 20) -> Rows:
    """Sort rows by their token ids, which walks their prefix tree depth first.

    A row that is a prefix of another comes before it; equal rows keep their order. An
    external merge sort: runs of rows are sorted by keys in memory and then merged, with
    the keys of one row of each run. So the memory is ``run_bytes`` and 16 bytes a row.

    Args:
        run_bytes: memory for the keys of a run, which take four bytes a token and some 100
            bytes a row.
    """
    runs = list(_sorted_runs(ids, rows, run_bytes))
    if len(runs) == 1:
        return runs[0]
    merged = heapq.merge(*map(_each, runs), key=lambda row: _sort_key(ids, row))
    return np.fromiter(merged, np.int64, len(rows))


def _sorted_runs(ids: IdsOf, rows: Rows, run_bytes: int) -> Iterator[Rows]:
    keys: list[bytes] = []
    start = size = 0
    for row in _each(rows):
        keys.append(_sort_key(ids, row))
        size += len(keys[-1]) + _KEY_OBJECT_BYTES
        if size >= run_bytes:
            yield _sorted_by(keys, rows[start : start + len(keys)])
            start, size, keys = start + len(keys), 0, []
    yield _sorted_by(keys, rows[start:])


def _sorted_by(keys: list[bytes], rows: Rows) -> Rows:
    ranking = sorted(range(len(keys)), key=keys.__getitem__)
    return rows[np.asarray(ranking, dtype=np.int64)]


def _sort_key(ids: IdsOf, row: int) -> bytes:
    # Big-endian bytes compare as the ids do, and as fast as memory.
    return ids(row).astype(">i4").tobytes()


def _each(values: Rows) -> Iterator[int]:
    """Yield an array's numbers without making Python objects of all of them at once."""
    for start in range(0, len(values), _SLICE):
        yield from values[start : start + _SLICE].tolist()


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
    for at, row in enumerate(_each(rows)):
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


class Duplicates(Mapping[int, Sequence[int]]):
    """The rows that take another row's result, by that row; 16 bytes a duplicate."""

    def __init__(self, rows: Rows, leaders: Rows) -> None:
        """Take the duplicates and, for each, the row whose result it takes."""
        by_leader = np.argsort(leaders, kind="stable")
        self._rows = rows[by_leader]
        self._leaders = leaders[by_leader]

    @property
    def num_rows(self) -> int:
        """How many rows take another row's result."""
        return len(self._rows)

    def largest(self, limit: int) -> list[tuple[int, int]]:
        """Return the rows whose result most others take, with how many do."""
        leaders, counts = np.unique(self._leaders, return_counts=True)
        most = np.argsort(-counts, kind="stable")[:limit]
        return list(zip(leaders[most].tolist(), counts[most].tolist(), strict=True))

    def __getitem__(self, leader: int) -> list[int]:
        first, end = np.searchsorted(self._leaders, [leader, leader + 1])
        if first == end:
            raise KeyError(leader)
        rows: list[int] = self._rows[first:end].tolist()
        return rows

    def __iter__(self) -> Iterator[int]:
        return _each(np.unique(self._leaders))

    def __len__(self) -> int:
        return len(np.unique(self._leaders))


def find_duplicates(ids: IdsOf, rows: Rows, result_keys: Rows) -> tuple[Rows, Duplicates]:
    """Find rows whose result is bound to be another row's.

    Args:
        rows: each once.
        result_keys: ``[len(rows)]`` a number for what each row's result depends on besides
            its ids; negative where it depends on noise of its own.

    Returns:
        The rows to compute, in order, and for each that stands for others their rows.
    """
    leaders = rows.copy()
    places = np.flatnonzero(result_keys >= 0)
    digests = np.fromiter((_digest(ids(row)) for row in _each(rows[places])), np.int64, len(places))
    for alike in _equal_pairs(result_keys[places], digests):
        _find_leaders(ids, rows, places[alike], leaders)
    repeated = leaders != rows
    return rows[~repeated], Duplicates(rows[repeated], leaders[repeated])


def _digest(ids: npt.NDArray[np.int32]) -> int:
    return hash(ids.tobytes())


def _equal_pairs(first: Rows, second: Rows) -> Iterator[Rows]:
    """Yield the places, ascending, of every pair of numbers that stands more than once."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    borders = np.flatnonzero((first[1:] != first[:-1]) | (second[1:] != second[:-1])) + 1
    starts = np.concatenate([[0], borders])
    ends = np.concatenate([borders, [len(order)]])
    several = ends - starts > 1
    for start, end in zip(_each(starts[several]), _each(ends[several]), strict=True):
        yield order[start:end]


def _find_leaders(ids: IdsOf, rows: Rows, places: Rows, leaders: Rows) -> None:
    """Return for each of some rows the first row with the same ids; digests may lie, ids do not."""
    candidates: list[int] = []
    for place in places.tolist():
        row = int(rows[place])
        same = next((c for c in candidates if np.array_equal(ids(c), ids(row))), None)
        if same is None:
            candidates.append(row)
        else:
            leaders[place] = same


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
    best = heapq.nsmallest(limit, _inner_nodes(lcp), key=lambda node: (-node[0], node[1]))
    return [
        PrefixGroup(
            tokens=tokens,
            rows=rows,
            remainder=tokens % block_size,
            tokens_saved=saved,
            tokens_lost=partings * (tokens % block_size),
            position=position,
        )
        for saved, position, tokens, rows, partings in best
    ]


def _inner_nodes(lcp: Rows) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield tokens saved, first position, tokens, rows and pairs that part at each node."""
    # Open nodes from the root down: prefix length, first position, pairs that part here.
    open_nodes: list[tuple[int, int, int]] = [(0, 0, 0)]
    for at, shared in enumerate(chain(_each(lcp[1:]), [0]), start=1):
        start = at - 1
        while open_nodes[-1][0] > shared:
            tokens, start, partings = open_nodes.pop()
            wider = max(shared, open_nodes[-1][0])
            rows = at - start
            yield (rows - 1) * (tokens - wider), start, tokens, rows, partings
        if open_nodes[-1][0] < shared:
            open_nodes.append((shared, start, 1))
        else:
            tokens, first, partings = open_nodes[-1]
            open_nodes[-1] = (tokens, first, partings + 1)
