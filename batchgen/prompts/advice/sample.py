"""Some of a job's rows, kept while all of them pass by once."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from batchgen.prompts.order import Rows

# Rows that a sample holds, and the runs of neighbours that they stand in.
SAMPLE_ROWS = 256
_RUNS = 4


class RowSample:
    """Some runs of neighbouring input rows, kept while all rows pass by once."""

    def __init__(self, num_rows: int) -> None:
        """Choose the runs.

        Args:
            num_rows: rows that will pass; a sample's worth or less is kept whole.
        """
        length = SAMPLE_ROWS // _RUNS
        last = max(0, num_rows - length)
        starts = [last * run // (_RUNS - 1) for run in range(_RUNS)]
        self._spans = [(start, start + length) for start in starts]
        if num_rows <= SAMPLE_ROWS:
            self._spans = [(0, num_rows)]
        self._parts: list[list[pa.RecordBatch]] = [[] for _ in self._spans]
        self._passed = 0

    def see(self, table: pa.RecordBatch) -> None:
        """Keep what is in the sample of the next rows; the first to pass is row 0."""
        first, count = self._passed, table.num_rows
        self._passed += count
        for (start, stop), parts in zip(self._spans, self._parts, strict=True):
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high:
                parts.append(table.slice(low, high - low))

    def __bool__(self) -> bool:
        """Whether it holds any row."""
        return any(self._parts)

    def take(self, limit: int, columns: Sequence[str]) -> tuple[Rows, pa.RecordBatch]:
        """Return at most ``limit`` rows, the first of each run, with some of the columns.

        Returns:
            their positions in the input ``[rows]``, and the rows; at least one has passed.
        """
        each = max(2, limit // len(self._spans))
        kept = [
            (span, parts) for span, parts in zip(self._spans, self._parts, strict=True) if parts
        ]
        runs = [_joined(parts, columns).slice(0, each) for _, parts in kept]
        rows = [
            np.arange(span[0], span[0] + run.num_rows)
            for (span, _), run in zip(kept, runs, strict=True)
        ]
        return np.concatenate(rows), _joined(runs, columns)


def _joined(batches: Sequence[pa.RecordBatch], columns: Sequence[str]) -> pa.RecordBatch:
    arrays = [pa.concat_arrays([batch.column(name) for batch in batches]) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
