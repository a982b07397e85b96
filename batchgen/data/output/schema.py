"""The one schema of the output, and the rows that go into it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from batchgen.data.output.carry import CarriedRows
from batchgen.data.output.logprobs import LOGPROBS_TYPE, RowLogprobs, logprob_array
from batchgen.errors import RowErrorType

# Well below the 2^31 bytes that the offsets of one Arrow string array can address.
MAX_BATCH_BYTES = 1 << 28
OUTPUT_ID_KEY = "batchgen.output_id"
# What Arrow raises for a value that has no place in a column.
_NO_ARRAY = (pa.ArrowException, OverflowError, TypeError, ValueError)
# What a row takes besides its text and its tokens: numbers, offsets, validity bits.
_FIXED_ROW_BYTES = 200


@dataclass(frozen=True, slots=True)
class RowResult:
    """One output row: a finished sample of an input row, or an input row that failed.

    The first four say which row it is; everything else is null where it does not apply.

    Attributes:
        id: the input row's id, in its own type.
        row_index: global position of the input row.
        sample_index: which of the row's samples; 0 for an error.
        status: how it ended.
        generated_text: the output text; null without a tokenizer.
        output_token_ids: generated tokens, the stop token included.
        finish_reason: ``stop``, ``length``, ``repetition`` or ``error``.
        stop_reason: the stop string or stop token id that ended it, as text.
        cumulative_logprob: the log-probability of the whole output, where ``logprobs`` was asked
            for.
        logprobs: of the output's tokens; see ``batchgen.data.output.logprobs``.
        prompt_logprobs: of the prompt's tokens; the first one, which follows nothing, is null.
        label: the likeliest of the row's choices, where it was scored.
        label_score: its probability among the choices.
        label_scores: the probability of each choice, calibrated where that was asked for.
        label_logprobs: the model's own log-probability of each choice after the prompt.
        error_type: one of ``RowErrorType``.
        error_message: what was wrong, for the user.
        prompt_tokens: tokens of the prompt.
        prompt_tokens_cut: tokens that ``prompt.truncation`` took from the prompt.
        max_tokens_cut: tokens of ``max_tokens`` for which the prompt left no room.
        completion_tokens: tokens generated.
        cached_tokens: prompt tokens whose KV was taken from the cache.
        prompt_blocks: blocks held for the prompt.
        hit_blocks: blocks taken from the cache.
        new_blocks: blocks newly allocated.
        freed_blocks: blocks released by this request (``hit_blocks + new_blocks`` at the end).
        peak_blocks: most blocks held at once.
        num_preemptions: times the request had to make room.
        swapped_out_blocks: blocks copied to host memory.
        swapped_in_blocks: blocks copied back.
        recomputed_tokens: tokens whose KV was computed again after a preemption.
        queue_time_ms: from the run's first step to admission.
        time_to_first_token_ms: from admission to the first token.
        generation_time_ms: from admission to the end.
    """

    id: str | int
    row_index: int
    sample_index: int
    status: Literal["ok", "error"]
    generated_text: str | None = None
    output_token_ids: Sequence[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    cumulative_logprob: float | None = None
    logprobs: RowLogprobs | None = None
    prompt_logprobs: RowLogprobs | None = None
    label: str | None = None
    label_score: float | None = None
    label_scores: Sequence[tuple[str, float]] | None = None
    label_logprobs: Sequence[tuple[str, float]] | None = None
    error_type: str | None = None
    error_message: str | None = None
    prompt_tokens: int | None = None
    prompt_tokens_cut: int | None = None
    max_tokens_cut: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_blocks: int | None = None
    hit_blocks: int | None = None
    new_blocks: int | None = None
    freed_blocks: int | None = None
    peak_blocks: int | None = None
    num_preemptions: int | None = None
    swapped_out_blocks: int | None = None
    swapped_in_blocks: int | None = None
    recomputed_tokens: int | None = None
    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None

    @property
    def size_bytes(self) -> int:
        """About what the row takes in Arrow memory."""
        texts = (self.id, self.generated_text, self.stop_reason, self.error_message)
        text_bytes = sum(
            len(text.encode(errors="replace")) for text in texts if isinstance(text, str)
        )
        # A choice stands twice in the row, with a number and an offset each.
        label_bytes = sum(2 * len(choice.encode()) + 24 for choice, _ in self.label_scores or ())
        token_bytes = 4 * len(self.output_token_ids or ())
        logprobs = (self.logprobs, self.prompt_logprobs)
        logprob_bytes = sum(each.size_bytes for each in logprobs if each is not None)
        return _FIXED_ROW_BYTES + text_bytes + label_bytes + token_bytes + logprob_bytes


def output_schema(id_type: pa.DataType, carried: pa.Schema | None = None) -> pa.Schema:
    """Give the schema of every part file: the fields of :class:`RowResult`, in its order.

    Args:
        id_type: Arrow type of the input's ids, kept in the output.
        carried: input columns that go into the output, behind the others.
    """
    count = pa.int32()
    return pa.schema(
        [
            pa.field("id", id_type, nullable=False),
            pa.field("row_index", pa.int64(), nullable=False),
            pa.field("sample_index", pa.int32(), nullable=False),
            pa.field("status", pa.string(), nullable=False),
            ("generated_text", pa.string()),
            ("output_token_ids", pa.list_(pa.int32())),
            ("finish_reason", pa.string()),
            ("stop_reason", pa.string()),
            ("cumulative_logprob", pa.float64()),
            ("logprobs", LOGPROBS_TYPE),
            ("prompt_logprobs", LOGPROBS_TYPE),
            ("label", pa.string()),
            ("label_score", pa.float64()),
            ("label_scores", pa.map_(pa.string(), pa.float64())),
            ("label_logprobs", pa.map_(pa.string(), pa.float64())),
            ("error_type", pa.string()),
            ("error_message", pa.string()),
            ("prompt_tokens", count),
            ("prompt_tokens_cut", count),
            ("max_tokens_cut", count),
            ("completion_tokens", count),
            ("cached_tokens", count),
            ("prompt_blocks", count),
            ("hit_blocks", count),
            ("new_blocks", count),
            ("freed_blocks", count),
            ("peak_blocks", count),
            ("num_preemptions", count),
            ("swapped_out_blocks", pa.int64()),
            ("swapped_in_blocks", pa.int64()),
            ("recomputed_tokens", pa.int64()),
            ("queue_time_ms", pa.float64()),
            ("time_to_first_token_ms", pa.float64()),
            ("generation_time_ms", pa.float64()),
            *(carried or ()),
        ]
    )


def marked(schema: pa.Schema, output_id: str | None) -> pa.Schema:
    """Give a schema that says to which output a part belongs; None says nothing."""
    return schema.with_metadata({OUTPUT_ID_KEY: output_id}) if output_id else schema


def belongs_to(schema: pa.Schema, output_id: str | None) -> bool:
    """Whether a part may be one of an output's; one that says nothing may."""
    said = (schema.metadata or {}).get(OUTPUT_ID_KEY.encode())
    return said is None or output_id is None or said == str(output_id).encode()


OWN_COLUMNS = frozenset(field.name for field in fields(RowResult))


def to_table(
    rows: Sequence[RowResult],
    schema: pa.Schema,
    max_batch_bytes: int = MAX_BATCH_BYTES,
    carried: CarriedRows | None = None,
) -> pa.Table:
    """Put rows into columns, split so that no array outgrows its offsets.

    Args:
        rows: the rows, in the order they shall stand.
        schema: from :func:`output_schema`.
        max_batch_bytes: size at which a new chunk begins; a larger row stands alone.
        carried: the input columns in the schema.
    """
    extra_bytes = carried.row_bytes if carried is not None else 0
    chunks = _split(rows, max_batch_bytes, extra_bytes)
    batches = [_to_batch(chunk, schema, carried) for chunk in chunks]
    return pa.Table.from_batches(batches, schema)


def _split(
    rows: Sequence[RowResult], max_bytes: int, extra_bytes: int
) -> Iterator[Sequence[RowResult]]:
    start = size = 0
    for index, row in enumerate(rows):
        row_bytes = row.size_bytes + extra_bytes
        if index > start and size + row_bytes > max_bytes:
            yield rows[start:index]
            start, size = index, 0
        size += row_bytes
    if start < len(rows):
        yield rows[start:]


def _to_batch(
    rows: Sequence[RowResult], schema: pa.Schema, carried: CarriedRows | None
) -> pa.RecordBatch:
    try:
        arrays = _to_arrays(rows, schema)
    except _NO_ARRAY:
        # One row must not take the others of its part with it.
        arrays = _to_arrays([_writable(row, schema) for row in rows], schema)
    if carried is not None:
        arrays += carried.take(np.array([row.row_index for row in rows], dtype=np.int64))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _to_arrays(rows: Sequence[RowResult], schema: pa.Schema) -> list[pa.Array]:
    return [
        _to_array([getattr(row, field.name) for row in rows], field.type)
        for field in schema
        if field.name in OWN_COLUMNS
    ]


def _writable(row: RowResult, schema: pa.Schema) -> RowResult:
    """Return the row, or an error row in its place where a value does not fit its column."""
    for field in schema:
        if field.name not in OWN_COLUMNS:
            continue
        try:
            _to_array([getattr(row, field.name)], field.type)
        except _NO_ARRAY as error:
            return RowResult(
                id=row.id,
                row_index=row.row_index,
                sample_index=row.sample_index,
                status="error",
                finish_reason="error",
                error_type=RowErrorType.ENGINE_ERROR.value,
                error_message=f"the column {field.name} cannot hold the row's value: {error}",
            )
    return row


def _to_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind.equals(LOGPROBS_TYPE):
        return logprob_array(values)
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([value and _valid_text(value) for value in values], kind)


def _valid_text(text: str) -> str:
    """Join surrogate pairs, and replace surrogates that stand alone: neither is UTF-8."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return re.sub("[\ud800-\udfff]", "\ufffd", joined)
