"""Swapping on a stream of its own: no block and no staging buffer before its copy is done."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.runtime.device.api import HostDevice
from batchgen.runtime.device.swap import SwapLink, staging_bytes
from batchgen.runtime.device.transfers import Uploads
from batchgen.runtime.kv_cache import KVCache, LayerGeometry
from tests.support.model_device import ModelDevice, ModelEvent, ModelStream, Temper

_LAYERS = [LayerGeometry(2, 4, 4), LayerGeometry(1, 8, 4)]
_BLOCKS, _CPU_BLOCKS, _SIZE = 12, 10, 3
_STEPS, _SEEDS = 12, 25


def _cache() -> KVCache:
    return KVCache(
        _LAYERS,
        _BLOCKS,
        _SIZE,
        num_swap_blocks=_CPU_BLOCKS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def _link(device: Any, cache: KVCache) -> SwapLink:
    return SwapLink(device, cache.moves, cache.swap_pool, staging_blocks=2)


def _write(cache: KVCache, blocks: Any, value: float) -> None:
    for tensor in (*cache.keys, *cache.values):
        tensor[blocks] = value


def _pairs(copies: list[tuple[int, int]]) -> Any:
    return np.array(copies, dtype=np.int64).reshape(-1, 2)


def _found(cache: KVCache, block: int) -> set[float]:
    tensors = (*cache.keys, *cache.values)
    return {float(value) for tensor in tensors for value in tensor[block].unique()}


def _shuffle(device: ModelDevice, seed: int) -> tuple[list[set[float]], list[set[float]]]:
    """Steps that swap blocks out and in and write over others, at random.

    Returns:
        What each block holds at the end, and what it should.
    """
    rng, cache = Random(seed), _cache()
    link, uploads = _link(device, cache), Uploads(device)
    pool = [float(block) for block in range(_BLOCKS)]
    on_cpu: dict[int, float] = {}
    for block in range(_BLOCKS):
        _write(cache, block, pool[block])
    for step in range(_STEPS):
        blocks = rng.sample(range(_BLOCKS), rng.choice((0, 0, 2, 3, 7)))
        places = rng.sample(range(_CPU_BLOCKS), len(blocks))
        on_cpu |= {place: pool[block] for block, place in zip(blocks, places, strict=True)}
        there = rng.sample(sorted(on_cpu), rng.randint(0, min(len(on_cpu), 8)))
        targets = rng.sample(range(_BLOCKS), len(there))
        for place, block in zip(there, targets, strict=True):
            pool[block] = on_cpu[place]
        written = rng.sample(range(_BLOCKS), rng.choice((0, 1, 4)))
        for block in written:
            pool[block] = 100.0 + step
        uploads.begin()
        back = link.prepare_return(_pairs(list(zip(there, targets, strict=True))), uploads.put)
        uploads.send()
        touched = np.array([*written, *targets], dtype=np.int64)
        link.send(_pairs(list(zip(blocks, places, strict=True))), first=touched)
        link.guard(touched)
        link.fetch(back)
        device.compute.run(lambda blocks=written, step=step: _write(cache, blocks, 100.0 + step))
    device.finish()
    return [_found(cache, block) for block in range(_BLOCKS)], [{value} for value in pool]


def _num_wrong(temper: Temper) -> int:
    outcomes = [_shuffle(ModelDevice(temper), seed) for seed in range(_SEEDS)]
    return sum(found != expected for found, expected in outcomes)


@pytest.mark.parametrize("temper", Temper)
def test_every_block_holds_what_was_put_there_last(temper: Temper) -> None:
    assert _num_wrong(temper) == 0


# What waits, and for what: a gather for what wrote the blocks, a write for the copy out, a
# scatter for the copy in, and a copy in or out for what read its staging buffer last.
_FENCES = {
    "a gather waits for the steps before": ("link", "_written"),
    "a write to a block waits for its copy out": ("compute", "sent"),
    "a scatter waits for the copy in": ("compute", "filled"),
    "a staging buffer waits for its scatter": ("link", "scattered"),
}


@pytest.mark.parametrize("fence", _FENCES)
def test_without_one_of_its_fences_blocks_get_mixed_up(
    fence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter, name = _FENCES[fence]
    links: list[SwapLink] = []
    initialise, wait_for = SwapLink.__init__, ModelStream.wait_for

    def note(self: SwapLink, *arguments: Any, **keywords: Any) -> None:
        initialise(self, *arguments, **keywords)
        links.append(self)

    def events() -> list[Any]:
        link = links[-1]
        if name == "_written":
            return [link._written]
        if name == "sent":
            return [leaving.sent for leaving in link._leaving]
        return [getattr(staging, name) for staging in link._staging]

    def wait_unless_left_out(self: ModelStream, event: ModelEvent) -> None:
        is_compute = self is self.device.compute
        if is_compute != (waiter == "compute") or not any(event is each for each in events()):
            wait_for(self, event)

    monkeypatch.setattr(SwapLink, "__init__", note)
    monkeypatch.setattr(ModelStream, "wait_for", wait_unless_left_out)
    assert sum(_num_wrong(temper) for temper in Temper) > 0


def test_the_device_computes_while_blocks_leave() -> None:
    device, cache = ModelDevice(Temper.LATE_OTHERS), _cache()
    link, done = _link(device, cache), []
    link.send(_pairs([(0, 0), (1, 1), (2, 2), (3, 3)]), first=np.array([3]))
    link.guard(np.array([7, 8]))
    device.compute.run(lambda: done.append("another block is written"))
    assert link.is_sending
    assert done == ["another block is written"]
    link.guard(np.array([3]))
    # What is written first leaves first: the others are still there.
    assert [leaving.blocks.tolist() for leaving in link._leaving] == [[1, 2]]
    device.compute.run(lambda: done.append("block 3 is written"))
    assert len(done) == 1
    device.finish()
    assert len(done) == 2
    assert not link.is_sending


def test_blocks_come_back_while_the_step_before_runs() -> None:
    device, cache = ModelDevice(Temper.LATE_COMPUTE), _cache()
    _write(cache, list(range(_BLOCKS)), 0.0)
    link, done = _link(device, cache), []
    link.send(_pairs([(0, 0)]), first=np.array([0]))
    device.finish()
    device.compute.run(lambda: done.append("the step before"))
    link.fetch(link.prepare_return(_pairs([(0, 5)]), torch.from_numpy))
    filled = link._staging[link._turn].filled
    assert filled.is_done()
    assert not done
    device.finish()
    assert _found(cache, 5) == {0.0}


def test_what_the_link_reads_is_not_given_to_the_compute_stream_while_it_may() -> None:
    device, cache = ModelDevice(Temper.LATE), _cache()
    uploads, link = Uploads(device), _link(device, cache)
    own = link._link.allocated
    # More numbers than the buffers hold: they are replaced, and the old ones dropped.
    for count in (1, 20_000, 1, 50_000, 1, 1):
        for each, memory in ((link._uploads, own), (uploads, device.compute.allocated)):
            each.begin()
            tensors = [each.put(np.arange(count)) for _ in range(2)]
            each.send()
            assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= memory
    assert {staging.rows.untyped_storage().data_ptr() for staging in link._staging} <= own


def test_the_time_of_a_copy_is_measured_where_there_is_a_cpu_pool() -> None:
    cache = _cache()
    assert _link(HostDevice(), cache).measure_s_per_block() > 0
    assert SwapLink(HostDevice(), cache.moves, cache.swap_pool[:0]).measure_s_per_block() == 0


def test_staging_buffers_take_what_the_ledger_says() -> None:
    cache = _cache()
    link = SwapLink(HostDevice(), cache.moves, cache.swap_pool)
    held = sum(staging.rows.nbytes for staging in link._staging)
    assert held == staging_bytes(_CPU_BLOCKS, cache.moves.staging_bytes)
    # Blocks of 1 MiB: four buffers of 32 MiB.
    assert staging_bytes(1000, 1 << 20) == 128 << 20
    assert staging_bytes(1000, 100 << 20) == 400 << 20
    assert staging_bytes(0, 1 << 20) == 0
