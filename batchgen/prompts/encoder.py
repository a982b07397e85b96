"""Rendered prompts become checked token ids."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from batchgen import activity
from batchgen.errors import RowError, RowErrorType
from batchgen.prompts.heads import can_be_cut, head_length
from batchgen.prompts.limits import IdArray, Limits, TextBound, too_long
from batchgen.prompts.render import Chat, Prompt, Renderer, Text, TokenIds
from batchgen.prompts.source import Source
from batchgen.prompts.tokenizer import Tokenizer, added_bos, added_edges, encode


class PromptEncoder:
    """Turns batches of rendered prompts into token ids.

    A text or chat is tokenised as a whole, once; a head that a batch's texts share is
    tokenised for all of them together, where that changes no id. A plain text gets what
    the tokenizer puts around texts by itself, but no second BOS where it begins with one;
    a chat gets nothing, since its template has written what the model wants.

    Args:
        renderer: made the prompts.
        tokenizer: may be None only where the renderer's source is token ids.
        limits: what the model can take.
    """

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._limits = limits
        self._texts = None
        if renderer.source is not Source.TOKEN_IDS:
            self._texts = _TextEncoder(renderer, tokenizer, limits)

    def encode(
        self, prompts: Sequence[Prompt | RowError], first_row: int = 0
    ) -> list[IdArray | RowError]:
        """Tokenise a batch; the result has one entry for each prompt, in order.

        Args:
            first_row: position in the input of the batch's first row.
        """
        if self._texts is not None:
            return self._texts.encode(prompts, first_row)
        return [
            self._limits.check(prompt.ids) if isinstance(prompt, TokenIds) else prompt
            for prompt in prompts
            if isinstance(prompt, TokenIds | RowError)
        ]


class _TextEncoder:
    """Encodes texts and chats."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, limits: Limits) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._limits = limits
        # The error of a row that the chat template or the tokenizer refuses.
        is_template = renderer.source is Source.TEMPLATE
        self._refusal = (
            RowErrorType.TEMPLATE_ERROR if is_template else RowErrorType.INVALID_MESSAGES
        )
        self._bos = added_bos(tokenizer)
        self._bound = TextBound(tokenizer)
        self._can_be_cut = can_be_cut(tokenizer)
        # A job has one head, in its first batches perhaps a longer one by chance.
        self._head_ids = lru_cache(maxsize=4)(self._encode_head)

    def encode(
        self, prompts: Sequence[Prompt | RowError], first_row: int
    ) -> list[IdArray | RowError]:
        results: dict[int, IdArray | RowError] = {}
        texts: dict[int, str] = {}
        chats: dict[int, str] = {}
        for row, prompt in enumerate(prompts):
            if isinstance(prompt, RowError):
                results[row] = prompt
            elif isinstance(prompt, Text | Chat):
                if isinstance(prompt, Chat):
                    activity.note(f"applying the chat template to row {first_row + row}")
                outcome = self._resolve(prompt)
                if isinstance(outcome, str):
                    (texts if isinstance(prompt, Text) else chats)[row] = outcome
                else:
                    results[row] = outcome
        activity.note(f"tokenising rows {first_row} to {first_row + len(prompts) - 1}")
        results |= self._encode_short(texts, is_chat=False)
        results |= self._encode_short(chats, is_chat=True)
        return [results[row] for row in range(len(prompts))]

    def _resolve(self, prompt: Text | Chat) -> str | IdArray | RowError:
        """Return the text of a prompt, or its ids where data spells a special token."""
        if isinstance(prompt, Text) and not prompt.is_marked:
            return prompt.text
        try:
            rendered = (
                prompt.text if isinstance(prompt, Text) else self._renderer.render_chat(prompt)
            )
            outcome = self._renderer.special.resolve(rendered)
            if isinstance(outcome, str):
                return outcome
            ids = self._with_edges(outcome) if isinstance(prompt, Text) else outcome
        except ValueError as error:
            return RowError(self._refusal, str(error))
        return self._limits.check(np.asarray(ids, dtype=np.int64))

    def _with_edges(self, ids: list[int]) -> list[int]:
        """Add what the tokenizer puts around a text by itself."""
        before, after = added_edges(self._tokenizer)
        if self._bos is not None and ids[:1] == [self._bos]:
            before = before[1:]
        return [*before, *ids, *after]

    def _encode_short(
        self, texts: dict[int, str], *, is_chat: bool
    ) -> dict[int, IdArray | RowError]:
        """Encode the texts that may fit, and reject the rest unread."""
        results: dict[int, IdArray | RowError] = {}
        short: dict[int, str] = {}
        for row, text in texts.items():
            at_least = self._bound.min_tokens(text)
            if self._limits.fits(at_least):
                short[row] = text
            else:
                what = f"the prompt's {len(text)} characters are at least {at_least} tokens"
                results[row] = too_long(what, self._limits.max_model_len)
        for row, ids in zip(short, self._encode(list(short.values()), is_chat), strict=True):
            results[row] = ids if isinstance(ids, RowError) else self._limits.check(ids)
        return results

    def _encode(
        self, texts: list[str], is_chat: bool
    ) -> Sequence[npt.NDArray[np.int64] | RowError]:
        cut = head_length(texts) if self._can_be_cut else 0
        try:
            if cut:
                head = self._head_ids(texts[0][:cut], is_chat)
                tails = encode(
                    self._tokenizer, [text[cut:] for text in texts], add_special_tokens=False
                )
                return [np.concatenate([head, np.asarray(tail, np.int64)]) for tail in tails]
            return self._encode_whole(texts, is_chat)
        except Exception as error:
            # A text that the tokenizer refuses (a lone surrogate) must not take the rest along.
            if len(texts) == 1:
                return [RowError(self._refusal, f"the tokenizer refuses the text: {error}")]
            return [result for text in texts for result in self._encode([text], is_chat)]

    def _encode_head(self, head: str, is_chat: bool) -> npt.NDArray[np.int64]:
        return self._encode_whole([head], is_chat)[0]

    def _encode_whole(self, texts: list[str], is_chat: bool) -> list[npt.NDArray[np.int64]]:
        doubled = None if is_chat or self._bos is None else [self._bos, self._bos]
        return [
            np.asarray(ids[1:] if doubled is not None and ids[:2] == doubled else ids, np.int64)
            for ids in encode(self._tokenizer, texts, add_special_tokens=not is_chat)
        ]
