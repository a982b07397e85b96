"""A step's plan cut into smaller ones that come to the same, for a device short of memory.

A step that ran out of memory cannot be undone: its first layers have written into blocks that
other requests gave up for it. But it can be finished. What it wrote so far it writes again, and
its tokens may as well be computed in several passes: a row's tokens stand in order, and a row
reads what others compute in the same step only from rows before it.
"""

from dataclasses import replace

import numpy as np

from batchgen.engine.step import IntArray, LoggedTokens, SampleBatch, StepPlan

_NO_COPIES = np.zeros((0, 2), dtype=np.int64)


def cut(plan: StepPlan, num_tokens: int) -> list[StepPlan]:
    """Cut a plan into pieces of at most so many tokens, to be run in order.

    No piece has copies: they are done before a step's forward pass, and only once.

    Args:
        plan: the plan; none of its tokens is still to be read.
        num_tokens: above 0.
    """
    starts = range(0, plan.num_tokens, num_tokens)
    return [_piece(plan, at, min(at + num_tokens, plan.num_tokens)) for at in starts]


def with_tokens(plan: StepPlan, sampled: IntArray) -> StepPlan:
    """Put the tokens that the step before sampled in the place of what stands for them."""
    unread = plan.token_ids < 0
    token_ids = plan.token_ids.copy()
    # A row that got no token has failed: it runs token 0, and nobody sees what comes of it.
    token_ids[unread] = np.maximum(0, sampled[-1 - plan.token_ids[unread]])
    return replace(plan, token_ids=token_ids)


def _piece(plan: StepPlan, start: int, end: int) -> StepPlan:
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
    part = slice(first, stop)
    first_given, end_given = (int(at) for at in np.searchsorted(samples.given, (start, end)))
    logged = (
        _logged(entry, first_given, end_given, range(first, stop)) for entry in samples.logged
    )
    return replace(
        samples,
        rows=samples.rows[part] - first_row,
        temperature=samples.temperature[part],
        top_p=samples.top_p[part],
        min_p=samples.min_p[part],
        top_k=samples.top_k[part],
        noise_keys=samples.noise_keys[part],
        positions=samples.positions[part],
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
    # The sampled token's entry stands behind all others.
    begin = count if begin == end else begin
    return LoggedTokens(
        first=entry.first + begin - first_given,
        token_ids=entry.token_ids[begin:end] if begin < end else entry.token_ids[:0],
        sample=entry.sample - samples.start if is_sampled else -1,
        entries=entry.entries[begin : count + 1 if is_sampled else end],
    )
