"""Launches over fixed buffers of upper bounds, as a captured graph has them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_check_parts.batches import Batch

from batchgen.engine.step import StepPlan
from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.launch import Launch
from batchgen.runtime.attention_metadata import AttentionMetadata, InputShape, exact_inputs
from batchgen.runtime.kv_cache import LayerGeometry
from batchgen.runtime.shared_prefixes import SharedPrefix
from batchgen.runtime.triton_attention import TritonAttention
from tests.support.paged_batch import draw_batch
from tests.support.sample_batch import sample_batch

NONE = np.zeros((0, 2), dtype=np.int64)
LAYER = SimpleNamespace(layer_idx=0)
ATTENTION = TritonAttention([LayerGeometry(2, 16, 16, group=2)], SharedPrefix.ON)
DECODE = InputShape(
    num_tokens=8, num_rows=8, width=9, max_query_len=1, max_keys=36,
    num_segments=2, num_places=12, num_levels=2, max_segment_len=8,
)  # fmt: skip
MIXED = replace(DECODE, num_tokens=12, num_rows=4, max_query_len=6)


def _plan(batch: Batch) -> StepPlan:
    size, starts = batch.shape.block_size, batch.query_starts.numpy().astype(np.int64)
    tables = batch.block_tables.numpy()
    positions = [np.arange(context - n, context) for context, n in batch.rows]
    slots = [
        table[at // size].astype(np.int64) * size + at % size
        for table, at in zip(tables, positions, strict=True)
    ]
    everywhere = np.concatenate(positions)
    return StepPlan(
        step=0, token_ids=everywhere, positions=everywhere, slots=np.concatenate(slots),
        query_starts=starts, context_lens=batch.context_lens.numpy(),
        # Blocks that do not exist stand for what may not be looked at.
        block_tables=tables.astype(np.int32), samples=sample_batch(()),
        swap_out=NONE, swap_in=NONE, copies=NONE,
    )  # fmt: skip


def _batch(seed: int, rows: list[tuple[int, int]], shared: int = 8) -> Batch:
    return draw_batch(seed, rows, shared=shared)


def _padded(new: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """What a model computes for padding is of no matter, be it no number at all."""
    whole = new.new_full((num_tokens, *new.shape[1:]), float("nan"))
    whole[: len(new)] = new
    return whole


def _attend(batch: Batch, inputs: AttentionMetadata, array: torch.Tensor) -> torch.Tensor:
    cache: Any = SimpleNamespace(
        keys=[batch.key_cache],
        values=[batch.value_cache],
        block_size=batch.shape.block_size,
        scales=None,
    )
    new = [
        torch.cat([row[len(row) - n :] for row, (_, n) in zip(rows, batch.rows, strict=True)])
        for rows in (batch.keys, batch.values)
    ]
    tensors = [_padded(one, inputs.shape.num_tokens) for one in (batch.query, *new)]
    layer: Any = LAYER
    step = ATTENTION.over(inputs, array, cache)
    return step.attend(layer, *tensors, AttentionOptions(0.25), {})


def _filled(inputs: AttentionMetadata, batch: Batch) -> torch.Tensor:
    array = np.full(inputs.size, 1 << 29, dtype=np.int32)
    plan = _plan(batch)
    inputs.fill(array, plan, ATTENTION.shared_runs(plan, batch.shape.block_size))
    return torch.from_numpy(array)


STEPS = [
    (DECODE, [(17, 1), (9, 1), (20, 1)]),
    (DECODE, [(12, 1)]),
    (DECODE, [(9 + i, 1) for i in range(8)]),
    (MIXED, [(17, 1), (14, 6), (9, 1)]),
    (MIXED, [(30, 5), (12, 1)]),
]


@pytest.mark.parametrize(("shape", "rows"), STEPS)
def test_real_rows_have_their_results_and_padded_ones_zeros(
    shape: InputShape, rows: list[tuple[int, int]]
) -> None:
    batch = _batch(len(rows), rows)
    inputs = AttentionMetadata(shape, batch.shape.block_size)
    before = batch.key_cache.clone()
    out = _attend(batch, inputs, _filled(inputs, batch))
    expected = batch.expected(AttentionOptions(0.25))
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=1e-5, rtol=1e-5)
    assert (out[len(expected) :] == 0).all()
    # Nothing was written for padding: what is not the rows' own is poisoned still.
    torch.testing.assert_close(batch.key_cache, before, equal_nan=True, atol=0, rtol=0)


def test_runs_that_do_not_fit_are_attended_to_row_by_row() -> None:
    batch = _batch(5, [(17, 1), (9, 1), (20, 1)])
    plan = _plan(batch)
    assert ATTENTION.shared_runs(plan, 4)
    expected = batch.expected(AttentionOptions(0.25))
    for bound in ({"num_places": 2}, {"max_segment_len": 2}):
        inputs = AttentionMetadata(replace(DECODE, **bound), 4)
        array = _filled(inputs, batch)
        assert not inputs.find(array).own_rows.key_starts.any()
        out = _attend(batch, inputs, array)[:3].double()
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_launches_depend_on_the_shape_alone_and_read_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches: list[Launch] = []

    def note(launch: Launch) -> None:
        launches.append(launch)

    monkeypatch.setattr(Launch, "run", note)
    inputs = AttentionMetadata(DECODE, 4)
    # Tensors without values: whoever wants to know one fails.
    batch = _batch(1, [(9, 1)])
    batch = replace(
        batch,
        query=batch.query.to("meta"),
        keys=[key.to("meta") for key in batch.keys],
        values=[value.to("meta") for value in batch.values],
        key_cache=batch.key_cache.to("meta"),
        value_cache=batch.value_cache.to("meta"),
    )
    array = torch.empty(inputs.size, dtype=torch.int32, device="meta")
    _attend(batch, inputs, array)
    # A store, the rows' own keys, the shared ones, and the join.
    assert len(launches) == 4
    for launch in launches:
        tensors = [t for t in launch.arguments.values() if isinstance(t, torch.Tensor)]
        assert all(t.device.type == "meta" for t in tensors)


def test_exact_inputs_leave_nothing_over() -> None:
    batch = _batch(3, [(17, 1), (14, 6), (9, 1)])
    plan = _plan(batch)
    runs = ATTENTION.shared_runs(plan, 4)
    inputs = exact_inputs(plan, 4, runs)
    step = inputs.find(_filled(inputs, batch))
    assert inputs.fits(plan)
    assert step.slots.tolist() == plan.slots.tolist()
    assert step.segments is not None
    assert step.segments.num_places == 8
    assert step.segments.token_places[:, 0].tolist() == list(range(8))
    out = _attend(batch, inputs, _filled(inputs, batch)).double()
    torch.testing.assert_close(out, batch.expected(AttentionOptions(0.25)), atol=1e-5, rtol=1e-5)
