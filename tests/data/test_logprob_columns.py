"""Log-probabilities as Arrow columns, against a plain Python rendering."""

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.output.logprobs import LOGPROBS_TYPE, RowLogprobs, logprob_array


@st.composite
def _row(draw) -> RowLogprobs | None:
    if draw(st.booleans()) and draw(st.booleans()):
        return None
    tokens, best = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    ids = [
        [draw(st.integers(0, 5)), *draw(st.permutations(range(6)))[:best]] for _ in range(tokens)
    ]
    return RowLogprobs(
        np.array(ids, np.int32).reshape(tokens, 1 + best),
        -np.arange(tokens * (1 + best), dtype=np.float32).reshape(tokens, 1 + best) / 4,
        np.arange(tokens, dtype=np.int32) + 3,
        has_first=draw(st.booleans()),
    )


def _plain(row: RowLogprobs | None) -> list | None:
    if row is None:
        return None
    entries: list = [None] * row.has_first
    for ids, logprobs, rank in zip(row.token_ids, row.logprobs, row.ranks, strict=True):
        candidates = zip(ids.tolist(), logprobs.tolist(), [int(rank), 1, 2, 3], strict=False)
        entry = [{"token_id": i, "logprob": p, "rank": r} for i, p, r in candidates]
        entries.append(entry[:1] + [each for each in entry[1:] if each["token_id"] != ids[0]])
    return entries


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(_row(), max_size=6))
def test_the_column_holds_what_the_rows_say(rows):
    column = logprob_array(rows)
    column.validate(full=True)
    assert column.type == LOGPROBS_TYPE
    assert column.to_pylist() == [_plain(row) for row in rows]
    assert pa.Table.from_arrays([column], ["x"]).num_rows == len(rows)
