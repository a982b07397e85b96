"""Split a step's plan into micro-batches with the same result, for a device short of memory.

A step that ran out of memory cannot be undone: its first layers have written into blocks that
other requests gave up for it. But it can be finished. What it wrote so far it writes again, and
its tokens may as well be computed in several passes: a row's tokens are in order, and a row
reads what others compute in the same step only from rows before it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchgen.engine.step import (
    IntArray,
    LoggedTokens,
    LogprobRows,
    SampleBatch,
    StepOutput,
    StepPlan,
)

_NO_COPIES = np.zeros((0, 2), dtype=np.int64)


def split_plan(plan: StepPlan, num_tokens: int) -> list[StepPlan]:
    """Split a plan into parts of at most so many tokens, to be run in order.

    No part has copies: they are done before a step's forward pass, and only once.

    Args:
        plan: the plan, without placeholders.
        num_tokens: above 0.
    """
    starts = range(0, plan.num_tokens, num_tokens)
    return [_part(plan, at, min(at + num_tokens, plan.num_tokens)) for at in starts]


def join_outputs(
    plan: StepPlan, parts: Sequence[StepPlan], outputs: Sequence[StepOutput]
) -> StepOutput:
    """Return the output of a plan from those of its parts (:func:`split_plan`)."""
    entries: list[list[LogprobRows]] = [[] for _ in plan.samples.logged]
    for part, output in zip(parts, outputs, strict=True):
        for logged, rows in zip(part.samples.logged, output.logprobs, strict=True):
            entries[logged.index].append(rows)
    return StepOutput(
        token_ids=np.concatenate([output.token_ids for output in outputs]),
        scores=tuple(scores for output in outputs for scores in output.scores),
        logprobs=tuple(
            LogprobRows.joined(rows, logged.num_best)
            for logged, rows in zip(plan.samples.logged, entries, strict=True)
        ),
    )


def substitute_tokens(plan: StepPlan, sampled: IntArray) -> StepPlan:
    """Replace a plan's placeholders by the tokens that the step before sampled."""
    is_placeholder = plan.token_ids < 0
    token_ids = plan.token_ids.copy()
    # A row that got no token has failed: it runs token 0, and the result is discarded.
    token_ids[is_placeholder] = np.maximum(0, sampled[-1 - plan.token_ids[is_placeholder]])
    return replace(plan, token_ids=token_ids)


def _part(plan: StepPlan, start: int, end: int) -> StepPlan:
    """Take the tokens from ``start`` to ``end``, and the rows that they are of."""
    row_starts, row_ends = plan.query_starts[:-1], plan.query_starts[1:]
    rows = slice(
        int(np.searchsorted(row_ends, start, side="right")),
        int(np.searchsorted(row_starts, end, side="left")),
    )
    query_starts = np.append(np.maximum(row_starts[rows], start), end) - start
    ends = query_starts[1:] + start
    return replace(
        plan,
        token_ids=plan.token_ids[start:end],
        positions=plan.positions[start:end],
        slots=plan.slots[start:end],
        query_starts=query_starts,
        context_lens=plan.positions[ends - 1] + 1,
        block_tables=plan.block_tables[rows],
        samples=_samples(plan, start, end, rows.start),
        swap_out=_NO_COPIES,
        swap_in=_NO_COPIES,
        copies=_NO_COPIES,
    )


def _samples(plan: StepPlan, start: int, end: int, first_row: int) -> SampleBatch:
    """Take the samples whose row's last token is among those from ``start`` to ``end``."""
    samples = plan.samples
    last = plan.query_starts[1:][samples.rows] - 1
    first, stop = (int(at) for at in np.searchsorted(last, (start, end)))
    sampled = slice(first, stop)
    first_given, end_given = (int(at) for at in np.searchsorted(samples.given, (start, end)))
    logged = (
        _logged(entry, first_given, end_given, range(first, stop)) for entry in samples.logged
    )
    return replace(
        samples,
        rows=samples.rows[sampled] - first_row,
        temperature=samples.temperature[sampled],
        top_p=samples.top_p[sampled],
        min_p=samples.min_p[sampled],
        top_k=samples.top_k[sampled],
        noise_keys=samples.noise_keys[sampled],
        positions=samples.positions[sampled],
        special=tuple(
            replace(entry, index=entry.index - first)
            for entry in samples.special
            if first <= entry.index < stop
        ),
        scored=tuple(
            replace(entry, index=entry.index - first)
            for entry in samples.scored
            if first <= entry.index < stop
        ),
        given=samples.given[first_given:end_given] - start,
        logged=tuple(entry for entry in logged if entry is not None),
    )


def _logged(
    entry: LoggedTokens, first_given: int, end_given: int, samples: range
) -> LoggedTokens | None:
    """Take what follows some of the given logits, or is one of some samples; None for nothing."""
    count = len(entry.token_ids)
    begin, end = (min(max(at - entry.first, 0), count) for at in (first_given, end_given))
    is_sampled = entry.sample in samples
    if begin == end and not is_sampled:
        return None
    # The sampled token's entry comes after all others.
    begin = count if begin == end else begin
    return LoggedTokens(
        index=entry.index,
        first=entry.first + begin - first_given,
        token_ids=entry.token_ids[begin:end] if begin < end else entry.token_ids[:0],
        sample=entry.sample - samples.start if is_sampled else -1,
        num_best=entry.num_best,
    )
