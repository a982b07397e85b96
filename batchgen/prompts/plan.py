"""The plan of a job: which rows are computed, in what order, and what that will cost."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.prompts.advice import Advice
from batchgen.prompts.future import PlannedFuture
from batchgen.prompts.needs import row_needs
from batchgen.prompts.normalize.rules import Changes
from batchgen.prompts.order import (
    Duplicates,
    PrefixGroup,
    Rows,
    find_duplicates,
    length_order,
    neighbour_lcp,
    prefill_tokens,
    prefix_groups,
    prefix_order,
    repeat_rows,
)
from batchgen.prompts.outlook.blocks import BlockCost, block_costs, remedy
from batchgen.prompts.outlook.lengths import Histogram
from batchgen.prompts.row_sampling import num_samples
from batchgen.prompts.store import PromptStore
from batchgen.prompts.truncation_audit import TruncationAudit
from batchgen.sampling import SamplingParams

MAX_GROUPS = 20


@dataclass(frozen=True)
class Plan:
    """What will be computed. A request is one sample of a row that must be computed.

    Greedy rows make one request however many samples they ask for; random rows make
    one for each sample.

    Attributes:
        order: store rows to compute, in the order they should start.
        duplicates: a computed store row to the store rows that take its result.
        rows: rows of the input, those with errors included.
        requests: requests of the rows in ``order``.
        prompt_tokens: prompt tokens of all rows without errors, once a row.
        request_tokens: prompt tokens of all requests: the prefill without any sharing.
        block_size: tokens in a block.
        windows: groups of rows that were sorted on their own; the floors are their sums.
        prefill_tokens_floor: the least prefill that exact sharing by the token leaves.
        prefill_tokens_floor_block: the same where whole blocks are shared.
        expected_prefill_tokens: the prefill to expect in this order.
        expected_basis: how that expectation is made, in words.
        longest_request_tokens: the most tokens a request can come to, prompt and output.
        request_tokens_p50, request_tokens_p95: the same at these percentiles.
        own_tokens_p95: the same without what the request before it in prefix order has too.
        longest_shared_tokens: the longest prefix that two requests have in common.
        max_output_tokens: tokens that all requests together can generate.
        lengths: prompt tokens of the requests.
        block_costs: what blocks of other sizes would share.
        input_order_tokens: prefill in the input's order where nothing but the row before is
            still there; None where that was not asked for.
        groups: the shared prefixes that save most.
        group_row_index: position in the input of each group's first row.
        group_texts: the text of each group's prefix, shortened.
        row_errors: rows with errors by type.
        future: which request is the next to need a prefix, for the engine's eviction.
        shared_tokens: [store rows] leading tokens that each row of ``order`` has in common
            with the row before it in prefix order; -1 for all other rows.
        truncation: what becomes of rows that are too long beside their output.
        advice: a change of the template that would share more, where one is known.
        normalized: what ``prompt.normalize`` changed.
    """

    order: Rows
    duplicates: Duplicates
    rows: int
    requests: int
    prompt_tokens: int
    request_tokens: int
    block_size: int
    windows: int
    prefill_tokens_floor: int
    prefill_tokens_floor_block: int
    expected_prefill_tokens: int
    expected_basis: str
    longest_request_tokens: int
    request_tokens_p50: int
    request_tokens_p95: int
    own_tokens_p95: int
    longest_shared_tokens: int
    max_output_tokens: int
    lengths: Histogram
    block_costs: Sequence[BlockCost]
    input_order_tokens: int | None
    groups: Sequence[PrefixGroup]
    group_row_index: Sequence[int]
    row_errors: Mapping[str, int]
    future: PlannedFuture
    shared_tokens: Rows
    truncation: TruncationAudit
    advice: Advice | None = None
    normalized: Changes = field(default_factory=Changes)
    group_texts: Sequence[str] = ()

    @property
    def num_duplicates(self) -> int:
        """Rows that are not computed because another row's result is theirs."""
        return self.duplicates.num_rows

    def to_json(self) -> dict[str, Any]:
        """Return what ``_plan.json`` holds: every figure, without the rows themselves."""
        figures = (
            "rows",
            "requests",
            "prompt_tokens",
            "request_tokens",
            "block_size",
            "windows",
            "prefill_tokens_floor",
            "prefill_tokens_floor_block",
            "expected_prefill_tokens",
            "expected_basis",
            "longest_request_tokens",
            "request_tokens_p50",
            "request_tokens_p95",
            "own_tokens_p95",
            "longest_shared_tokens",
            "max_output_tokens",
        )
        return {
            **{name: getattr(self, name) for name in figures},
            "duplicates": self.num_duplicates,
            "row_errors": dict(self.row_errors),
            "lengths": self.lengths.to_json(),
            "block_sizes": [asdict(cost) for cost in self.block_costs],
            "groups": self._groups_json(),
            "truncation": asdict(self.truncation),
            "advice": self.advice and self.advice.to_json(),
            "normalized": self.normalized.to_json(),
        }

    def _groups_json(self) -> list[dict[str, Any]]:
        texts: Sequence[str | None] = self.group_texts or [None] * len(self.groups)
        found = []
        for group, row_index, text in zip(self.groups, self.group_row_index, texts, strict=True):
            fix = remedy(group.tokens, self.block_size)
            figures = {name: value for name, value in asdict(group).items() if name != "position"}
            found.append(
                {"row_index": row_index, **figures, "text": text, "remedy": fix and fix.to_json()}
            )
        return found

    def describe(self) -> str:
        """Say the plan in a few lines for a person."""
        errors = ", ".join(f"{count} {kind}" for kind, count in self.row_errors.items()) or "none"
        lines = [
            f"rows {self.rows:,}: {len(self.order):,} to compute ({self.requests:,} requests), "
            f"{self.num_duplicates:,} duplicates, errors: {errors}",
            f"prompt tokens {self.prompt_tokens:,}; without sharing the prefill is "
            f"{self.request_tokens:,}",
            f"prefill floor {self.prefill_tokens_floor:,} by the token, "
            f"{self.prefill_tokens_floor_block:,} by blocks of {self.block_size}; expected "
            f"{self.expected_prefill_tokens:,} ({self.expected_basis})",
            f"tokens a request: half need at most {self.request_tokens_p50:,}, 95% at most "
            f"{self.request_tokens_p95:,}, the longest {self.longest_request_tokens:,}",
        ]
        lines += [
            f"shared prefix of {group.tokens:,} tokens: {group.rows:,} requests, saves "
            f"{group.tokens_saved:,}; the {group.remainder} tokens behind its last block are "
            f"copied ({group.tokens_lost:,} that blocks alone would lose)"
            for group in self.groups[:3]
        ]
        lines += self.truncation.describe()
        if self.advice is not None:
            lines.append(self.advice.describe())
        changes = self.normalized.describe()
        if changes is not None:
            lines.append(changes)
        return "\n".join(lines)


def make_plan(
    store: PromptStore,
    sampling: SamplingParams,
    *,
    max_model_len: int,
    block_size: int,
    prefix_caching: bool,
    order: str,
    window_rows: int | None = None,
    done: npt.NDArray[np.bool_] | None = None,
    requests_of: Callable[[SamplingParams], int] = num_samples,
    truncation: str = "error",
    compare_orders: bool = False,
) -> Plan:
    """Plan a job over its prompts.

    Args:
        store: the prompts.
        sampling: the job's parameters, which a row's own in the store override.
        max_model_len: tokens of a prompt and its output together.
        block_size: tokens in a block of the pool.
        prefix_caching: whether blocks are shared at all.
        order: ``prefix``, ``input`` or ``length`` (longest prompt first).
        window_rows: rows sorted together; None sorts all, in as little memory. Rows of
            different windows are not counted as sharing anything, in the floors neither.
        done: for each store row whether an earlier run has its result already; such rows
            count in nothing but ``rows`` and ``row_errors``.
        requests_of: gives the requests of a row with some parameters.
        truncation: ``prompt.truncation``, which has been done already.
        compare_orders: whether to count the input's order too, which is another pass.
    """
    good = store.good_rows
    if done is not None:
        good = good[~done[good]]
    needs_of = row_needs(store.sampling_params, sampling, max_model_len, requests_of)
    rows, duplicates = find_duplicates(store.ids, good, needs_of.result_keys[good])
    samples, max_tokens = needs_of.samples, needs_of.max_tokens
    windows = _windows(store, rows, window_rows)
    by_prefix = np.concatenate([np.empty(0, np.int64), *windows])
    lengths, lcp = _requests(store, windows, samples)
    needs = lengths + np.repeat(max_tokens[by_prefix], samples[by_prefix])
    needs = np.minimum(needs, max_model_len)
    unsorted = None
    if compare_orders:
        whole, shared = _requests(store, [rows], samples)
        shared = _taken_from_cache(shared, rows, samples, needs_of.logs_prompt, block_size)
        unsorted = prefill_tokens(whole, shared)
    taken = _taken_from_cache(lcp, by_prefix, samples, needs_of.logs_prompt, block_size)
    floor_block = prefill_tokens(lengths, taken, block_size)
    floor = prefill_tokens(lengths, taken)
    ordered, expected, basis = by_prefix, floor, "shared by the token in prefix order"
    if order != "prefix":
        ordered = rows if order == "input" else length_order(store.lengths, rows)
        basis = f"{order} order, if the pool keeps what later rows need"
    ordered = ordered[np.argsort(store.priorities[ordered], kind="stable")]
    if not prefix_caching:
        expected, basis = int(lengths.sum()), "every prompt whole, prefix caching is off"
    groups = prefix_groups(lcp, block_size, MAX_GROUPS)
    row_index = np.repeat(store.row_index[by_prefix], samples[by_prefix])
    return Plan(
        order=ordered,
        duplicates=duplicates,
        rows=store.num_rows,
        requests=len(lengths),
        prompt_tokens=int(store.lengths[good].sum(dtype=np.int64)),
        request_tokens=int(lengths.sum()),
        block_size=block_size,
        windows=len(windows),
        prefill_tokens_floor=floor,
        prefill_tokens_floor_block=floor_block,
        expected_prefill_tokens=expected,
        expected_basis=basis,
        longest_request_tokens=int(needs.max(initial=0)),
        request_tokens_p50=_percentile(needs, 50),
        request_tokens_p95=_percentile(needs, 95),
        own_tokens_p95=_percentile(needs - lcp, 95),
        longest_shared_tokens=int(lcp.max(initial=0)),
        max_output_tokens=int((needs - lengths).sum()),
        lengths=Histogram.of(lengths),
        block_costs=block_costs(lengths, taken, block_size),
        input_order_tokens=unsorted,
        groups=groups,
        group_row_index=[int(row_index[group.position]) for group in groups],
        row_errors=dict(Counter(error.type.value for _, error in store.errors())),
        future=PlannedFuture(_request_numbers(ordered, by_prefix, samples), lcp),
        shared_tokens=_shared_by_row(by_prefix, lcp, samples),
        truncation=TruncationAudit.of(truncation, store, good, needs_of.max_tokens, max_model_len),
    )


def _windows(store: PromptStore, rows: Rows, window_rows: int | None) -> list[Rows]:
    """Sort the rows by their tokens, window by window."""
    size = window_rows or max(1, len(rows))
    return [
        prefix_order(store.ids, rows[start : start + size]) for start in range(0, len(rows), size)
    ]


def _requests(store: PromptStore, windows: Sequence[Rows], samples: Rows) -> tuple[Rows, Rows]:
    """Return prompt length and shared tokens of every request, in prefix order."""
    rows = np.concatenate([np.empty(0, np.int64), *windows])
    shared = np.concatenate(
        [np.empty(0, np.int64), *(neighbour_lcp(store.ids, window) for window in windows)]
    )
    return repeat_rows(store.lengths[rows], shared, samples[rows])


def _taken_from_cache(
    lcp: Rows, by_prefix: Rows, samples: Rows, logs_prompt: Rows, block_size: int
) -> Rows:
    """Give what each request need not compute, of what it shares with the one before it.

    A row's first request logs the prompt for all of them and takes nothing. Where others have
    entered the prompt's first block before, its own blocks stay its own, so that what comes
    after it finds only what came before it.
    """
    counts = samples[by_prefix]
    firsts = np.cumsum(counts) - counts
    logs = logs_prompt[by_prefix] > 0
    taken = lcp.copy()
    # What of each row's prompt is there when its first request comes.
    there = lcp[firsts]
    for row in np.flatnonzero(logs & (there >= block_size)).tolist():
        if counts[row] > 1:
            taken[firsts[row] + 1] = there[row]
        elif row + 1 < len(there):
            there[row + 1] = min(there[row + 1], there[row])
    taken[firsts] = np.where(logs, 0, there)
    return taken


def _shared_by_row(by_prefix: Rows, lcp: Rows, samples: Rows) -> Rows:
    """Give what each row's first request shares, by store row; -1 for rows without one."""
    shared = np.full(len(samples), -1, np.int64)
    counts = samples[by_prefix]
    shared[by_prefix] = lcp[np.cumsum(counts) - counts]
    return shared


def _request_numbers(ordered: Rows, by_prefix: Rows, samples: Rows) -> Rows:
    """Number the requests in running order, and give them in prefix order."""
    first = np.zeros(len(samples), np.int64)
    counts = samples[ordered]
    first[ordered] = np.cumsum(counts) - counts
    counts = samples[by_prefix]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers: Rows = np.repeat(first[by_prefix], counts) + within
    return numbers


def _percentile(values: npt.NDArray[np.int64], percent: int) -> int:
    return int(np.percentile(values, percent, method="higher")) if len(values) else 0
