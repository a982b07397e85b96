"""What the report page shows, gathered: the summary's figures, the curve, examples of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchgen.report.series import Point


@dataclass(frozen=True, slots=True)
class FailedRow:
    """An input row that has no answer.

    Attributes:
        id: its id, as text.
        row_index: its place in the input.
        message: what was wrong.
    """

    id: str
    row_index: int
    message: str


@dataclass(frozen=True, slots=True)
class SampleRow:
    """An output row to look at.

    Attributes:
        id: the row's id, as text.
        prompt: the end of the prompt, as the model saw it.
        answer: the generated text, or the label and its probability.
        note: tokens in and out, tokens from the cache, why it ended.
    """

    id: str
    prompt: str
    answer: str
    note: str


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that share a prefix.

    Attributes:
        tokens: length of the prefix.
        requests: how many share it.
        tokens_saved: prompt tokens that need not be computed for it.
        end: the end of the shared text.
    """

    tokens: int
    requests: int
    tokens_saved: int
    end: str


@dataclass(frozen=True, slots=True)
class Content:
    """One report.

    Attributes:
        title: names the run.
        summary: what ``_summary.json`` holds; every figure of the page stands there, or is
            made of figures that do.
        settings: what ran: a name and its value each.
        config: the whole configuration as YAML.
        points: the last run's curve.
        failed_rows: a few failed rows of each kind of error.
        samples: a few finished rows.
        groups: prefixes that save most, largest saving first.
    """

    title: str
    summary: Mapping[str, Any]
    settings: Sequence[tuple[str, str]]
    config: str
    points: Sequence[Point] = ()
    failed_rows: Mapping[str, Sequence[FailedRow]] = field(default_factory=dict)
    samples: Sequence[SampleRow] = ()
    groups: Sequence[Group] = ()
