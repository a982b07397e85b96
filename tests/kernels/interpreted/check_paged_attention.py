"""The attention kernels against float64, in the interpreter."""

import os

import pytest
import torch
from gpu_check_parts.batches import Batch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.batch import PagedRows
from batchgen.kernels.triton.paged_attention import paged_attention
from batchgen.kernels.triton.tiles import AttentionTile
from tests.support.paged_batch import draw_batch, in_fp8, tiny_shape

# A tile smaller than most rows, and the table's.
TILES = [AttentionTile(16, 16, 4, 1), None]
# The interpreter takes some 10 ms for a program; KERNEL_EXAMPLES=200 searches for longer.
EXAMPLES = int(os.environ.get("KERNEL_EXAMPLES", "10"))


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


def _sinks(seed: int, heads: int) -> torch.Tensor:
    return torch.randn(heads, generator=torch.Generator().manual_seed(seed))


row = st.integers(0, 40).flatmap(
    lambda context: st.tuples(st.just(context), st.integers(1, min(context, 12) or 1))
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_paged_attention_equals_float64(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 10_000))
    heads, kv_heads = data.draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (9, 3), (14, 2), (20, 1)]))
    shape = tiny_shape(
        heads,
        kv_heads,
        data.draw(st.sampled_from([8, 16, 24])),
        value_size=data.draw(st.sampled_from([16, 20])),
        block_size=data.draw(st.sampled_from([3, 4, 16, 64])),
    )
    window = data.draw(st.sampled_from([None, 1, 5, 17]))
    options = AttentionOptions(
        scale=data.draw(st.sampled_from([0.125, 0.5])),
        window=window,
        softcap=data.draw(st.sampled_from([None, 1.0, 30.0])),
        sinks=_sinks(seed, heads) if data.draw(st.booleans()) else None,
    )
    batch = draw_batch(
        seed,
        data.draw(st.lists(row, min_size=1, max_size=3)),
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
    seed = data.draw(st.integers(0, 10_000))
    heads, kv_heads = data.draw(st.sampled_from([(2, 2), (6, 2), (24, 1)]))
    contexts = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=5))
    window = data.draw(st.sampled_from([None, 9]))
    options = AttentionOptions(0.3, window, sinks=_sinks(seed, heads))
    rows = [(context, 1) for context in contexts]
    batch = draw_batch(seed, rows, tiny_shape(heads, kv_heads), window=window)
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
    shape = tiny_shape(6, 2, head_size, block_size=16, dtype=dtype)
    batch = draw_batch(head_size, [(40, 3), (0, 1), (17, 17)], shape)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    _check(batch, AttentionOptions(head_size**-0.5), tolerance, num_splits=2)


def test_an_fp8_pool_is_read_with_its_scales() -> None:
    batch = draw_batch(8, [(21, 2), (0, 1), (5, 5)], tiny_shape(size=32))
    batch, scales = in_fp8(batch, 0.5, 0.0625)
    _check(batch, AttentionOptions(0.2), scales=scales)


@pytest.mark.parametrize("block_size", [4, 48, 256])
def test_a_key_tile_is_of_tokens_whatever_the_block_size(block_size: int) -> None:
    batch = draw_batch(3, [(70, 3), (5, 5)], tiny_shape(block_size=block_size))
    _check(batch, AttentionOptions(0.25), tile=AttentionTile(16, 32, 4, 1))


def test_a_group_larger_than_a_tile_is_cut() -> None:
    batch = draw_batch(5, [(9, 2), (18, 1)], tiny_shape(71, 1))
    _check(batch, AttentionOptions(0.25), tile=AttentionTile(32, 16, 4, 1))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_log_sum_exp_is_that_of_the_scores(num_splits: int) -> None:
    batch = draw_batch(6, [(37, 2), (0, 1)], tiny_shape(2, 2))
    lse = torch.full(batch.query.shape[:2], float("nan"))
    _attend(batch, AttentionOptions(0.5), num_splits=num_splits, lse=lse)
    scores = torch.einsum("nhd,chd->nhc", batch.query[:2].double(), batch.keys[0].double()) * 0.5
    scores[0, :, -1] = float("-inf")
    expected = torch.cat((scores.logsumexp(2), torch.full((1, 2), float("-inf")).double()))
    torch.testing.assert_close(lse.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    batch = draw_batch(7, [(30, 4), (50, 7), (64, 1), (3, 3)])
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
