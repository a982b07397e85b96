"""A plan as a picture of one page, from what ``_plan.json`` holds in ``mode=plan``."""

from collections.abc import Mapping
from typing import Any

from batchgen.report.plan_shapes import Sheet
from batchgen.report.plan_text import (
    bins,
    failing_text,
    memory_lines,
    remedy_text,
    seconds_text,
    time_text,
    tokens_text,
)
from batchgen.text import one_line

_GROUPS = 6
_TEXT_CHARS = 120
# Of all prompt tokens; below it what a group loses to blocks is not worth a line.
_NOTEWORTHY_LOSS = 0.005


def plan_svg(plan: Mapping[str, Any]) -> str:
    """Draw the plan; nothing in it comes from elsewhere, and it reads in black and white."""
    sheet = Sheet()
    errors = sum(plan["row_errors"].values())
    summary = (
        f"{plan['rows']:,} rows: {plan['requests']:,} requests to compute, "
        f"{plan['duplicates']:,} duplicates, {errors:,} with errors"
    )
    sheet.title("Plan")
    sheet.line(summary)
    sheet.line(f"time to generate: {time_text(plan['time'])}")
    _prefill(sheet, plan)
    _lengths(sheet, plan)
    _groups(sheet, plan)
    _block_sizes(sheet, plan)
    sheet.heading("Memory")
    for line in memory_lines(plan["memory"]):
        sheet.line(line)
    if plan["failing"]:
        sheet.heading("Rows that will fail")
        for each in plan["failing"]:
            sheet.line(failing_text(each))
    if plan["notes"]:
        sheet.heading("Notes")
        for note in plan["notes"]:
            sheet.line(note)
    expected = f"expected prefill {plan['expected_prefill_tokens']:,} tokens"
    return sheet.svg(f"{summary}; {expected} of {plan['request_tokens']:,}")


def _prefill(sheet: Sheet, plan: Mapping[str, Any]) -> None:
    sheet.heading("Prompt tokens to compute, as planned and otherwise")
    floors = [
        ("floor by the token", plan["prefill_tokens_floor"]),
        (f"floor by blocks of {plan['block_size']}", plan["prefill_tokens_floor_block"]),
    ]
    rows = [(name, float(tokens), float(tokens), f"{tokens:,}") for name, tokens in floors]
    for each in plan["alternatives"]:
        low, high = each["prefill_tokens_low"], each["prefill_tokens_high"]
        said = tokens_text(low, high)
        if each["prefill_s_low"] is not None:
            said += f", {seconds_text(each['prefill_s_low'], each['prefill_s_high'])}"
        rows.append((each["change"], float(low), float(high), said))
    sheet.bars(rows, label_width=215)


def _lengths(sheet: Sheet, plan: Mapping[str, Any]) -> None:
    sheet.heading("Prompt tokens of the requests")
    sheet.columns(list(bins(plan["lengths"])), height=90)
    sheet.line(
        f"prompt and output: half of the requests need at most {plan['request_tokens_p50']:,} "
        f"tokens, 95% at most {plan['request_tokens_p95']:,}, the longest "
        f"{plan['longest_request_tokens']:,}",
        quiet=True,
    )


def _groups(sheet: Sheet, plan: Mapping[str, Any]) -> None:
    if not plan["groups"]:
        return
    sheet.heading("Shared prefixes that save most")
    most = float(max(group["tokens_saved"] for group in plan["groups"]))
    for group in plan["groups"][:_GROUPS]:
        saved = float(group["tokens_saved"])
        label = f"{group['rows']:,} requests, {group['tokens']:,} tokens"
        bar = (label, saved, saved, f"saves {group['tokens_saved']:,}")
        sheet.bars([bar], label_width=215, longest=most)
        if group["tokens_lost"] >= _NOTEWORTHY_LOSS * plan["request_tokens"]:
            sheet.line(
                f"{group['remainder']} tokens behind its last block, {group['tokens_lost']:,} "
                f"lost to blocks: {remedy_text(group['remedy'])}",
                quiet=True,
            )
        if group["text"] is not None:
            sheet.line(one_line(group["text"])[:_TEXT_CHARS], quiet=True)


def _block_sizes(sheet: Sheet, plan: Mapping[str, Any]) -> None:
    sheet.heading("Shared tokens behind the last whole block, by pool.block_size")
    rows = []
    for cost in plan["block_sizes"]:
        own = " (this job)" if cost["block_size"] == plan["block_size"] else ""
        lost = cost["tokens_lost"]
        rows.append((f"{cost['block_size']}{own}", float(lost), float(lost), f"{lost:,}"))
    sheet.bars(rows, label_width=215)
