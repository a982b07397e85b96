"""What a call gives back: rows with the names and shapes of the command's output."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from batchgen.data.output.schema import output_schema
from batchgen.engine.request import BlockAccount
from batchgen.errors import BatchgenError, RowError, RowErrorType


class Row(dict[str, Any]):
    """An output row by the names of its columns, which are attributes too."""

    def __getattr__(self, name: str) -> Any:
        """Give a column that is no method of a mapping."""
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(f"an output row has no column {name}") from error


@dataclass(frozen=True, slots=True)
class Output(Mapping[str, Any]):
    """What came of one prompt; as a mapping it is the first sample's row.

    Attributes:
        samples: a row for each of ``n`` samples, or one row with the error; a row has every
            column of the command's output (docs/output.md) in Python's types, a struct or a
            map as a dictionary.
    """

    samples: tuple[Row, ...]

    def __getitem__(self, column: str) -> Any:
        """Give a column of the first sample."""
        return self.samples[0][column]

    def __iter__(self) -> Iterator[str]:
        """Walk over the columns."""
        return iter(self.samples[0])

    def __len__(self) -> int:
        """Count the columns."""
        return len(self.samples[0])

    @property
    def text(self) -> str | None:
        """The first sample's text; None after an error, or without a tokenizer."""
        text: str | None = self["generated_text"]
        return text

    @property
    def token_ids(self) -> list[int] | None:
        """The first sample's tokens, the one that stopped it included; None after an error."""
        ids: list[int] | None = self["output_token_ids"]
        return ids

    @property
    def finish_reason(self) -> str | None:
        """What ended the first sample: ``stop``, ``length``, ``repetition`` or ``error``."""
        reason: str | None = self["finish_reason"]
        return reason

    @property
    def error(self) -> RowError | None:
        """Why there is no answer, or None."""
        if self["error_type"] is None:
            return None
        return RowError(RowErrorType(self["error_type"]), self["error_message"] or "")

    @property
    def blocks(self) -> BlockAccount | None:
        """What the first sample took from the pool and gave back; None after an error."""
        if self["error_type"] is not None:
            return None
        return BlockAccount(**{each.name: self[each.name] for each in fields(BlockAccount)})

    def to_arrow(self) -> pa.Table:
        """Give the samples as a table with the schema of the command's output."""
        return _table([self])


class Outputs(list[Output]):
    """What came of some prompts, in their order."""

    def to_arrow(self) -> pa.Table:
        """Give all samples as a table with the schema of the command's output."""
        return _table(self)


class FailedPromptsError(BatchgenError):
    """Some prompts have no answer, and ``raise_errors`` was asked for.

    Attributes:
        outputs: of all prompts, those that have one too.
    """

    def __init__(self, message: str, outputs: Outputs) -> None:
        super().__init__(message)
        self.outputs = outputs


def _table(outputs: Iterable[Output]) -> pa.Table:
    rows = [row for output in outputs for row in output.samples]
    has_text_ids = any(isinstance(row["id"], str) for row in rows)
    schema = output_schema(pa.string() if has_text_ids else pa.int64())
    return pa.Table.from_pylist(rows, schema=schema)
