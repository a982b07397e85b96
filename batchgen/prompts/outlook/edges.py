"""Where the text that all rows share ends inside a token.

A tokenizer joins the end of the shared text with the beginning of a row's own: `Review: ` and
`good` make ` good`. The tokens so joined differ from row to row although their text is shared.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batchgen.prompts.limits import IdArray
from batchgen.prompts.order import common_prefix
from batchgen.prompts.tokenizer import Tokenizer, encode

_SHOWN_CHARS = 24


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
        """Say it in a line."""
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
    text = _text(tokenizer, alone[usual:])
    if not text or not head.endswith(text):
        # The tokenizer itself puts something behind a text, or does not write it back.
        return None
    follows = [_text(tokenizer, row[usual:])[len(text) :] for row in rows]
    edit = _find_edit(head, text, [each for each in follows if each], ids_of)
    shown = head[-max(_SHOWN_CHARS, len(text)) :]
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


def _text(tokenizer: Tokenizer, ids: IdArray) -> str:
    text: str = tokenizer.decode(
        ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text
