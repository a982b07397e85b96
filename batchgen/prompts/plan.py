"""The plan of a job: which rows are computed, in what order, and what that will cost."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from batchgen.prompts.advice.columns import Advice
from batchgen.prompts.future import PlannedFuture
from batchgen.prompts.normalize.rules import Changes
from batchgen.prompts.order import Duplicates, PrefixGroup, Rows
from batchgen.prompts.outlook.blocks import BlockCost, remedy
from batchgen.prompts.outlook.lengths import Histogram
from batchgen.prompts.truncation_audit import TruncationAudit


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
        rows_ending_with_assistant: rows whose last message is the assistant's and is not continued.
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
    rows_ending_with_assistant: int = 0

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
            "rows_ending_with_assistant",
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
        if self.rows_ending_with_assistant:
            lines.append(f"warning: {closed_answers(self.rows_ending_with_assistant)}")
        if self.advice is not None:
            lines.append(self.advice.describe())
        changes = self.normalized.describe()
        if changes is not None:
            lines.append(changes)
        return "\n".join(lines)


def closed_answers(rows: int) -> str:
    """Say what becomes of rows whose last message is the assistant's."""
    return (
        f"in {rows:,} rows the last message is the assistant's: it is closed, and another answer "
        "follows; prompt.continue_final_message=true continues it instead"
    )
