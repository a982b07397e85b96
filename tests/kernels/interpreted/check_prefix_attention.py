"""Attention to shared prefixes and its join against float64, in the interpreter."""

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gpu_check_parts.batches import Batch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.batch import PagedRows, Parts, SharedSegments
from batchgen.kernels.triton.join import prepare_join
from batchgen.kernels.triton.prefix_attention import cascade_attention
from tests.support.paged_batch import draw_batch, in_fp8, tiny_shape

# See check_paged_attention.py.
EXAMPLES = int(os.environ.get("KERNEL_EXAMPLES", "10"))


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    """Give the ranges of rows whose flag is set."""
    borders = [i for i in range(len(flags) + 1) if (flags[i - 1] if i else False) != (
        flags[i] if i < len(flags) else False
    )]  # fmt: skip
    return list(zip(borders[::2], borders[1::2], strict=True))


def _segments(
    batch: Batch, cuts: list[int], key_starts: list[int], spare: int = 0
) -> SharedSegments:
    """Cut what rows do not call their own at ``cuts``; neighbours share each piece.

    ``spare`` empty segments and places stand behind, as in a captured graph.
    """
    starts = batch.query_starts.tolist()
    found = []
    places = torch.full((batch.query.shape[0], max(1, len(cuts) - 1)), -1, dtype=torch.int32)
    num_places = 0
    for level, (low, high) in enumerate(pairwise(cuts)):
        for first, end in _runs([start >= high for start in key_starts]):
            n = starts[end] - starts[first]
            # The keys are the same in every row of the run: take the last one's.
            found.append((num_places, starts[first], end - 1, low, high, n))
            places[starts[first] : starts[end], level] = torch.arange(num_places, num_places + n)
            num_places += n
    found += [(num_places, 0, 0, 0, 0, 0)] * spare
    columns = torch.tensor(found).view(-1, 6).T.contiguous()
    return SharedSegments(
        place_starts=torch.cat((columns[0], torch.tensor([num_places]))),
        first_tokens=columns[1],
        table_rows=columns[2],
        key_starts=columns[3],
        key_ends=columns[4],
        token_places=places,
        num_places=num_places + 3 * spare,
        max_query_len=int(columns[5].max()) if found else 1,
    )


def _check(
    batch: Batch,
    options: AttentionOptions,
    key_starts: list[int],
    segments: SharedSegments,
    tolerance: float = 1e-5,
    **keywords: Any,
) -> None:
    rows = PagedRows(
        batch.query_starts, batch.context_lens, batch.max_query_len, torch.tensor(key_starts)
    )
    out = cascade_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables,
        rows, segments, options, **keywords,
    )  # fmt: skip
    torch.testing.assert_close(
        out.double(), batch.expected(options), atol=tolerance, rtol=tolerance
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_any_cut_into_shared_segments_equals_float64(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 10_000))
    heads, kv_heads = data.draw(st.sampled_from([(2, 2), (6, 2), (5, 1)]))
    size = data.draw(st.sampled_from([4, 7]))
    shared = size * data.draw(st.integers(1, 6))
    tails = st.tuples(st.integers(1, 6), st.integers(0, 6))
    rows = [
        (shared + before + n, n) for n, before in data.draw(st.lists(tails, min_size=1, max_size=5))
    ]
    batch = draw_batch(
        seed, rows, tiny_shape(heads, kv_heads, block_size=size), shared=shared,
        padding=data.draw(st.sampled_from([0, 2])),
    )  # fmt: skip
    cuts = sorted({0, *data.draw(st.lists(st.integers(1, shared), min_size=1, max_size=3))})
    key_starts = [data.draw(st.sampled_from(cuts)) if context else 0 for context, _ in rows]
    options = AttentionOptions(
        scale=0.3,
        softcap=data.draw(st.sampled_from([None, 2.0])),
        sinks=torch.linspace(-1, 1, heads) if data.draw(st.booleans()) else None,
    )
    _check(
        batch, options, key_starts,
        _segments(batch, cuts, key_starts, spare=data.draw(st.integers(0, 1))),
        num_splits=data.draw(st.sampled_from([1, 2])),
        num_shared_splits=data.draw(st.sampled_from([1, 3])),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_over_three_groups_in_one_launch(dtype: torch.dtype) -> None:
    rows = [(64 + 3 + i % 4, 1 + i % 3) for i in range(9)]
    batch = draw_batch(3, rows, tiny_shape(size=64, block_size=16, dtype=dtype), shared=64)
    # The row between two groups shares nothing.
    key_starts = [64, 64, 64, 0, 64, 64, 0, 64, 64]
    segments = _segments(batch, [0, 64], key_starts)
    assert len(segments.first_tokens) == 3
    _check(batch, AttentionOptions(0.125), key_starts, segments, 1e-2, num_shared_splits=2)


def test_a_shared_prefix_in_an_fp8_pool_is_read_with_its_scales() -> None:
    batch, scales = in_fp8(draw_batch(9, [(17, 1), (19, 3), (16, 2)], shared=12), 0.5, 0.0625)
    key_starts = [12, 12, 0]
    segments = _segments(batch, [0, 12], key_starts)
    _check(batch, AttentionOptions(0.2), key_starts, segments, scales=scales)


def test_the_join_weighs_parts_by_their_sums_and_reads_nothing_without_weight() -> None:
    rng = np.random.default_rng(4)
    out = torch.tensor(rng.normal(size=(6, 5, 2, 20))).float()
    lse = torch.tensor(rng.normal(size=(6, 5, 2)) * 30).float()
    empty = torch.tensor(rng.random(size=lse.shape) < 0.4)
    empty[:, 1] = True
    lse[empty], out[empty] = float("-inf"), float("nan")
    joined = torch.empty(5, 2, 20)
    sums = torch.empty(5, 2)
    prepare_join(Parts(out, lse), joined, sums).run()
    total = lse.double().logsumexp(0)
    weights = (lse.double() - total).exp()
    expected = torch.where(empty[..., None], 0.0, out.double() * weights[..., None]).sum(0)
    nothing = total == float("-inf")
    expected[nothing] = 0.0
    torch.testing.assert_close(joined.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sums.double(), total, atol=1e-5, rtol=1e-6)
    assert nothing.any()
