"""What stands in the output, counted over the parts of all runs; a part at a time."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.output.directory import OutputDir
from batchgen.data.output.parts import read_part
from batchgen.data.stores.store import Place
from batchgen.report.lengths import Lengths

_CUTS = ("prompt_tokens_cut", "max_tokens_cut")
_COLUMNS = (
    "status",
    "error_type",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    *_CUTS,
)
# Failed rows of each kind that are shown.
_EXAMPLES = 3

RowPlace = tuple[Place, int]
"""A part, and a row in it."""


@dataclass
class OutputTotals:
    """Counts over all output rows, and where to find some of them.

    Attributes:
        parts: each part and its rows, by number.
        ok: rows with an answer.
        errors: failed rows by kind.
        finish_reasons: rows by what ended them.
        prompt_lengths, output_lengths: tokens of the rows with an answer.
        prompt_tokens, completion_tokens: their sums.
        truncation: tokens that were cut, and the rows that lost some.
        failed: the first failed rows of each kind.
    """

    parts: list[RowPlace] = field(default_factory=list)
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_lengths: Lengths = field(default_factory=Lengths)
    output_lengths: Lengths = field(default_factory=Lengths)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncation: Counter[str] = field(default_factory=Counter)
    failed: dict[str, list[RowPlace]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def read(cls, output: OutputDir) -> Self:
        """Count the output as it stands on disk, earlier runs' rows included."""
        totals = cls()
        for part in output.parts:
            totals._add(part, read_part(part, _COLUMNS))
        return totals

    @property
    def rows(self) -> int:
        """Output rows."""
        return sum(rows for _, rows in self.parts)

    def figures(self) -> dict[str, Any]:
        """Give what stands in the summary."""
        return {
            "rows": self.rows,
            "ok": self.ok,
            "errors": dict(self.errors),
            "finish_reasons": dict(self.finish_reasons),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "truncation": {
                name: self.truncation[name] for cut in _CUTS for name in (f"{cut}_rows", cut)
            },
            "prompt_lengths": self.prompt_lengths.figures(),
            "output_lengths": self.output_lengths.figures(),
        }

    def spread(self, wanted: int) -> list[RowPlace]:
        """Give some rows at even distances from each other."""
        count = min(wanted, self.rows)
        return [self._place((2 * n + 1) * self.rows // (2 * count)) for n in range(count)]

    def _place(self, position: int) -> RowPlace:
        for part, rows in self.parts:
            if position < rows:
                return part, position
            position -= rows
        raise IndexError(position)

    def _add(self, part: Place, table: pa.Table) -> None:
        self.parts.append((part, table.num_rows))
        is_ok = pc.equal(table.column("status"), "ok")
        self.ok += pc.sum(is_ok).as_py() or 0
        for name, counts in (
            ("error_type", self.errors),
            ("finish_reason", self.finish_reasons),
        ):
            for entry in pc.value_counts(table.column(name).drop_null()).to_pylist():
                counts[entry["values"]] += entry["counts"]
        prompts = table.column("prompt_tokens").filter(is_ok)
        outputs = table.column("completion_tokens").filter(is_ok)
        self.prompt_tokens += pc.sum(prompts).as_py() or 0
        self.completion_tokens += pc.sum(outputs).as_py() or 0
        self.prompt_lengths.add(prompts.to_numpy())
        self.output_lengths.add(outputs.to_numpy())
        for name in _CUTS:
            column = table.column(name)
            self.truncation[name] += pc.sum(column).as_py() or 0
            self.truncation[f"{name}_rows"] += pc.sum(pc.greater(column, 0)).as_py() or 0
        self._note_failed(part, table.column("error_type"), is_ok)

    def _note_failed(self, part: Place, kinds: pa.ChunkedArray, is_ok: pa.ChunkedArray) -> None:
        places = np.flatnonzero(~is_ok.to_numpy())
        for kind in pc.unique(kinds.take(places)).to_pylist():
            found = self.failed[kind]
            of_kind = np.flatnonzero(pc.equal(kinds, kind).fill_null(False).to_numpy())
            found += [(part, row) for row in of_kind[: _EXAMPLES - len(found)].tolist()]


def read_places(places: Sequence[RowPlace], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Read some rows, in the order of ``places``; each part is read once.

    Yields:
        The named columns of each row.
    """
    by_part: dict[Place, list[int]] = defaultdict(list)
    for part, row in places:
        by_part[part].append(row)
    found = {
        (part, row): values
        for part, rows in by_part.items()
        for row, values in zip(rows, read_part(part, columns).take(rows).to_pylist(), strict=True)
    }
    return (found[place] for place in places)
