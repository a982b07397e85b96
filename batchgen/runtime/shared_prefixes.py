"""How the rows of a step share their keys, found once a step from the block tables."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from batchgen.engine.step import StepPlan
from batchgen.kernels.cascade import CascadeLayout, OwnKeys, SharedSegment
from batchgen.runtime.device.transfers import Put

Ints = npt.NDArray[np.int64]

# Rows times tokens from which on a segment of its own is cheaper than padding the rows
# (scripts/sweep_shared_prefix.py measures it).
_MIN_SHARED_READS = 2048
# Keys of rows that are padded to one shape, in all: bounds the copy of K and V.
_MAX_OWN_KEYS = 1 << 14
# A row joins others if padding it to their shape at most doubles it.
_MAX_PADDING = 2.0


class SharedPrefix(StrEnum):
    """Whether rows attend to what they share once for all of them; auto is where it pays."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Rows ``first`` to ``end`` that all hold the same blocks from ``start`` to ``stop``.

    Below that, the rows are in runs that end at ``start``, or ``start`` is 0.
    """

    first: int
    end: int
    start: int
    stop: int


def cascade_layout(
    plan: StepPlan,
    block_size: int,
    put: Put,
    sharing: SharedPrefix = SharedPrefix.AUTO,
) -> CascadeLayout:
    """Find the segments that neighbouring rows share, on several levels, and the rest.

    Args:
        plan: the step.
        block_size: tokens in a block.
        put: uploads an array.
        sharing: which segments to look for.
    """
    tables = plan.block_tables.astype(np.int64)
    lengths = np.diff(plan.query_starts)
    runs = shared_runs(plan, block_size, sharing)
    shared = shared_blocks(runs, plan.num_rows)
    segments = [
        SharedSegment(
            put(tables[run.first, run.start : run.stop]),
            int(plan.query_starts[run.first]),
            int(plan.query_starts[run.end]),
        )
        for run in runs
    ]
    own_keys = plan.context_lens - shared * block_size
    own = [
        _own_keys(plan, tables, shared, rows, block_size, put)
        for rows in _batches(lengths, own_keys)
    ]
    return CascadeLayout(segments, own)


def shared_runs(plan: StepPlan, block_size: int, sharing: SharedPrefix) -> list[SharedRun]:
    """Find the blocks that neighbouring rows share, on several levels, outer runs first.

    A row takes part with the blocks that lie wholly before its first query: what it computes
    itself in this step is its own, also where others share it already.
    """
    runs: list[SharedRun] = []
    if sharing is not SharedPrefix.OFF:
        past = (plan.context_lens - np.diff(plan.query_starts)) // block_size
        least = _MIN_SHARED_READS if sharing is SharedPrefix.AUTO else 0
        whole = SharedRun(0, plan.num_rows, 0, 0)
        _find_runs(plan.block_tables, past, whole, block_size, least, runs)
    return runs


def shared_blocks(runs: list[SharedRun], num_rows: int) -> Ints:
    """Count the leading blocks that each of [R] rows shares."""
    shared = np.zeros(num_rows, dtype=np.int64)
    for run in runs:
        shared[run.first : run.end] = np.maximum(shared[run.first : run.end], run.stop)
    return shared


def _find_runs(
    tables: npt.NDArray[np.int32],
    past: Ints,
    within: SharedRun,
    block_size: int,
    least: int,
    runs: list[SharedRun],
) -> None:
    """Collect the runs of rows that share blocks past ``within.stop``, the wide ones first."""
    depth = within.stop
    if depth >= tables.shape[1]:
        return
    column = np.where(past > depth, tables[:, depth], -1)[within.first : within.end]
    borders = np.flatnonzero(np.diff(column)) + 1
    starts = [0, *borders.tolist()]
    ends = [*borders.tolist(), len(column)]
    for start, end in zip(starts, ends, strict=True):
        if end - start < 2 or column[start] < 0:
            continue
        first, last = within.first + start, within.first + end
        limit = int(past[first:last].min())
        same = (tables[first:last, depth:limit] == tables[first, depth:limit]).all(axis=0)
        stop = depth + (len(same) if same.all() else int(same.argmin()))
        run = SharedRun(first, last, depth, stop)
        if (stop - depth) * block_size * (last - first) >= least:
            runs.append(run)
            _find_runs(tables, past, run, block_size, least, runs)


def _batches(lengths: Ints, own_keys: Ints) -> list[Ints]:
    """Group rows of like numbers of queries and of own keys, small ones first."""
    order = np.lexsort((own_keys, lengths))
    batches: list[list[int]] = []
    for row in order.tolist():
        batch = batches[-1] if batches else None
        if batch is None or not _joins(batch, row, lengths, own_keys):
            batches.append([row])
        else:
            batch.append(row)
    return [np.array(batch) for batch in batches]


def _joins(batch: list[int], row: int, lengths: Ints, own_keys: Ints) -> bool:
    first = batch[0]
    keys = max(int(own_keys[batch[-1]]), int(own_keys[row]))
    return bool(
        lengths[row] <= _MAX_PADDING * lengths[first]
        and keys <= _MAX_PADDING * min(own_keys[first], own_keys[row])
        and keys * (len(batch) + 1) <= _MAX_OWN_KEYS
    )


def _own_keys(
    plan: StepPlan, tables: Ints, shared: Ints, rows: Ints, block_size: int, put: Put
) -> OwnKeys:
    starts = plan.query_starts[rows]
    lengths = plan.query_starts[rows + 1] - starts
    keys = plan.context_lens[rows] - shared[rows] * block_size
    n, width = int(lengths.max()), -(-int(keys.max()) // block_size)
    at = np.arange(n)[None, :]
    real = at < lengths[:, None]
    tokens = starts[:, None] + np.minimum(at, lengths[:, None] - 1)
    columns = shared[rows][:, None] + np.arange(width)[None, :]
    blocks = tables[rows[:, None], np.minimum(columns, tables.shape[1] - 1)]
    # Place of each query among its row's own keys.
    places = (keys - lengths)[:, None] + np.minimum(at, lengths[:, None] - 1)
    key_at = np.arange(width * block_size)
    return OwnKeys(
        tokens=put(tokens),
        real=put(np.flatnonzero(real)),
        blocks=put(blocks),
        hidden=put(key_at[None, None, :] > places[:, :, None]),
        unused=put(np.flatnonzero(key_at[None, :] >= keys[:, None])),
    )
