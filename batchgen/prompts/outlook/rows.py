"""Rows worth showing in a plan: those that fail, and those that many others repeat."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchgen.errors import RowError, RowErrorType
from batchgen.prompts.order import Duplicates, PrefixGroup
from batchgen.prompts.store import PromptStore
from batchgen.prompts.tokenizer import Tokenizer

_EXAMPLES = 3
_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class Failing:
    """Rows that are known to fail, of one kind.

    Attributes:
        kind: their error's type.
        rows: how many there are.
        examples: store row and message of the first ones.
    """

    kind: RowErrorType
    rows: int
    examples: Sequence[tuple[int, str]]

    def to_json(self, store: PromptStore) -> dict[str, Any]:
        """Return what ``_plan.json`` holds."""
        examples = [named_row(store, row) | {"message": text} for row, text in self.examples]
        return {"error_type": self.kind.value, "rows": self.rows, "examples": examples}


def failing_rows(store: PromptStore, *, pool_tokens: int | None) -> list[Failing]:
    """Find the rows that fail before the run or as soon as it takes them, by kind.

    Args:
        pool_tokens: tokens that the KV pool holds; None where that is not known, or where it
            takes any prompt.
    """
    counts: Counter[RowErrorType] = Counter()
    examples: dict[RowErrorType, list[tuple[int, str]]] = {}

    def add(row: int, error: RowError) -> None:
        counts[error.type] += 1
        shown = examples.setdefault(error.type, [])
        if len(shown) < _EXAMPLES:
            shown.append((row, error.message))

    for row, error in store.errors():
        add(row, error)
    if pool_tokens is not None:
        for row in np.flatnonzero(store.lengths >= pool_tokens).tolist():
            message = f"{store.lengths[row]} tokens and one of output; the pool holds {pool_tokens}"
            add(row, RowError(RowErrorType.EXCEEDS_KV_CAPACITY, message))
    return [Failing(kind, count, examples[kind]) for kind, count in counts.most_common()]


def repeated_rows(
    duplicates: Duplicates, store: PromptStore, tokenizer: Tokenizer | None, limit: int
) -> list[dict[str, Any]]:
    """Give the rows whose result most others take, for ``_plan.json``."""
    return [
        named_row(store, row) | {"copies": copies, "text": _shown(store, row, None, tokenizer)}
        for row, copies in duplicates.largest(limit)
    ]


def group_texts(
    groups: Sequence[PrefixGroup],
    row_index: Sequence[int],
    store: PromptStore,
    tokenizer: Tokenizer,
) -> list[str]:
    """Decode the prefixes of groups, shortened in the middle: the end is what can be edited.

    Args:
        row_index: position in the input of each group's first row.
    """
    rows = np.searchsorted(store.row_index, row_index).tolist()
    return [
        _shown(store, row, group.tokens, tokenizer) or ""
        for group, row in zip(groups, rows, strict=True)
    ]


def named_row(store: PromptStore, row: int) -> dict[str, Any]:
    """Say which row of the input a store row is."""
    row_id = store.row_ids[row].as_py()
    return {"row_index": int(store.row_index[row]), "id": row_id}


def _shown(
    store: PromptStore, row: int, tokens: int | None, tokenizer: Tokenizer | None
) -> str | None:
    if tokenizer is None:
        return None
    ids = store.ids(row)[:tokens]
    half = _SHOWN_CHARS // 2
    # As many tokens at either end are enough for the characters that are shown.
    if len(ids) <= 2 * _SHOWN_CHARS:
        text = _decode(tokenizer, ids.tolist())
        return text if len(text) <= _SHOWN_CHARS else f"{text[:half]} ... {text[-half:]}"
    head, tail = ids[:_SHOWN_CHARS].tolist(), ids[-_SHOWN_CHARS:].tolist()
    return f"{_decode(tokenizer, head)[:half]} ... {_decode(tokenizer, tail)[-half:]}"


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
