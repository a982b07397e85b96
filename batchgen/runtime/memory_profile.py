"""Measuring what a full step, and graphs, take on a GPU beside weights and pool."""

from collections.abc import Callable
from itertools import pairwise
from math import lcm

import numpy as np

from batchgen.engine.step import IntArray, SampleBatch, StepPlan
from batchgen.errors import OutOfDeviceMemoryError, UsageError
from batchgen.runtime.attention import AttentionBackend, ModelForward
from batchgen.runtime.device.api import Device
from batchgen.runtime.device.graphs import CapturableBackend, DecodeGraphs
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache, KVFormat
from batchgen.runtime.memory import DeviceMemory
from batchgen.runtime.model import LoadedModel

# Rows times tokens of the prefix that rows of the largest step share, which is attended to once
# for all of them, and what its length is a multiple of, so that it is in any backend.
_SHARED_READS = 2048
_SHARED_TOKENS = 128


def full_step(num_tokens: int, num_rows: int, block_size: int, max_row_tokens: int) -> StepPlan:
    """Make the plan of the largest step: prompts after a prefix, all other rows decoding.

    Every row samples, so the logits are the largest too. All rows use the same blocks:
    what they compute means nothing.

    Args:
        num_tokens: of the step; fewer where its rows cannot be as long.
        num_rows: at most.
        block_size: tokens in a block.
        max_row_tokens: the longest row, so that few of them may not fill the step.
    """
    num_rows = min(num_rows, num_tokens)
    past = _shared_tokens(num_rows, block_size, max_row_tokens)
    lengths = _row_lengths(num_tokens, num_rows, max_row_tokens - past)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    num_tokens = int(starts[-1])
    positions = past + np.arange(num_tokens) - np.repeat(starts[:-1], lengths)
    width = -(-(past + int(lengths[0])) // block_size)
    samples = SampleBatch(
        rows=np.arange(num_rows),
        temperature=np.ones(num_rows),
        top_p=np.full(num_rows, 0.9),
        min_p=np.zeros(num_rows),
        top_k=np.zeros(num_rows, dtype=np.int64),
        noise_keys=np.zeros(num_rows, dtype=np.uint64),
        positions=np.zeros(num_rows, dtype=np.int64),
    )
    return StepPlan(
        step=0,
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        slots=positions,
        query_starts=starts,
        context_lens=past + lengths,
        block_tables=np.tile(np.arange(width, dtype=np.int32), (num_rows, 1)),
        samples=samples,
        swap_out=np.zeros((0, 2), dtype=np.int64),
        swap_in=np.zeros((0, 2), dtype=np.int64),
        copies=np.zeros((0, 2), dtype=np.int64),
    )


def _shared_tokens(num_rows: int, block_size: int, max_row_tokens: int) -> int:
    """Choose how long a prefix rows share; 0 where there is no room for one."""
    unit = lcm(block_size, _SHARED_TOKENS)
    wanted = -(-_SHARED_READS // (num_rows * unit)) * unit
    return wanted if num_rows > 1 and 2 * wanted <= max_row_tokens else 0


def _row_lengths(num_tokens: int, num_rows: int, longest: int) -> IntArray:
    """Return each row a token, and the first of them as many as they may have."""
    left = num_tokens - num_rows - np.arange(num_rows) * (longest - 1)
    return 1 + np.clip(left, 0, longest - 1)


def activation_bytes(
    loaded: LoadedModel,
    attention: AttentionBackend,
    card: DeviceMemory,
    *,
    num_tokens: int,
    num_rows: int,
    block_size: int,
    kv_format: KVFormat,
) -> int:
    """Run the largest step over a pool of its own; return its peak above that, in bytes.

    Raises:
        UsageError: there is no memory for it.
    """
    plan = full_step(num_tokens, num_rows, block_size, loaded.max_model_len)
    cache = KVCache(
        loaded.layers,
        plan.block_tables.shape[1],
        block_size,
        num_swap_blocks=0,
        dtype=kv_format.dtype,
        device=loaded.model.device,
        scales=kv_format.scales,
    )
    executor = ModelExecutor(loaded.model, cache, attention)
    try:
        # What libraries set up when they are first used stays: it is no part of the peak.
        executor.execute(plan).result()
        before = card.in_use()
        card.begin_peak()
        executor.execute(plan).result()
    except OutOfDeviceMemoryError as error:
        raise UsageError(
            f"beside the model's weights there is no memory for a step of {plan.num_tokens:,} "
            f"tokens; lower engine.max_num_batched_tokens or engine.max_num_seqs: {error}"
        ) from error
    activations = card.peak_in_use() - before
    del cache, executor
    card.trim()
    return activations


def graph_bytes(
    loaded: LoadedModel,
    attention: CapturableBackend,
    card: DeviceMemory,
    device: Device,
    *,
    max_rows: int,
    block_size: int,
    kv_format: KVFormat,
    say: Callable[[str], None],
) -> int:
    """Capture two graphs over a pool of a single block; return what all will take, in bytes.

    The second finds room in the first's memory, as all others will, and takes what is every
    graph's own.

    Args:
        loaded: the model.
        attention: the backend.
        card: the device's memory.
        device: where the model is.
        max_rows: rows of the largest step.
        block_size: tokens in a block.
        kv_format: of the pool.
        say: takes the reason if there can be no graphs; 0 is given then.
    """
    cache = KVCache(
        loaded.layers,
        1,
        block_size,
        num_swap_blocks=0,
        dtype=kv_format.dtype,
        device=loaded.model.device,
        scales=kv_format.scales,
    )
    card.trim()
    free = [card.free()]
    graphs = DecodeGraphs(
        device,
        ModelForward(loaded.model),
        cache,
        attention,
        max_rows=max_rows,
        max_keys=loaded.max_model_len,
        say=say,
    )
    for rows in graphs.sizes[-1:-3:-1]:
        if not graphs.capture(rows):
            return 0
        card.trim()
        free.append(card.free())
    largest, *others = (before - after for before, after in pairwise(free))
    most_graphs = graphs.most_graphs
    del graphs, cache
    card.trim()
    return largest + sum(max(0, other) * (most_graphs - 1) for other in others)
