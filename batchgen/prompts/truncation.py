"""Prompts that are too long for the model beside their output: what of them gives way.

Only a row's own words are cut, never what frames them:

- token ids and text prompts: special tokens stay, and the longest run of tokens between two
  of them is cut. (A text may hold a chat that the user rendered; its frame is special tokens.)
- messages: the longest content that is not a system message is cut, and the chat rendered anew.
- a template: the longest text among the columns that the row gives to it is cut, and the
  template rendered anew. System text, shots and the template's own words stay.

What is cut off is counted in tokens of the prompt. Where the longest run or text does not
suffice, the prompt stays whole: its output gets the room that is left, and where none is left the
row fails.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.errors import RowError, RowErrorType
from batchgen.prompts.columns import is_text
from batchgen.prompts.encoder import PromptEncoder
from batchgen.prompts.limits import IdArray, Limits
from batchgen.prompts.messages import texts_of, with_texts
from batchgen.prompts.render import Chat, Prompt, Renderer
from batchgen.prompts.row_sampling import sampling_columns
from batchgen.prompts.source import Source
from batchgen.prompts.store import PromptStore
from batchgen.prompts.tokenizer import Tokenizer
from batchgen.sampling import SamplingParams

SIDES = {
    "truncate_left": "left",
    "truncate_right": "right",
    "truncate_middle": "middle",
}
# Longer than any prompt.
_UNLIMITED = 1 << 40
# Texts are cut token by token of their own, and the prompt may have some more where they join.
_MOST_TRIES = 8


class Truncation:
    """Cuts the prompts of a job.

    Attributes:
        renderer: makes the prompts of cut rows.

    Args:
        side: ``left`` drops the beginning, ``right`` the end, ``middle`` keeps half of each.
        renderer: the job's.
        tokenizer: may be None only where the rows carry token ids.
        limits: what the model can take.
        sampling: the job's parameters, which a row's own override.
        output_tokens: tokens that have to fit behind a prompt with some parameters.
    """

    def __init__(
        self,
        side: str,
        renderer: Renderer,
        tokenizer: Tokenizer | None,
        limits: Limits,
        sampling: SamplingParams,
        output_tokens: Callable[[SamplingParams], int],
    ) -> None:
        self._side = side
        self.renderer = renderer
        self._tokenizer = tokenizer
        self._limits = limits
        self._sampling = sampling
        self._output_tokens = output_tokens
        unlimited = replace(limits, max_model_len=_UNLIMITED)
        self._encoder = PromptEncoder(renderer, tokenizer, unlimited)
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        special = [token_id for token_id, token in added.items() if token.special]
        self._special = np.array(special, dtype=np.int64)
        self._rooms = lru_cache(maxsize=4096)(self._room)

    def fit(
        self,
        table: pa.RecordBatch,
        prompts: Sequence[Prompt | RowError],
        results: Sequence[IdArray | RowError],
        overrides: Sequence[str | RowError | None],
        first_row: int = 0,
    ) -> tuple[list[IdArray | RowError], list[int]]:
        """Cut what is too long in a batch.

        Args:
            table: [N] rows with the renderer's columns.
            prompts: [N] as they were rendered.
            results: [N] as they were encoded.
            overrides: [N] the rows' own sampling parameters as JSON.
            first_row: position in the input of the batch's first row.

        Returns:
            [N] the results with cut prompts, and the tokens cut from each.
        """
        fitted, cut = list(results), [0] * len(results)
        for row, (prompt, result, override) in enumerate(
            zip(prompts, results, overrides, strict=True)
        ):
            if isinstance(prompt, RowError) or isinstance(override, RowError):
                continue
            room = self._rooms(override)
            is_too_long = isinstance(result, RowError) and result.type is _TOO_LONG
            if not is_too_long and (isinstance(result, RowError) or len(result) <= room):
                continue
            whole = self._encoder.encode([prompt])[0] if isinstance(result, RowError) else result
            if isinstance(whole, RowError):
                continue
            shorter = self._shorten(table.slice(row, 1), prompt, whole, room, first_row + row)
            if not isinstance(shorter, RowError):
                fitted[row], cut[row] = shorter, len(whole) - len(shorter)
            elif is_too_long:
                fitted[row] = shorter
        return fitted, cut

    def _room(self, override: str | None) -> int:
        params = self._sampling
        if override is not None:
            params = params.override_json(override)
        return self._limits.max_model_len - self._output_tokens(params)

    def _shorten(
        self, row: pa.RecordBatch, prompt: Prompt, ids: IdArray, room: int, position: int
    ) -> IdArray | RowError:
        over = len(ids) - room
        if room < 1:
            shorter: IdArray | None = None
        elif self.renderer.source in (Source.TOKEN_IDS, Source.TEXT):
            shorter = _cut_longest_run(ids, np.isin(ids, self._special), over, self._side)
        elif isinstance(prompt, Chat) and self.renderer.source is Source.MESSAGES:
            shorter = self._cut_message(prompt, over, room)
        else:
            shorter = self._cut_column(row, over, room, position)
        if shorter is not None:
            return shorter
        return RowError(
            _TOO_LONG,
            f"the prompt has {len(ids)} tokens, and its output leaves room for {room} of the "
            f"model's {self._limits.max_model_len} (model.max_model_len): too few even without "
            "what prompt.truncation may cut; lower max_tokens, or shorten what frames the row",
        )

    def _cut_message(self, chat: Chat, over: int, room: int) -> IdArray | None:
        texts = {
            (number, part): text
            for number, message in enumerate(
                chat.messages[:-1] if chat.continues else chat.messages
            )
            for part, text in enumerate(texts_of(message.get("content") or ""))
            if message["role"] != "system" and text
        }
        if not texts:
            return None
        longest = max(texts, key=lambda place: len(texts[place]))

        def render(text: str) -> Prompt | RowError:
            number, part = longest
            messages = list(chat.messages)
            content = messages[number]["content"]
            shorter = texts_of(content)
            shorter[part] = text
            messages[number] = {**messages[number], "content": with_texts(content, shorter)}
            return replace(chat, messages=messages)

        return self._cut_text(texts[longest], render, over, room)

    def _cut_column(
        self, row: pa.RecordBatch, over: int, room: int, position: int
    ) -> IdArray | None:
        own = set(sampling_columns(row.schema))
        texts = {
            field.name: row.column(field.name)[0].as_py() or ""
            for field in row.schema
            if field.name in self.renderer.columns and field.name not in own and is_text(field.type)
        }
        if not texts:
            return None
        longest = max(texts, key=lambda name: len(texts[name]))

        def render(text: str) -> Prompt | RowError:
            at, field = row.schema.get_field_index(longest), row.schema.field(longest)
            changed = row.set_column(at, field, pa.array([text], field.type))
            with self.renderer.normalizer.uncounted():
                return self.renderer.render(changed, position)[0]

        return self._cut_text(texts[longest], render, over, room)

    def _cut_text(
        self, text: str, render: Callable[[str], Prompt | RowError], over: int, room: int
    ) -> IdArray | None:
        """Cut a text of the prompt until the prompt fits; None where all of it is too little."""
        spans = self._spans(text)
        keep = len(spans) - over
        for _ in range(_MOST_TRIES):
            if keep < 1:
                return None
            ids = self._encoder.encode([render(_kept_text(text, spans, keep, self._side))])[0]
            if isinstance(ids, RowError):
                return None
            if len(ids) <= room:
                return ids
            keep -= len(ids) - room
        return None

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return where each token of a text begins and ends in it."""
        assert self._tokenizer is not None
        encoded: Any = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        spans: list[tuple[int, int]] = encoded["offset_mapping"]
        return spans


_TOO_LONG = RowErrorType.PROMPT_TOO_LONG


def _cut_longest_run(
    ids: IdArray, is_special: npt.NDArray[np.bool_], over: int, side: str
) -> IdArray | None:
    """Cut ``over`` of [L] ids out of the longest run without a special token.

    None where it would be used up.
    """
    borders = np.flatnonzero(np.concatenate([[True], is_special, [True]])) - 1
    at = int(np.diff(borders).argmax())
    first, end = int(borders[at]) + 1, int(borders[at + 1])
    if end - first <= over:
        return None
    kept = _kept(np.arange(first, end), end - first - over, side)
    return np.concatenate([ids[:first], ids[kept], ids[end:]])


def _kept(items: npt.NDArray[np.int64], keep: int, side: str) -> npt.NDArray[np.int64]:
    """Leave the end, the beginning, or half of each; the beginning gets the odd one."""
    if side == "left":
        return items[len(items) - keep :]
    if side == "right":
        return items[:keep]
    head = -(-keep // 2)
    return np.concatenate([items[:head], items[len(items) - (keep - head) :]])


def _kept_text(text: str, spans: Sequence[tuple[int, int]], keep: int, side: str) -> str:
    """Leave so many tokens of a text, by where they stand in it."""
    kept = _kept(np.arange(len(spans)), keep, side).tolist()
    if side != "middle":
        return text[spans[kept[0]][0] : spans[kept[-1]][1]]
    head = -(-keep // 2)
    tail = text[spans[kept[head]][0] :] if keep > head else ""
    return text[: spans[kept[head - 1]][1]] + tail


Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TruncationAudit:
    """Rows that are too long beside their output; without those that are errors.

    Attributes:
        policy: ``prompt.truncation``.
        cut_rows: rows whose prompt was cut.
        cut_tokens: tokens cut from all of them.
        short_rows: rows whose prompt leaves less room than their ``max_tokens``.
        short_tokens: tokens of ``max_tokens`` that have no room, at least.
    """

    policy: str
    cut_rows: int
    cut_tokens: int
    short_rows: int
    short_tokens: int

    @classmethod
    def of(
        cls, policy: str, store: PromptStore, rows: Rows, max_tokens: Rows, max_model_len: int
    ) -> Self:
        """Count over some store rows.

        Args:
            policy: ``prompt.truncation``.
            store: the prompts, cut already.
            rows: [R] the store rows that count.
            max_tokens: [store rows] most tokens of an output, as far as the model's length goes.
            max_model_len: tokens of a prompt and its output together.
        """
        cut = store.cut_tokens[rows]
        short = np.maximum(0, store.lengths[rows] + max_tokens[rows] - max_model_len)
        return cls(
            policy=policy,
            cut_rows=int((cut > 0).sum()),
            cut_tokens=int(cut.sum(dtype=np.int64)),
            short_rows=int((short > 0).sum()),
            short_tokens=int(short.sum()),
        )

    def describe(self) -> list[str]:
        """Return it as lines for a person; none where every row fits."""
        lines = []
        if self.cut_rows:
            lines.append(
                f"prompt.truncation={self.policy}: {self.cut_tokens:,} prompt tokens are cut from "
                f"{self.cut_rows:,} rows"
            )
        if self.short_rows and self.policy == "shrink_max_tokens":
            lines.append(
                f"prompt.truncation={self.policy}: {self.short_rows:,} rows get fewer tokens than "
                "their max_tokens"
            )
        elif self.short_rows:
            lines.append(
                f"warning: {self.short_rows:,} rows have less room for their output than "
                "max_tokens and may end early; prompt.truncation=shrink_max_tokens says that this "
                "is meant, prompt.truncation=truncate_left, _right or _middle cuts the prompts"
            )
        return lines
