"""DESIGN's invariants of pool, tables, queues and index, checked from outside."""

from collections import Counter
from typing import Any

from batchgen.engine.request import Status
from batchgen.engine.scheduler import Scheduler


def check_invariants(scheduler: Scheduler, plan: Any = None) -> None:
    """Assert that every block has one state and every reference one owner."""
    pool, index = scheduler.blocks.pool, scheduler.blocks.index
    requests = [*scheduler.running, *scheduler.waiting, *scheduler.swapped]
    assert len({id(request) for request in requests}) == len(requests)
    owners = Counter(block for request in requests for block in _held(request))
    owners.update(scheduler.blocks.copy_sources)
    assert owners == Counter({b: n for b, n in enumerate(pool.ref_counts) if n})
    free = set(pool.free_blocks())
    cached = {block for block in range(pool.num_blocks) if pool.is_cached(block)}
    owned = set(owners)
    assert not free & cached
    assert not free & owned
    assert not cached & owned
    assert len(free) + len(cached) + len(owned) == pool.num_blocks
    assert (pool.num_free, pool.num_cached, pool.num_owned) == (
        len(free), len(cached), len(owned),
    )  # fmt: skip
    indexed = {node.block for node in index.nodes()}
    assert len(indexed) == len(index)
    assert cached <= indexed
    assert not indexed & free
    for request in requests:
        size = scheduler.blocks.block_size
        assert request.num_computed <= len(request.token_ids)
        if request.status is not Status.RUNNING:
            assert not request.block_table
        else:
            assert len(set(_held(request))) == len(_held(request))
            assert set(request.block_table[: request.num_released]) <= {-1}
            assert len(request.block_table) * size >= request.num_computed
    _check_columns(scheduler)
    _check_swap(scheduler)
    if plan is not None:
        _check_writes(scheduler, plan)
        _check_samples(scheduler, plan)


def _held(request: Any) -> list[int]:
    return list(request.block_table[request.num_released :])


def _check_columns(scheduler: Scheduler) -> None:
    """The columns of the running requests say what the requests say."""
    running = scheduler.running
    indices = running.indices().tolist()
    assert len(indices) == len(running) == len(list(running))
    for index, request in zip(indices, running, strict=True):
        table = running.tables[index].tolist()
        assert request.batch_index == index
        assert running.num_known[index] == len(request.token_ids)
        assert running.num_computed[index] == request.num_computed
        assert running.last_token[index] == request.token_ids[-1]
        assert running.max_computed[index] == request.max_computed
        assert running.num_released[index] == request.num_released
        assert running.num_blocks[index] == len(request.block_table)
        blocks = [max(0, block) for block in request.block_table]
        assert table == blocks + [0] * (len(table) - len(blocks))


def _check_swap(scheduler: Scheduler) -> None:
    held = [block for r in scheduler.swapped for block in r.swapped.blocks]
    assert len(set(held)) == len(held)
    assert len(held) + scheduler.swap_space.num_free == scheduler.swap_space.num_blocks
    assert all(r.swapped is None for r in (*scheduler.running, *scheduler.waiting))


def _check_samples(scheduler: Scheduler, plan: Any) -> None:
    """A row that samples runs its request's last tokens, at their places, up to the newest."""
    requests = scheduler.running.requests(scheduler._in_flight.steps[-1].sampled.indices)
    assert len(requests) == len(plan.samples)
    starts = plan.query_starts.tolist()
    rows = plan.samples.rows.tolist()
    for row, request, position in zip(rows, requests, plan.samples.positions, strict=True):
        tokens, length = request.token_ids.tolist(), starts[row + 1] - starts[row]
        assert plan.context_lens[row] == len(tokens)
        assert plan.token_ids[starts[row] : starts[row + 1]].tolist() == tokens[-length:]
        assert position == len(tokens) - request.num_prompt_tokens


def _check_writes(scheduler: Scheduler, plan: Any) -> None:
    """No slot is written twice in a step, and none in a block that was shared before it."""
    size = scheduler.blocks.block_size
    slots = plan.slots.tolist()
    assert len(set(slots)) == len(slots)
    starts = plan.query_starts.tolist()
    first_new: dict[int, int] = {}
    for row in range(plan.num_rows):
        for slot in slots[starts[row] : starts[row + 1]]:
            assert first_new.setdefault(slot // size, row) == row, "two rows write one block"
            column = plan.block_tables[row].tolist().index(slot // size)
            assert column * size < plan.context_lens[row]
    targets = [*plan.swap_in[:, 1].tolist(), *plan.copies[:, 1].tolist()]
    assert len(set(targets)) == len(targets)
    assert not set(targets) & set(plan.copies[:, 0].tolist())
