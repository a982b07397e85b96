"""The plan of a job: which rows are computed, in what order, and what that will cost."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from batchgen.prompts.future import PlannedFuture
from batchgen.prompts.order import Duplicates, PrefixGroup, Rows, prefix_groups
from batchgen.prompts.request_table import RequestTable
from batchgen.prompts.truncation import TruncationAudit

MAX_GROUPS = 20
_FIGURES = (
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


@dataclass(frozen=True)
class Plan:
    """What will be computed. A request is one sample of a row that must be computed.

    Greedy rows make one request however many samples they ask for; random rows make
    one for each sample. What only ``mode=plan`` shows is in
    :class:`~batchgen.prompts.diagnostics.PlanDiagnostics`.

    Attributes:
        order: store rows to compute, in the order they should start.
        duplicates: a computed store row to the store rows that take its result.
        requests_by_prefix: the requests of the rows in ``order``, in prefix order.
        row_index: position in the input of each row of ``requests_by_prefix``.
        rows: rows of the input, those with errors included.
        row_errors: rows with errors by type.
        prompt_tokens: prompt tokens of all rows without errors, once a row.
        block_size: tokens in a block.
        windows: groups of rows that were sorted on their own; the floors are their sums.
        expected_prefill_tokens: the prefill to expect in this order.
        expected_basis: how that expectation is made, in words.
        future: which request is the next to need a prefix, for the engine's eviction.
        truncation: what becomes of rows that are too long beside their output.
    """

    order: Rows
    duplicates: Duplicates
    requests_by_prefix: RequestTable
    row_index: Rows
    rows: int
    row_errors: Mapping[str, int]
    prompt_tokens: int
    block_size: int
    windows: int
    expected_prefill_tokens: int
    expected_basis: str
    future: PlannedFuture
    truncation: TruncationAudit

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.requests_by_prefix)

    @property
    def num_duplicates(self) -> int:
        """Rows that are not computed because another row's result is theirs."""
        return self.duplicates.num_rows

    @property
    def request_tokens(self) -> int:
        """Prompt tokens of all requests: the prefill without any sharing."""
        return int(self.requests_by_prefix.lengths.sum())

    @property
    def prefill_tokens_floor(self) -> int:
        """The least prefill that exact sharing by the token leaves."""
        return self.requests_by_prefix.floor()

    @property
    def prefill_tokens_floor_block(self) -> int:
        """The least prefill where whole blocks are shared."""
        return self.requests_by_prefix.floor(self.block_size)

    @property
    def longest_request_tokens(self) -> int:
        """The most tokens a request can come to, prompt and output."""
        return int(self.requests_by_prefix.whole.max(initial=0))

    @property
    def request_tokens_p50(self) -> int:
        """The most tokens that half of the requests can come to."""
        return _percentile(self.requests_by_prefix.whole, 50)

    @property
    def request_tokens_p95(self) -> int:
        """The most tokens that 95% of the requests can come to."""
        return _percentile(self.requests_by_prefix.whole, 95)

    @property
    def own_tokens_p95(self) -> int:
        """The same without what the request before it in prefix order has too."""
        return _percentile(self.requests_by_prefix.whole - self.requests_by_prefix.shared, 95)

    @property
    def longest_shared_tokens(self) -> int:
        """The longest prefix that two requests have in common."""
        return int(self.requests_by_prefix.shared.max(initial=0))

    @property
    def max_output_tokens(self) -> int:
        """Tokens that all requests together can generate."""
        return int((self.requests_by_prefix.whole - self.requests_by_prefix.lengths).sum())

    @cached_property
    def groups(self) -> list[PrefixGroup]:
        """The shared prefixes that save most."""
        return prefix_groups(self.requests_by_prefix.shared, self.block_size, MAX_GROUPS)

    @cached_property
    def group_row_index(self) -> list[int]:
        """Position in the input of each group's first row."""
        ends = np.cumsum(self.requests_by_prefix.samples)
        positions = [group.position for group in self.groups]
        return list(map(int, self.row_index[np.searchsorted(ends, positions, side="right")]))

    def to_json(self) -> dict[str, Any]:
        """Return what ``_plan.json`` holds: every figure, without the rows themselves."""
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            "duplicates": self.num_duplicates,
            "row_errors": dict(self.row_errors),
            "groups": [
                _group_json(group, row_index)
                for row_index, group in zip(self.group_row_index, self.groups, strict=True)
            ],
            "truncation": asdict(self.truncation),
        }

    def describe(self) -> str:
        """Return the plan in a few lines for a person."""
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
        return "\n".join(lines)


def closed_answers(rows: int) -> str:
    """Return what becomes of rows whose last message is the assistant's."""
    return (
        f"in {rows:,} rows the last message is the assistant's: it is closed, and another answer "
        "follows; prompt.continue_final_message=true continues it instead"
    )


def _percentile(values: Rows, percent: int) -> int:
    return int(np.percentile(values, percent, method="higher")) if len(values) else 0


def _group_json(group: PrefixGroup, row_index: int) -> dict[str, Any]:
    figures = asdict(group)
    del figures["position"]
    return {"row_index": row_index, **figures}
