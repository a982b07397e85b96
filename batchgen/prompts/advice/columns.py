"""Which column of a template varies too early, and what moving it behind the rest would save.

The saving is measured, not guessed: the template is rewritten with the column's output last,
a bounded sample of the rows goes through it, and what neighbours share is counted as the plan
counts it. More rows can only share more, so for a job larger than the sample the figure is
what the move saves at least.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.errors import RowError, UsageError
from batchgen.prompts.advice.rewrite import Piece, moved_to_end, template_pieces
from batchgen.prompts.advice.sample import SAMPLE_ROWS, RowSample
from batchgen.prompts.encoder import PromptEncoder
from batchgen.prompts.limits import Limits
from batchgen.prompts.order import IdsOf, Rows, common_prefix, neighbour_lcp, prefix_order
from batchgen.prompts.render import Renderer
from batchgen.prompts.source import PromptSpec
from batchgen.prompts.template import RowTemplate
from batchgen.prompts.tokenizer import Tokenizer
from batchgen.prompts.values import Unreadable, python_rows

# A smaller saving a row, or a smaller share of the prompt, is not worth a rewrite.
_NOTEWORTHY_TOKENS = 16
_NOTEWORTHY_SHARE = 0.05

_MIN_ROWS = 8
_MAX_COLUMNS = 16
_MAX_TOKENISED = 3
# Together these hold the inquiry to a few tenths of a second, unless prompts are very long.
_RENDERED_CHARS = 2_000_000
_TOKENISED_TOKENS = 100_000
_CHARS_PER_TOKEN = 4

_Move = tuple[tuple[str, ...], str]
"""Columns, and the template with what they write at its end."""
_Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of the template that would pay.

    Attributes:
        columns: what should stand last; more than one where only their move together pays.
        first_token: index of the first prompt token that differs because of them.
        saved_tokens_per_row: prompt tokens a row that need not be computed after the move.
    """

    columns: tuple[str, ...]
    first_token: int
    saved_tokens_per_row: int

    def to_json(self) -> dict[str, Any]:
        """Return what ``_plan.json`` holds."""
        return asdict(self) | {"columns": list(self.columns)}

    def describe(self) -> str:
        """Return it as a line."""
        *others, last = (f"`{name}`" for name in self.columns)
        many = bool(others)
        names = f"{', '.join(others)} and {last}" if many else last
        return (
            f"column{'s' if many else ''} {names} differ{'' if many else 's'} at token "
            f"{self.first_token:,}; moved to the template's end {'they' if many else 'it'} "
            f"would save {self.saved_tokens_per_row:,} tokens a row"
        )


def advise(
    sample: RowSample,
    spec: PromptSpec,
    schema: pa.Schema,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    ids: IdsOf,
    shared: Rows,
) -> Advice | None:
    """Find the template's column whose move to the end saves most.

    Args:
        sample: rows of the job, after they have passed.
        spec, schema, tokenizer, limits: what the job's prompts are made with; only a
            template can be advised on.
        ids: token ids of a store row.
        shared: [store rows] leading tokens that each row that is computed shares with the
            one before it in prefix order; -1 for all other rows.

    Returns:
        None where nothing would save 16 tokens a row and a twentieth of the prompt.
    """
    if spec.template is None or not sample or (shared >= 0).sum() < 2:
        return None
    try:
        moves = _promising(spec.template, schema.names, sample)
        if not moves:
            return None
        encoder = PromptEncoder(Renderer(spec, schema, tokenizer), tokenizer, limits)
        job = _Job(spec, schema, tokenizer, encoder, ids, shared)
        return _best_move(job, moves, sample)
    except (UsageError, jinja2.TemplateSyntaxError):
        # The job's own template works; one that cannot be rewritten just gets no advice.
        return None


@dataclass(frozen=True, slots=True)
class _Job:
    """How the job's prompts are made, and what its rows share; see :func:`advise`."""

    spec: PromptSpec
    schema: pa.Schema
    tokenizer: Tokenizer
    encoder: PromptEncoder
    ids: IdsOf
    shared: Rows

    def encode(self, template: str, table: pa.RecordBatch) -> list[_Ids | RowError]:
        """Make the prompts of some rows with another template."""
        spec = replace(self.spec, template=template)
        renderer = Renderer(spec, self.schema, self.tokenizer)
        return self.encoder.encode(renderer.render(table))

    def pairs(self, prompts: Sequence[_Ids | RowError], rows: Rows) -> list[tuple[_Ids, int]]:
        """Leave out rows with errors and rows that are not computed."""
        return [
            (prompt, row)
            for prompt, row in zip(prompts, rows.tolist(), strict=True)
            if self.shared[row] >= 0 and not isinstance(prompt, RowError)
        ]


def _best_move(job: _Job, moves: Sequence[_Move], sample: RowSample) -> Advice | None:
    template = job.spec.template or ""
    columns = RowTemplate(template, job.schema.names).columns
    some = np.flatnonzero(job.shared >= 0)[:SAMPLE_ROWS]
    mean_tokens = float(np.mean([len(job.ids(row)) for row in some.tolist()]))
    # Each move takes the rows through the tokenizer once, and so does finding the place.
    moves = moves[: max(1, int(_TOKENISED_TOKENS / (_MIN_ROWS * mean_tokens)) - 1)]
    limit = _bounded(_TOKENISED_TOKENS, (len(moves) + 1) * mean_tokens)
    rows, table = sample.take(limit, columns)
    saved = [_saved_tokens(job, job.encode(moved, table), rows) for _, moved in moves]
    found = [(tokens, names) for tokens, (names, _) in zip(saved, moves, strict=True) if tokens]
    if not found:
        return None
    tokens, names = max(found, key=lambda each: _worth(*each))
    swapped = job.encode(template, _swapped(table, names))
    return Advice(names, _first_token(job, swapped, rows), tokens)


def _worth(saved: float, names: Sequence[str]) -> float:
    # A further column must pay for itself.
    return saved - _NOTEWORTHY_TOKENS * len(names)


def _bounded(budget: int, cost: float) -> int:
    return max(_MIN_ROWS, min(SAMPLE_ROWS, int(budget / max(1.0, cost))))


def _saved_tokens(job: _Job, moved: Sequence[_Ids | RowError], rows: Rows) -> int:
    """Return the prefill that a row saves on average; 0 where that is not noteworthy."""
    pairs = job.pairs(moved, rows)
    if len(pairs) < 2:
        return 0
    lengths = np.array([len(job.ids(row)) for _, row in pairs])
    total = int((job.shared >= 0).sum())
    # The first row in prefix order shares nothing: one of all rows, not one of the sample.
    shared = _shared([each for each, _ in pairs]) / (len(pairs) - 1) * (total - 1) / total
    after = np.mean([len(each) for each, _ in pairs]) - shared
    before = np.mean(lengths - job.shared[[row for _, row in pairs]])
    saved = float(before - after)
    is_noteworthy = saved >= max(_NOTEWORTHY_TOKENS, _NOTEWORTHY_SHARE * lengths.mean())
    return int(saved + 1e-6) if is_noteworthy else 0


def _shared(rows: Sequence[_Ids]) -> int:
    """Sum what neighbours share where rows stand in prefix order."""
    ids = rows.__getitem__
    return int(neighbour_lcp(ids, prefix_order(ids, np.arange(len(rows)))).sum())


def _swapped(table: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Return the rows with their neighbours' values in some columns."""
    arrays = [
        pa.concat_arrays([column.slice(1), column.slice(0, 1)]) if name in names else column
        for name, column in zip(table.schema.names, table.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=table.schema.names)


def _first_token(job: _Job, swapped: Sequence[_Ids | RowError], rows: Rows) -> int:
    """Return the least index at which a row differs from itself with other values."""
    pairs = [(each, job.ids(row)) for each, row in job.pairs(swapped, rows)]
    places = [common_prefix(*pair) for pair in pairs if not np.array_equal(*pair)]
    return min(places, default=0)


def _promising(source: str, names: Sequence[str], sample: RowSample) -> list[_Move]:
    """Find the moves that could save most, by characters, which costs no tokenising.

    Returns:
        the best first.
    """
    template = RowTemplate(source, names)
    columns = template.columns
    if not columns:
        return []
    _, table = sample.take(SAMPLE_ROWS, columns)
    rows = _readable(table)
    if not rows:
        return []
    pieces = template_pieces(source)
    early = _by_appearance(pieces, [name for name in columns if _varies(rows, name)])
    # Two columns that each vary early hide one another's cost: try them together, too.
    groups = dict.fromkeys([(name,) for name in early] + list(accumulate((n,) for n in early)))
    mean_chars = float(np.mean([len(_text(template, row) or "") for row in rows[:_MIN_ROWS]]))
    limit = _bounded(_RENDERED_CHARS, mean_chars * (1 + len(groups)))
    rows = [row for row in _readable(sample.take(limit, columns)[1]) if _text(template, row)]
    before = _shared_chars(template, rows)
    gains: list[tuple[float, tuple[str, ...], str]] = []
    for group in groups:
        moved = moved_to_end(pieces, group)
        if moved is None:
            continue
        gain = _shared_chars(RowTemplate(moved, names), rows) - before
        if gain > 0:
            per_row = gain / len(rows) / _CHARS_PER_TOKEN
            gains.append((_worth(per_row, group), group, moved))
    gains.sort(key=lambda each: -each[0])
    return [(group, moved) for _, group, moved in gains[:_MAX_TOKENISED]]


def _readable(table: pa.Table | pa.RecordBatch) -> list[Mapping[str, Any]]:
    return [row for row in python_rows(table) if not isinstance(row, Unreadable)]


def _varies(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(row[name] != rows[0][name] for row in rows)


def _by_appearance(pieces: Sequence[Piece], columns: Sequence[str]) -> list[str]:
    seen = dict.fromkeys(name for piece in pieces for name in columns if name in piece.reads)
    return list(seen)[:_MAX_COLUMNS]


def _text(template: RowTemplate, row: Mapping[str, Any]) -> str | None:
    try:
        return template.render(row)
    except ValueError:
        return None


def _shared_chars(template: RowTemplate, rows: Sequence[Mapping[str, Any]]) -> int:
    texts = (_text(template, row) or "" for row in rows)
    encoded = (text.encode("utf-32-le", "surrogatepass") for text in texts)
    return _shared([np.frombuffer(each, np.int32) for each in encoded])
