"""The next use of a prefix against a scan over all rows."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.prompts.future import PlannedFuture


def _lcp(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_next_use_is_the_first_later_row_with_the_prefix(data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    rows = data.draw(st.lists(row, min_size=1, max_size=20))
    if data.draw(st.booleans()):
        rows.sort()
    by_tokens = sorted(range(len(rows)), key=lambda i: (rows[i], i))
    lcp = [0] + [_lcp(rows[a], rows[b]) for a, b in pairwise(by_tokens)]
    future = PlannedFuture(np.array(by_tokens), np.array(lcp))
    example = data.draw(st.integers(0, len(rows) - 1))
    num_tokens = data.draw(st.integers(1, len(rows[example])))
    after = data.draw(st.integers(-1, len(rows)))
    prefix = rows[example][:num_tokens]
    users = [i for i, other in enumerate(rows) if other[:num_tokens] == prefix]
    later = [i for i in users if i > after]
    # A prefix that only its own row has is nobody's to come.
    expected = min(later) if later and len(users) > 1 else None
    assert future.next_use(example, num_tokens, after) == expected


def test_of_a_request_that_the_plan_does_not_know_nothing_is_to_come() -> None:
    assert PlannedFuture(np.array([1, 0]), np.array([0, 3])).next_use(2, 1, 0) is None
    assert PlannedFuture(np.array([], np.int64), np.array([], np.int64)).next_use(0, 1, 0) is None
