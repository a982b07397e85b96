from itertools import permutations
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.prompts.order import (
    common_prefix,
    find_duplicates,
    length_order,
    neighbour_lcp,
    prefill_tokens,
    prefix_groups,
    prefix_order,
    repeat_rows,
)

# Few symbols and short rows, so that prefixes are shared; some ids beyond one byte.
prompts = st.lists(
    st.lists(st.sampled_from([0, 1, 255, 256, 2**31 - 1]), min_size=1, max_size=9),
    min_size=1,
    max_size=12,
)


def as_rows(lists):
    arrays = [np.asarray(row, np.int32) for row in lists]
    return arrays.__getitem__, np.arange(len(lists))


def shared(a, b):
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def computed_with_everything_cached(lists, block):
    """Tokens to compute in this order when every earlier row's blocks are there."""
    total = 0
    for at, row in enumerate(lists):
        hit = max((shared(row, before) for before in lists[:at]), default=0)
        total += len(row) - min(hit, len(row) - 1) // block * block
    return total


@given(prompts)
def test_prefix_order_is_the_lexicographic_order_of_the_ids(lists):
    ids, rows = as_rows(lists)
    expected = sorted(range(len(lists)), key=lambda row: (lists[row], row))
    assert prefix_order(ids, rows).tolist() == expected


@given(prompts, st.sampled_from([1, 2, 3, 4]))
def test_the_neighbour_formula_counts_what_a_cache_of_all_rows_leaves(lists, block):
    ids, rows = as_rows(lists)
    order = prefix_order(ids, rows)
    lengths = np.asarray([len(lists[row]) for row in order])
    got = prefill_tokens(lengths, neighbour_lcp(ids, order), block)
    assert got == computed_with_everything_cached([lists[row] for row in order], block)


@settings(max_examples=40)
@given(prompts.filter(lambda rows: len(rows) <= 5), st.sampled_from([1, 2, 3]))
def test_no_order_computes_less_than_the_floor(lists, block):
    ids, rows = as_rows(lists)
    order = prefix_order(ids, rows)
    lengths = np.asarray([len(lists[row]) for row in order])
    floor = prefill_tokens(lengths, neighbour_lcp(ids, order), block)
    assert floor == min(
        computed_with_everything_cached(list(each), block) for each in permutations(lists)
    )


@given(prompts)
def test_e_1_is_the_number_of_nodes_of_the_prefix_tree_and_one_for_each_repeat(lists):
    nodes = {tuple(row[: end + 1]) for row in lists for end in range(len(row))}
    repeats = len(lists) - len({tuple(row) for row in lists})
    ids, rows = as_rows(lists)
    order = prefix_order(ids, rows)
    lengths = np.asarray([len(lists[row]) for row in order])
    assert prefill_tokens(lengths, neighbour_lcp(ids, order)) == len(nodes) + repeats


@given(prompts, st.data(), st.sampled_from([1, 3]))
def test_samples_cost_as_much_as_rows_with_the_same_prompt(lists, data, block):
    times = data.draw(
        st.lists(st.integers(1, 3), min_size=len(lists), max_size=len(lists)), label="times"
    )
    ids, rows = as_rows(lists)
    order = prefix_order(ids, rows)
    lengths, lcp = repeat_rows(
        np.asarray([len(lists[row]) for row in order]),
        neighbour_lcp(ids, order),
        np.asarray(times)[order],
    )
    copies = [row for row, count in zip(lists, times, strict=True) for _ in range(count)]
    expected = computed_with_everything_cached(sorted(copies), block)
    assert prefill_tokens(lengths, lcp, block) == expected


@given(prompts, st.sampled_from([1, 2, 4]))
def test_groups_account_for_every_token_saved_and_lost(lists, block):
    ids, rows = as_rows(lists)
    order = prefix_order(ids, rows)
    lengths = np.asarray([len(lists[row]) for row in order])
    lcp = neighbour_lcp(ids, order)
    groups = prefix_groups(lcp, block, limit=1000)
    by_token, by_block = prefill_tokens(lengths, lcp), prefill_tokens(lengths, lcp, block)
    assert sum(group.tokens_saved for group in groups) == lengths.sum() - by_token
    assert sum(group.tokens_lost for group in groups) == by_block - by_token
    assert [g.tokens_saved for g in groups] == sorted(
        (g.tokens_saved for g in groups), reverse=True
    )


@given(prompts)
def test_groups_are_the_prefixes_where_different_rows_part(lists):
    distinct = sorted({tuple(row) for row in lists})
    ids, rows = as_rows([list(row) for row in distinct])
    lcp = neighbour_lcp(ids, prefix_order(ids, rows))
    got = {
        (distinct[group.position][: group.tokens], group.rows)
        for group in prefix_groups(lcp, 4, limit=1000)
    }
    prefixes = {row[:end] for row in distinct for end in range(1, len(row) + 1)}
    expected = set()
    for prefix in prefixes:
        below = [row for row in distinct if row[: len(prefix)] == prefix]
        continuations = {row[len(prefix) : len(prefix) + 1] for row in below}
        if len(continuations) > 1:
            expected.add((prefix, len(below)))
    assert got == expected


@st.composite
def prompts_with_result_keys(draw):
    lists = draw(prompts)
    size = {"min_size": len(lists), "max_size": len(lists)}
    return lists, np.asarray(draw(st.lists(st.sampled_from([-1, 0, 1]), **size)))


def check_duplicates(lists, keys):
    ids, rows = as_rows(lists)
    kept, duplicates = find_duplicates(ids, rows, keys)
    first = {}
    expected_kept, expected = [], {}
    for row, (tokens, key) in enumerate(zip(lists, keys.tolist(), strict=True)):
        home = first.setdefault((tuple(tokens), key), row) if key >= 0 else row
        if home == row:
            expected_kept.append(row)
        else:
            expected.setdefault(home, []).append(row)
    assert kept.tolist() == expected_kept
    assert dict(duplicates) == expected
    assert duplicates.num_rows == sum(map(len, expected.values()))
    assert [row for row in rows.tolist() if row in duplicates] == sorted(expected)


@given(prompts_with_result_keys())
def test_duplicates_are_rows_with_equal_ids_and_equal_keys(case):
    check_duplicates(*case)


@given(prompts_with_result_keys())
def test_rows_with_the_same_digest_and_other_ids_are_no_duplicates(case):
    with patch("batchgen.prompts.order._digest", lambda ids: len(ids) % 2):
        check_duplicates(*case)


@given(prompts, st.integers(0, 600))
def test_runs_that_are_merged_give_the_order_of_one_sort(lists, run_bytes):
    ids, rows = as_rows(lists)
    rows = rows[::-1]
    expected = sorted(rows.tolist(), key=lambda row: lists[row])
    assert prefix_order(ids, rows, run_bytes=run_bytes).tolist() == expected


def test_length_order_puts_the_longest_first_and_keeps_ties_in_order():
    lengths = np.asarray([3, 9, 3, 5], np.int32)
    assert length_order(lengths, np.asarray([0, 2, 3, 1])).tolist() == [1, 3, 0, 2]


def test_common_prefix_of_a_row_and_its_beginning_is_the_shorter_length():
    row = np.arange(5, dtype=np.int32)
    assert [common_prefix(row, row[:end]) for end in range(6)] == [0, 1, 2, 3, 4, 5]


def test_no_rows_have_an_order_and_floors_too():
    ids, rows = as_rows([])
    assert len(prefix_order(ids, rows)) == 0
    lcp = neighbour_lcp(ids, rows)
    assert prefill_tokens(rows, lcp, 16) == 0
    assert prefix_groups(lcp, 16, 20) == []
