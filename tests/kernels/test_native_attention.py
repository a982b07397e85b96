"""The C paged attention against a dense float64 model, and against itself in other batches."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.native.paged_attention import (
    PackedRows,
    native_paged_attention,
    supports,
)
from batchgen.kernels.reference import AttentionOptions
from tests.support.dense_attention import dense_attention


@dataclass(frozen=True)
class Step:
    """Rows over a pool whose unwritten slots hold NaN."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    packed: PackedRows
    contexts: tuple[int, ...]
    counts: tuple[int, ...]

    def run(self, options: AttentionOptions) -> torch.Tensor:
        return native_paged_attention(self.query, self.keys, self.values, self.packed, options)

    def expected(self, options: AttentionOptions) -> torch.Tensor:
        """Row by row, over the keys and values that its table names."""
        out, start = [], 0
        for row, (context, count) in enumerate(zip(self.contexts, self.counts, strict=True)):
            blocks = torch.from_numpy(self.packed.block_tables[row].astype(np.int64))
            key, value = (t[blocks].flatten(0, 1)[:context] for t in (self.keys, self.values))
            out.append(dense_attention(self.query[start : start + count], key, value, options))
            start += count
        return torch.cat(out)

    def only(self, row: int) -> "Step":
        """The step of one row alone."""
        start = sum(self.counts[:row])
        tokens = slice(start, start + self.counts[row])
        packed = PackedRows(
            self.packed.block_tables[row : row + 1],
            np.zeros(self.counts[row], dtype=np.int64),
            self.packed.positions[tokens].copy(),
        )
        return replace(self, query=self.query[tokens], packed=packed)


def make_step(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],
    *,
    size: int,
    shared_blocks: int = 0,
    heads: tuple[int, int] = (6, 2),
    head_size: int = 16,
) -> Step:
    """Make rows of (context, queries), the first blocks of all of them the same."""
    contexts = tuple(shared_blocks * size + context for context, _ in rows)
    counts = tuple(count for _, count in rows)
    width = max(-(-context // size) for context in contexts)
    num_blocks = shared_blocks + len(rows) * width + 1
    numbers = rng.permutation(num_blocks)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    shape = (num_blocks, size, heads[1], head_size)
    keys, values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    for row, context in enumerate(contexts):
        own = shared_blocks + row * width
        blocks = [*range(shared_blocks), *range(own, own + width - shared_blocks)]
        tables[row] = numbers[blocks]
        for at in range(context):
            place = int(tables[row, at // size]), at % size
            if keys[place].isnan().any():
                for cache in (keys, values):
                    cache[place] = torch.from_numpy(rng.standard_normal(shape[2:])).float()
    positions = [np.arange(c - n, c) for c, n in zip(contexts, counts, strict=True)]
    packed = PackedRows(tables, np.repeat(np.arange(len(rows)), counts), np.concatenate(positions))
    # The layout that families hand over: heads first, tokens second.
    query = torch.from_numpy(rng.standard_normal((heads[0], sum(counts), head_size)))
    return Step(query.float().transpose(0, 1), keys, values, packed, contexts, counts)


@st.composite
def _rows(draw: st.DrawFn) -> list[tuple[int, int]]:
    contexts = draw(st.lists(st.integers(1, 90), min_size=1, max_size=7))
    return [(context, draw(st.integers(1, min(context, 20)))) for context in contexts]


@settings(max_examples=60, deadline=None)
@given(
    rows=_rows(),
    shape=st.sampled_from([((1, 1), 8), ((6, 2), 16), ((4, 2), 24), ((5, 1), 40), ((4, 1), 64)]),
    size=st.sampled_from([1, 4, 7, 16, 40]),
    shared=st.integers(0, 3),
    window=st.sampled_from([None, 1, 5, 33]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_equals_float64_over_ragged_rows_in_a_poisoned_pool(
    rows, shape, size, shared, window, softcap, has_sinks, seed
) -> None:
    rng = np.random.default_rng(seed)
    heads, head_size = shape
    step = make_step(rng, rows, size=size, shared_blocks=shared, heads=heads, head_size=head_size)
    sinks = torch.from_numpy(rng.standard_normal(heads[0])).float() if has_sinks else None
    options = AttentionOptions(0.3, window, softcap, sinks)
    torch.testing.assert_close(
        step.run(options).double(), step.expected(options), atol=1e-5, rtol=1e-5
    )


def test_a_long_row_and_large_scores_keep_their_precision() -> None:
    step = make_step(np.random.default_rng(1), [(3000, 2), (40, 40)], size=16)
    options = AttentionOptions(30.0)
    torch.testing.assert_close(
        step.run(options).double(), step.expected(options), atol=1e-4, rtol=1e-4
    )


def test_a_rows_result_is_the_same_to_the_bit_in_any_batch_and_with_any_sharing() -> None:
    rng = np.random.default_rng(2)
    rows = [(30 + 5 * row, 1 + 3 * (row % 4)) for row in range(24)]
    step = make_step(rng, rows, size=16, shared_blocks=5)
    options = AttentionOptions(0.25)
    together = step.run(options)
    apart = replace(step, packed=replace(step.packed, shares=False)).run(options)
    assert torch.equal(together, apart)
    start = 0
    for row, count in enumerate(step.counts):
        assert torch.equal(step.only(row).run(options), together[start : start + count])
        start += count


def test_the_block_size_and_the_number_of_threads_change_no_bit() -> None:
    results = []
    for size, threads in ((16, 1), (5, 2), (64, 2)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            # The same numbers in the same order, wherever the blocks lie.
            rng = np.random.default_rng(3)
            step = make_step(rng, [(70, 70)], size=size)
            step = replace(step, query=torch.ones(70, 6, 16).cumsum(0) / 50)
            flat = torch.linspace(-3, 3, 70 * 32).view(70, 2, 16)
            for position in range(70):
                place = int(step.packed.block_tables[0, position // size]), position % size
                step.keys[place], step.values[place] = flat[position].sin(), flat[position]
            results.append(step.run(AttentionOptions(0.25)))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("what", ["query", "keys", "values"])
def test_what_is_not_a_number_reaches_the_output_and_no_other_row(what: str) -> None:
    step = make_step(np.random.default_rng(4), [(40, 1), (33, 1)], size=16)
    if what == "query":
        step.query[0, 0, 3] = float("nan")
    else:
        getattr(step, what)[int(step.packed.block_tables[0, 1]), 3] = float("nan")
    out = step.run(AttentionOptions(0.25))
    assert out[0, 0].isnan().any()
    assert not out[1].isnan().any()


def test_other_dtypes_and_head_sizes_are_left_to_torch() -> None:
    assert supports(64, torch.float32)
    assert not supports(64, torch.bfloat16)
    assert not supports(36, torch.float32)
