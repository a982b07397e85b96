"""Shared-prefix attention over layouts found from block tables, against row by row."""

from itertools import product
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.step import StepPlan
from batchgen.kernels import cascade as cascade_module
from batchgen.kernels.cascade import cascade_attention
from batchgen.kernels.reference import AttentionOptions, paged_attention
from batchgen.runtime import shared_prefixes as layout_module
from batchgen.runtime.shared_prefixes import SharedPrefix, cascade_layout
from tests.support.sample_batch import sample_batch

_NONE = np.zeros((0, 2), dtype=np.int64)


def _plan(tables: list[list[int]], contexts: list[int], queries: list[int]) -> StepPlan:
    width = max(map(len, tables))
    padded = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(queries)))
    tokens = np.zeros(starts[-1], dtype=np.int64)
    return StepPlan(
        step=0,
        token_ids=tokens,
        positions=tokens,
        slots=tokens,
        query_starts=starts,
        context_lens=np.array(contexts),
        block_tables=padded,
        samples=sample_batch(()),
        swap_out=_NONE,
        swap_in=_NONE,
        copies=_NONE,
    )


@st.composite
def _steps(draw: st.DrawFn) -> tuple[StepPlan, int, int]:
    """Rows whose tables begin with paths of a small tree of shared blocks."""
    size = draw(st.integers(1, 5))
    trunks = draw(st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=7))
    trunks = sorted(trunks) if draw(st.booleans()) else trunks
    # A block is a path of the tree: equal prefixes are equal blocks.
    numbers: dict[tuple[int, ...], int] = {}
    tables, contexts, queries = [], [], []
    for row, trunk in enumerate(trunks):
        table = [numbers.setdefault(tuple(trunk[: i + 1]), len(numbers)) for i in range(len(trunk))]
        own = draw(st.integers(1, 3))
        table += [numbers.setdefault((9, row, i), len(numbers)) for i in range(own)]
        context = draw(st.integers((len(trunk) + own - 1) * size + 1, (len(trunk) + own) * size))
        tables.append(table)
        contexts.append(context)
        # Some rows compute a part of what others share already, in this very step.
        queries.append(draw(st.integers(1, context)))
    return _plan(tables, contexts, queries), size, len(numbers)


@settings(max_examples=150, deadline=None)
@given(step=_steps(), heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]), data=st.data())
def test_cascade_equals_row_by_row_on_any_step(step, heads, data: st.DataObject) -> None:
    plan, size, num_blocks = step
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    num_heads, num_kv_heads = heads
    softcap = data.draw(st.sampled_from([None, 2.0]))
    keys = torch.randn(num_blocks, size, num_kv_heads, 4)
    values = torch.randn(num_blocks, size, num_kv_heads, 6)
    _poison_unused(plan, size, keys, values)
    query = torch.randn(plan.num_tokens, num_heads, 4)
    expected = paged_attention(
        query,
        keys,
        values,
        plan.query_starts.tolist(),
        plan.context_lens.tolist(),
        torch.from_numpy(plan.block_tables.astype(np.int64)),
        AttentionOptions(0.5, softcap=softcap),
    )
    # The fused attention in one piece and in many; from all reads on, from some, from none.
    for sharing, reads, bias in product(SharedPrefix, (1, 12), (1 << 24, 40)):
        with (
            patch.object(layout_module, "_MIN_SHARED_READS", reads),
            patch.object(cascade_module, "_MAX_BIAS", bias),
        ):
            layout = cascade_layout(plan, size, torch.from_numpy, sharing)
            out = cascade_attention(query, keys, values, layout, scale=0.5, softcap=softcap)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def _poison_unused(plan: StepPlan, size: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Put NaN into every slot that no row has written."""
    used = {
        (int(plan.block_tables[row, at // size]), at % size)
        for row in range(plan.num_rows)
        for at in range(int(plan.context_lens[row]))
    }
    for block in range(keys.shape[0]):
        for offset in range(size):
            if (block, offset) not in used:
                keys[block, offset] = values[block, offset] = float("nan")


def test_a_forest_of_prefixes_is_found_on_every_level() -> None:
    system, documents = [0, 1], ([2, 3, 4], [5, 6, 7])
    tables = [[*system, *documents[row // 4], 10 + row] for row in range(8)]
    plan = _plan(tables, [81] * 8, [1] * 8)
    layout = cascade_layout(plan, 16, torch.from_numpy, SharedPrefix.ON)
    found = [(s.blocks.tolist(), s.first_token, s.end_token) for s in layout.segments]
    assert found == [([0, 1], 0, 8), ([2, 3, 4], 0, 4), ([5, 6, 7], 4, 8)]
    assert [rows.tokens.shape for rows in layout.own] == [(8, 1)]
    assert layout.own[0].blocks.tolist() == [[10 + row] for row in range(8)]


def test_a_row_that_computes_a_shared_block_itself_does_not_take_part_in_it() -> None:
    # Row 0 computes blocks 0 and 1 in this step, rows 1 to 8 hit them.
    tables = [[0, 1, 20 + row] for row in range(9)]
    plan = _plan(tables, [40] * 9, [40, *[8] * 8])
    layout = cascade_layout(plan, 16, torch.from_numpy, SharedPrefix.ON)
    found = [(s.blocks.tolist(), s.first_token, s.end_token) for s in layout.segments]
    assert found == [([0, 1], 40, 104)]


def test_auto_shares_where_many_rows_or_a_long_prefix_make_it_pay() -> None:
    found = {}
    for rows in (8, 64):
        plan = _plan([[0, 1, 20 + row] for row in range(rows)], [40] * rows, [1] * rows)
        layout = cascade_layout(plan, 16, torch.from_numpy, SharedPrefix.AUTO)
        found[rows] = len(layout.segments)
    assert found == {8: 0, 64: 1}


def test_off_shares_nothing() -> None:
    plan = _plan([[0, 1, 20 + row] for row in range(64)], [40] * 64, [1] * 64)
    assert not cascade_layout(plan, 16, torch.from_numpy, SharedPrefix.OFF).segments


def test_rows_of_unlike_sizes_are_not_padded_to_one_shape() -> None:
    tables = [[row * 10 + i for i in range(10)] for row in range(4)]
    plan = _plan(tables, [4, 5, 150, 155], [1, 1, 1, 100])
    layout = cascade_layout(plan, 16, torch.from_numpy)
    assert [rows.tokens.shape[0] for rows in layout.own] == [2, 1, 1]
