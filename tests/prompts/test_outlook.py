"""What a plan tells beside its order, against counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prompts.diagnostics import Histogram, block_costs, remedy
from batchgen.prompts.findings import find_merged_end


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60))
def test_every_length_is_counted_in_the_one_bin_that_holds_it(values):
    histogram = Histogram.of(np.array(values))
    edges, counts = histogram.edges, histogram.counts
    assert 1 <= len(counts) == len(edges) - 1 <= 20
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        assert count == sum(low <= value < high for value in values)
    assert sum(counts) == len(values)
    width = edges[1] - edges[0]
    assert str(width).rstrip("0") in ("1", "2", "5")


def test_no_requests_make_an_empty_histogram():
    assert Histogram.of(np.array([], np.int64)) == Histogram()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.data(), st.integers(4, 256))
def test_a_block_size_costs_what_rounding_every_shared_prefix_down_costs(lengths, data, size):
    lcp = [0, *(data.draw(st.integers(0, length - 1)) for length in lengths[1:])]
    costs = block_costs(np.array(lengths), np.array(lcp), size)
    assert size in [cost.block_size for cost in costs]
    for cost in costs:
        pairs = list(zip(lengths, lcp, strict=True))
        computed = sum(n - s // cost.block_size * cost.block_size for n, s in pairs)
        assert cost.prefill_tokens == computed
        assert cost.tokens_lost == computed - sum(n - s for n, s in pairs)


@given(st.integers(1, 5000), st.integers(4, 256))
def test_a_remedy_ends_the_prefix_on_an_edge(tokens, block_size):
    fix = remedy(tokens, block_size)
    if fix is None:
        assert tokens % block_size == 0
        return
    assert (tokens - fix.shorten_by) % block_size == 0
    assert (tokens + fix.lengthen_by) % block_size == 0
    assert all(tokens % size == 0 and 4 <= size <= 256 for size in fix.block_sizes)
    # None is left out but for nearer ones.
    fitting = [size for size in range(4, 257) if tokens % size == 0]
    assert len(fix.block_sizes) == min(3, len(fitting))


def rows_of(tokenizer, head, words):
    return [np.array(tokenizer(head + word)["input_ids"], np.int32) for word in words]


def test_a_blank_at_the_end_of_the_shared_text_is_found_inside_the_rows_own_tokens(tokenizer):
    words = ["story", "movie", "fox"]
    head = "A review of the movie: "
    end = find_merged_end(head, rows_of(tokenizer, head, words), tokenizer, is_chat=False)
    assert end is not None
    assert (end.merged, end.tokens_lost, end.rows, end.rows_seen) == (" ", 1, 3, 3)
    # The end that it names is tried: every row then shares all of the head's tokens.
    assert end.edit == "\n"
    for row in rows_of(tokenizer, "A review of the movie:\n", words):
        alone = tokenizer("A review of the movie:\n")["input_ids"]
        assert row[: len(alone)].tolist() == alone
    assert "' '" in end.describe()


@pytest.mark.parametrize("head", ["A review of the movie:\n", "The answer is in the end."])
def test_a_head_that_keeps_to_itself_is_not_reported(tokenizer, head):
    rows = rows_of(tokenizer, head, [" story", " 7"])
    assert find_merged_end(head, rows, tokenizer, is_chat=False) is None
