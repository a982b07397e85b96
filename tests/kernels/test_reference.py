"""Paged attention in torch against a dense float64 model of the same mathematics."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.reference import AttentionOptions, paged_attention, store_kv
from tests.support.dense_attention import dense_attention


def _check(rng, heads, kv_heads, size, rows, options, head_size=8, value_size=8) -> None:
    """Scatter rows of (context, queries) over a poisoned pool and compare."""
    counts = [-(-context // size) for context, _ in rows]
    blocks = rng.permutation(sum(counts) + 2)
    width = max(counts)
    tables = np.zeros((len(rows), width), dtype=np.int64)
    keys = torch.full((len(blocks), size, kv_heads, head_size), float("nan"))
    values = torch.full((len(blocks), size, kv_heads, value_size), float("nan"))
    queries, expected, used = [], [], 0
    for row, (context, n) in enumerate(rows):
        own = blocks[used : used + counts[row]]
        used += counts[row]
        tables[row, : counts[row]] = own
        key = torch.tensor(rng.normal(size=(context, kv_heads, head_size)), dtype=torch.float32)
        value = torch.tensor(rng.normal(size=(context, kv_heads, value_size)), dtype=torch.float32)
        at = np.arange(context)
        slots = torch.tensor(own[at // size] * size + at % size)
        store_kv(keys, key, slots)
        store_kv(values, value, slots)
        query = torch.tensor(rng.normal(size=(n, heads, head_size)), dtype=torch.float32)
        queries.append(query)
        expected.append(dense_attention(query, key, value, options))
    starts = [0, *np.cumsum([n for _, n in rows]).tolist()]
    out = paged_attention(
        torch.cat(queries), keys, values, starts, [c for c, _ in rows],
        torch.tensor(tables), options,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_paged_attention_equals_dense_float64(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    heads, kv_heads = data.draw(st.sampled_from([(1, 1), (4, 2), (9, 3), (14, 2), (15, 5)]))
    size = data.draw(st.integers(1, 6))
    rows = data.draw(
        st.lists(
            st.integers(1, 12).flatmap(lambda c: st.tuples(st.just(c), st.integers(1, c))),
            min_size=1,
            max_size=4,
        )
    )
    sinks = torch.tensor(rng.normal(size=heads)).float() if data.draw(st.booleans()) else None
    options = AttentionOptions(
        scale=data.draw(st.sampled_from([0.125, 1.0])),
        window=data.draw(st.sampled_from([None, 1, 4])),
        softcap=data.draw(st.sampled_from([None, 1.0, 30.0])),
        sinks=sinks,
    )
    _check(rng, heads, kv_heads, size, rows, options, value_size=data.draw(st.integers(3, 8)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (15, 5), (48, 2)])
def test_i03_query_head_h_reads_kv_head_h_over_group(heads: int, kv_heads: int) -> None:
    _check(np.random.default_rng(1), heads, kv_heads, 4, [(10, 10), (7, 1)], AttentionOptions(0.35))


def test_i04_a_window_of_four_sees_four_keys_itself_included() -> None:
    key = torch.zeros(3, 4, 1, 1)
    value = torch.zeros(3, 4, 1, 1)
    store_kv(value, torch.arange(10.0).view(10, 1, 1), torch.arange(10))
    options = AttentionOptions(scale=1.0, window=4)
    tables = torch.tensor([[0, 1, 2]])
    prefill = paged_attention(torch.zeros(10, 1, 1), key, value, [0, 10], [10], tables, options)
    # Equal scores: the output is the mean of the visible positions.
    visible = [range(max(0, p - 3), p + 1) for p in range(10)]
    expected = torch.tensor([float(np.mean(list(v))) for v in visible])
    torch.testing.assert_close(prefill.flatten(), expected)
    decode = paged_attention(torch.zeros(1, 1, 1), key, value, [0, 1], [10], tables, options)
    torch.testing.assert_close(decode.flatten(), expected[-1:])


def test_a_long_prefill_in_pieces_equals_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.kernels.reference._MAX_SCORES", 64)
    options = AttentionOptions(0.35, window=7, softcap=5.0)
    _check(np.random.default_rng(2), 4, 2, 4, [(23, 23), (9, 4)], options)
