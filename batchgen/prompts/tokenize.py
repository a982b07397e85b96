"""Rows in, batches of the prompt store out: rendered, tokenised, checked."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen import activity
from batchgen.errors import RowError
from batchgen.prompts.encoder import PromptEncoder
from batchgen.prompts.limits import IdArray, Limits
from batchgen.prompts.render import Renderer
from batchgen.prompts.row_sampling import RowSampling
from batchgen.prompts.store import store_schema
from batchgen.prompts.tokenizer import Tokenizer
from batchgen.prompts.truncation import Truncation
from batchgen.sampling import SamplingParams

MAX_MESSAGE_CHARS = 1000
"""A row error quotes the row; it need not repeat all of it."""


class RowBatch(Protocol):
    """Some rows of the input, in order."""

    @property
    def first_row_index(self) -> int:
        """Position in the input of the batch's first row."""

    @property
    def ids(self) -> pa.Array:
        """One id for each row."""

    @property
    def table(self) -> pa.RecordBatch:
        """The columns that were asked for."""


def tokenize_batches(
    rows: Iterable[RowBatch],
    renderer: Renderer,
    tokenizer: Tokenizer | None,
    limits: Limits,
    sampling: SamplingParams,
    *,
    priority_column: str | None = None,
    output_problem: Callable[[SamplingParams], RowError | None] = lambda params: None,
    truncation: Truncation | None = None,
) -> Iterator[pa.RecordBatch]:
    """Render and tokenise rows, one store batch for each batch of rows.

    Args:
        rows: batches with the renderer's columns.
        tokenizer: may be None only where the renderer's source is token ids.
        sampling: the job's parameters, which a row's own override.
        priority_column: integer column of the batches; a null counts as 0.
        output_problem: says why no output can be as a row's parameters ask.
        truncation: cuts prompts that are too long; None leaves them as they are.

    Yields:
        Batches of the :class:`~batchgen.prompts.store.PromptStore` schema.
    """
    encoder = PromptEncoder(renderer, tokenizer, limits)
    row_sampling = RowSampling(sampling, output_problem)
    for batch in rows:
        prompts = renderer.render(batch.table, batch.first_row_index)
        results = encoder.encode(prompts, batch.first_row_index)
        overrides = list(row_sampling.overrides(batch.table))
        cut = [0] * len(results)
        if truncation is not None:
            results, cut = truncation.fit(
                batch.table, prompts, results, overrides, batch.first_row_index
            )
        priorities = _priorities(batch.table, priority_column)
        yield _store_batch(batch, results, overrides, priorities, cut)
        activity.note(f"reading rows from {batch.first_row_index + len(results)}")


def _store_batch(
    batch: RowBatch,
    results: Sequence[IdArray | RowError],
    overrides: Sequence[str | RowError | None],
    priorities: pa.Array,
    cut: Sequence[int],
) -> pa.RecordBatch:
    outcomes = [
        override if isinstance(override, RowError) and not isinstance(result, RowError) else result
        for result, override in zip(results, overrides, strict=True)
    ]
    errors = [outcome if isinstance(outcome, RowError) else None for outcome in outcomes]
    first = batch.first_row_index
    columns = [
        pa.array(range(first, first + len(outcomes)), pa.int64()),
        batch.ids,
        _list_array([None if isinstance(outcome, RowError) else outcome for outcome in outcomes]),
        pa.array([None if isinstance(each, RowError) else each for each in overrides], pa.string()),
        priorities,
        pa.array(cut, pa.int32()),
        pa.array([error and error.type.value for error in errors], pa.string()),
        pa.array([error and _storable(error.message) for error in errors], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=store_schema(batch.ids.type))


def _priorities(table: pa.RecordBatch, column: str | None) -> pa.Array:
    if column is None:
        return pa.array(np.zeros(table.num_rows, np.int64))
    values = table.column(column)
    if pa.types.is_uint64(values.type):
        # Whatever is above the range of the store is equally far back.
        values = pc.min_element_wise(values, pa.scalar(2**63 - 1, pa.uint64()), skip_nulls=False)
    return pc.fill_null(pc.cast(values, pa.int64()), 0)


def _list_array(rows: Sequence[IdArray | None]) -> pa.ListArray:
    lengths = [0 if row is None else len(row) for row in rows]
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    values = np.concatenate([np.empty(0, np.int32), *(row for row in rows if row is not None)])
    nulls = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=nulls)


def _storable(message: str) -> str:
    clipped = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
    return clipped.encode(errors="replace").decode()
