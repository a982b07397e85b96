"""The attention kernels against float64, in the interpreter."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.batch import PagedRows
from batchgen.kernels.triton.paged_attention import paged_attention
from batchgen.kernels.triton.scales import KVScales
from batchgen.kernels.triton.tiles import AttentionTile
from tests.paged_batch import Batch, Shape, make_batch

# A tile smaller than most rows, and the table's.
TILES = [AttentionTile(16, 16, 4, 1), None]
# The interpreter takes some 10 ms for a program; KERNEL_EXAMPLES=200 searches for longer.
EXAMPLES = int(os.environ.get("KERNEL_EXAMPLES", "12"))


def _rows(batch: Batch, max_query_len: int | None = None) -> PagedRows:
    most = batch.max_query_len if max_query_len is None else max_query_len
    return PagedRows(batch.query_starts, batch.context_lens, most)


def _attend(batch: Batch, options: AttentionOptions, **keywords) -> torch.Tensor:
    return paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables,
        _rows(batch), options, **keywords,
    )  # fmt: skip


def _check(batch: Batch, options: AttentionOptions, tolerance: float = 1e-5, **keywords) -> None:
    out = _attend(batch, options, **keywords)
    assert out.dtype == batch.query.dtype
    torch.testing.assert_close(
        out.double(), batch.expected(options), atol=tolerance, rtol=tolerance
    )


def _sinks(rng: np.random.Generator, heads: int) -> torch.Tensor:
    return torch.tensor(rng.normal(size=heads), dtype=torch.float32)


row = st.integers(0, 40).flatmap(
    lambda context: st.tuples(st.just(context), st.integers(1, min(context, 12) or 1))
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_paged_attention_equals_float64(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    heads, kv_heads = data.draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (9, 3), (14, 2), (20, 1)]))
    shape = Shape(
        heads,
        kv_heads,
        data.draw(st.sampled_from([8, 16, 24])),
        data.draw(st.sampled_from([16, 20])),
        data.draw(st.sampled_from([3, 4, 16, 64])),
    )
    window = data.draw(st.sampled_from([None, 1, 5, 17]))
    options = AttentionOptions(
        scale=data.draw(st.sampled_from([0.125, 0.5])),
        window=window,
        softcap=data.draw(st.sampled_from([None, 1.0, 30.0])),
        sinks=_sinks(rng, heads) if data.draw(st.booleans()) else None,
    )
    batch = make_batch(
        rng,
        data.draw(st.lists(row, min_size=1, max_size=4)),
        shape,
        padding=data.draw(st.sampled_from([0, 0, 3])),
        window=window,
    )
    _check(
        batch,
        options,
        num_splits=data.draw(st.sampled_from([1, 1, 2, 3])),
        tile=data.draw(st.sampled_from(TILES)),
    )


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(data=st.data())
def test_a_decode_batch_needs_no_search_and_equals_float64(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    heads, kv_heads = data.draw(st.sampled_from([(2, 2), (6, 2), (24, 1)]))
    contexts = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=5))
    window = data.draw(st.sampled_from([None, 9]))
    options = AttentionOptions(0.3, window, sinks=_sinks(rng, heads))
    batch = make_batch(
        rng, [(context, 1) for context in contexts], Shape(heads, kv_heads), window=window
    )
    _check(batch, options, num_splits=data.draw(st.sampled_from([1, 4])))


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [
        (80, torch.float32),
        (256, torch.float32),
        (16, torch.float16),
        (128, torch.float16),
        (64, torch.bfloat16),
        (96, torch.bfloat16),
        (256, torch.bfloat16),
    ],
)
def test_head_sizes_and_dtypes(head_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(head_size)
    shape = Shape(6, 2, head_size, head_size, 16, dtype)
    batch = make_batch(rng, [(40, 3), (0, 1), (17, 17)], shape)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    _check(batch, AttentionOptions(head_size**-0.5), tolerance, num_splits=2)


def test_an_fp8_pool_is_read_with_its_scales() -> None:
    rng = np.random.default_rng(8)
    batch = make_batch(rng, [(21, 2), (0, 1), (5, 5)], Shape(4, 2, 32, 32))
    scales = torch.tensor([0.5, 0.0625])
    kept = {
        name: (getattr(batch, name) / scales[:, None]).to(torch.float8_e4m3fn)
        for name in ("key_cache", "value_cache")
    }
    lists = {
        name: [(row / scales[:, None]).to(torch.float8_e4m3fn).float() * scales[:, None]
               for row in getattr(batch, name)]
        for name in ("keys", "values")
    }  # fmt: skip
    _check(replace(batch, **kept, **lists), AttentionOptions(0.2), scales=KVScales(scales, scales))


@pytest.mark.parametrize("block_size", [4, 48, 256])
def test_a_key_tile_is_of_tokens_whatever_the_block_size(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    batch = make_batch(rng, [(70, 3), (5, 5)], Shape(block_size=block_size))
    _check(batch, AttentionOptions(0.25), tile=AttentionTile(16, 32, 4, 1))


def test_a_group_larger_than_a_tile_is_cut() -> None:
    rng = np.random.default_rng(5)
    batch = make_batch(rng, [(9, 2), (18, 1)], Shape(heads=71, kv_heads=1))
    _check(batch, AttentionOptions(0.25), tile=AttentionTile(32, 16, 4, 1))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_log_sum_exp_is_that_of_the_scores(num_splits: int) -> None:
    rng = np.random.default_rng(6)
    batch = make_batch(rng, [(37, 2), (0, 1)], Shape(heads=2, kv_heads=2))
    lse = torch.full(batch.query.shape[:2], float("nan"))
    _attend(batch, AttentionOptions(0.5), num_splits=num_splits, lse=lse)
    scores = torch.einsum("nhd,chd->nhc", batch.query[:2].double(), batch.keys[0].double()) * 0.5
    scores[0, :, -1] = float("-inf")
    expected = torch.cat((scores.logsumexp(2), torch.full((1, 2), float("-inf")).double()))
    torch.testing.assert_close(lse.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(7)
    batch = make_batch(rng, [(30, 4), (50, 7), (64, 1), (3, 3)], Shape())
    options = AttentionOptions(0.25)
    whole = _attend(batch, options, num_splits=2)
    for row, (_, n) in enumerate(batch.rows):
        start = int(batch.query_starts[row])
        alone = paged_attention(
            batch.query[start : start + n], batch.key_cache, batch.value_cache,
            batch.block_tables[row : row + 1],
            PagedRows(torch.tensor([0, n]), batch.context_lens[row : row + 1], 7),
            options, num_splits=2,
        )  # fmt: skip
        assert torch.equal(alone, whole[start : start + n])
