"""What a plan shows of the rows: failures, repeated rows, shared text, and where its end is cut.

A tokenizer joins the end of the shared text with the beginning of a row's own: `Review: ` and
`good` make ` good`. The tokens so joined differ from row to row although their text is shared.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batchgen.errors import RowError, RowErrorType
from batchgen.prompts.limits import IdArray
from batchgen.prompts.order import Duplicates, common_prefix
from batchgen.prompts.plan import Plan
from batchgen.prompts.store import PromptStore
from batchgen.prompts.tokenizer import Tokenizer, encode

_EXAMPLES = 3
_SHOWN_CHARS = 100
_SHOWN_END_CHARS = 24


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
    """Return the rows whose result most others take, for ``_plan.json``."""
    return [
        named_row(store, row) | {"copies": copies, "text": _shown(store, row, None, tokenizer)}
        for row, copies in duplicates.largest(limit)
    ]


def group_texts(plan: Plan, store: PromptStore, tokenizer: Tokenizer) -> list[str]:
    """Decode the prefixes of groups, shortened in the middle: the end is what can be edited."""
    rows = np.searchsorted(store.row_index, plan.group_row_index).tolist()
    return [
        _shown(store, row, group.tokens, tokenizer) or ""
        for group, row in zip(plan.groups, rows, strict=True)
    ]


def named_row(store: PromptStore, row: int) -> dict[str, Any]:
    """Return which row of the input a store row is."""
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


@dataclass(frozen=True, slots=True)
class MergedEnd:
    """The end of a shared text that is tokenised together with what follows.

    Attributes:
        text: the end of the shared text.
        merged: the part of it that goes into the rows' own tokens.
        tokens_lost: tokens of it that a row does not share, in most rows.
        rows, rows_seen: rows in which that is so, of those looked at.
        edit: an end in its place that stays a token of its own, where one was found.
    """

    text: str
    merged: str
    tokens_lost: int
    rows: int
    rows_seen: int
    edit: str | None

    def to_json(self) -> dict[str, Any]:
        """Return what ``_plan.json`` holds."""
        return asdict(self)

    def describe(self) -> str:
        """Return it as a line."""
        tokens = "token" if self.tokens_lost == 1 else "tokens"
        remedy = f"; {_edit_words(self)}" if self.edit is not None else ""
        return (
            f"the shared text ends inside a token: the last {self.merged!r} of {self.text!r} is "
            f"tokenised together with the row's own text in {self.rows} of {self.rows_seen} rows, "
            f"so they do not share its last {self.tokens_lost} {tokens}{remedy}"
        )


def _edit_words(end: MergedEnd) -> str:
    if not end.edit:
        return "without the blank it would end at a token's edge"
    return f"with {end.edit!r} in its place it would end at a token's edge"


def find_merged_end(
    head: str, rows: Sequence[IdArray], tokenizer: Tokenizer, *, is_chat: bool
) -> MergedEnd | None:
    """Look whether the end of a shared text is merged with what follows.

    Args:
        head: the text with which every row's prompt begins, special tokens' spellings
            included.
        rows: token ids of some prompts.
        is_chat: whether the tokenizer's own beginning is in ``head`` already.

    Returns:
        None where the head ends at a token's edge in all rows.
    """

    def ids_of(text: str) -> IdArray:
        ids = encode(tokenizer, [text], add_special_tokens=not is_chat)[0]
        return np.asarray(ids, np.int32)

    alone = ids_of(head)
    shared = [common_prefix(alone, row) for row in rows]
    merged = [count for count in shared if count < len(alone)]
    if not merged:
        return None
    usual = Counter(merged).most_common(1)[0][0]
    text = _decode(tokenizer, alone[usual:].tolist())
    if not text or not head.endswith(text):
        # The tokenizer itself puts something behind a text, or does not write it back.
        return None
    follows = [_decode(tokenizer, row[usual:].tolist())[len(text) :] for row in rows]
    edit = _find_edit(head, text, [each for each in follows if each], ids_of)
    shown = head[-max(_SHOWN_END_CHARS, len(text)) :]
    return MergedEnd(shown, text, len(alone) - usual, len(merged), len(rows), edit)


def _find_edit(head: str, merged: str, follows: Sequence[str], ids_of: Any) -> str | None:
    """Find an end in place of the blanks at the head's end that keeps to itself in all rows."""
    if merged.strip():
        return None
    trimmed = head[: len(head) - len(merged)]
    # A line feed keeps what it parts apart, for a reader as well.
    for edit in ("\n", ""):
        alone = ids_of(trimmed + edit)
        wholes = (ids_of(trimmed + edit + text) for text in follows)
        if follows and all(common_prefix(alone, whole) == len(alone) for whole in wholes):
            return edit
    return None
