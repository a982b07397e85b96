"""`_report.html`: what ran, what came of it and why, from the summary, the plan and the parts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.config import Config
from batchgen.data.output.directory import METRICS, OutputDir
from batchgen.job.accounts.totals import OutputTotals, RowPlace, read_places
from batchgen.job.inputs import JobInputs
from batchgen.job.planning import JobPlan
from batchgen.report.content import Content, FailedRow, Group, SampleRow
from batchgen.report.page import render
from batchgen.report.series import Point, last_run

REPORT = "_report.html"
_SAMPLES = 6
_GROUPS = 12
# Tokens from the end of a prompt or of a shared prefix that are shown.
_PROMPT_TOKENS = 120
_GROUP_TOKENS = 24
_MOST_CHARACTERS = 800
_SAMPLE_COLUMNS = (
    "id",
    "row_index",
    "status",
    "generated_text",
    "output_token_ids",
    "finish_reason",
    "label",
    "label_score",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
)


def write_report(
    config: Config,
    resolved_yaml: str,
    inputs: JobInputs,
    planned: JobPlan,
    output: OutputDir,
    totals: OutputTotals,
    summary: Mapping[str, Any],
) -> None:
    """Write the page into the output directory.

    Args:
        config: the job.
        resolved_yaml: the same as text.
        inputs: its inputs.
        planned: what was to be done.
        output: holds the parts, the figures over time, and the page.
        totals: counted over the parts.
        summary: what ``_summary.json`` holds.

    Raises:
        OutputError: the disk does not take it.
    """
    prompts = _Prompts(inputs, planned)
    content = Content(
        title=output.path.name,
        summary=summary,
        settings=list(_settings(config, inputs, summary)),
        config=resolved_yaml,
        points=_curve(output.scratch / METRICS) if summary["steps"] else (),
        failed_rows={kind: list(_failed(places)) for kind, places in totals.failed.items()},
        samples=[prompts.sample(row) for row in _finished_rows(totals)],
        groups=list(prompts.groups()),
    )
    output.write_text(REPORT, render(content))


class _Prompts:
    """Prompts as the model saw them, for people."""

    def __init__(self, inputs: JobInputs, planned: JobPlan) -> None:
        self._tokenizer = inputs.tokenizer
        self._store = planned.store
        self._plan = planned.plan

    def sample(self, row: Mapping[str, Any]) -> SampleRow:
        """Show an output row beside its prompt."""
        ids = self._ids(row["row_index"])
        return SampleRow(
            id=str(row["id"]),
            prompt=self._end(ids, _PROMPT_TOKENS),
            answer=self._answer(row),
            note=(
                f"{row['prompt_tokens']:,} prompt tokens, {row['cached_tokens']:,} of them from "
                f"the cache; {row['completion_tokens']:,} generated, ended by "
                f"{row['finish_reason']}"
            ),
        )

    def groups(self) -> Iterator[Group]:
        """Give the plan's largest groups with the end of what they share."""
        places = zip(self._plan.groups, self._plan.group_row_index, strict=True)
        for group, row_index in list(places)[:_GROUPS]:
            yield Group(
                tokens=group.tokens,
                requests=group.rows,
                tokens_saved=group.tokens_saved,
                end=self._end(self._ids(row_index)[: group.tokens], _GROUP_TOKENS),
            )

    def _ids(self, row_index: int) -> list[int]:
        row = int(np.searchsorted(self._store.row_index, row_index))
        ids: list[int] = self._store.ids(row).tolist()
        return ids

    def _end(self, ids: Sequence[int], num_tokens: int) -> str:
        cut = "… " if len(ids) > num_tokens else ""
        return cut + self._text(ids[-num_tokens:])

    def _answer(self, row: Mapping[str, Any]) -> str:
        if row["label"] is not None:
            return f"{row['label']} ({row['label_score']:.1%})"
        if row["generated_text"] is not None:
            return _shortened(row["generated_text"])
        return self._text(row["output_token_ids"] or [])

    def _text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return _shortened(" ".join(map(str, ids)))
        return _shortened(str(self._tokenizer.decode(ids, skip_special_tokens=False)))


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …"


def _finished_rows(totals: OutputTotals) -> list[dict[str, Any]]:
    rows = read_places(totals.spread(_SAMPLES), _SAMPLE_COLUMNS)
    return [row for row in rows if row["status"] == "ok"]


def _failed(places: Sequence[RowPlace]) -> Iterator[FailedRow]:
    for row in read_places(places, ("id", "row_index", "error_message")):
        yield FailedRow(str(row["id"]), row["row_index"], _shortened(row["error_message"] or ""))


def _curve(path: Path) -> list[Point]:
    with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as lines:
        return last_run(lines)
    return []


def _settings(
    config: Config, inputs: JobInputs, summary: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Say what ran on what, then every key that is not at its default."""
    yield "rows of the input", f"{inputs.num_rows:,}"
    yield "prompts from", inputs.renderer.source.value
    if summary["device"] is not None:
        yield "device", f"{summary['device']}, {summary['dtype']}, {summary['threads']} threads"
    yield from _changed(config, "")


def _changed(section: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for item in fields(section):
        name, value = f"{prefix}{item.name}", getattr(section, item.name)
        if is_dataclass(value):
            yield from _changed(value, f"{name}.")
            continue
        is_default = value == (
            item.default_factory() if item.default_factory is not MISSING else item.default
        )
        if not is_default:
            yield name, _shortened(_typed(value))


def _typed(value: Any) -> str:
    """Show a key's value as it would be typed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value.value if isinstance(value, Enum) else value)
