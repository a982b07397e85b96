"""From generated token ids to text, and stop strings across token borders.

Rules. Only generated tokens count: a stop string in the prompt, or one that would begin
in it, is not seen. Stop strings are looked for in the text with special tokens spelled
out, so that one of them can be a stop string too. A character whose last bytes were
never generated becomes U+FFFD in the text; the ids keep what was generated.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# Tokens before the newest ones that are decoded along with them: enough for a character
# of four byte tokens and for what a decoder joins or strips at a border.
_CONTEXT_TOKENS = 6


class StopStringMatcher:
    """Watches one request's generated text for stop strings, token by token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(len(text) for text in stop)
        self._token_ids: list[int] = []
        # Tokens before this one have given their text, kept in `_tail`.
        self._settled = 0
        self._tail = ""

    def push(self, token_id: int) -> str | None:
        """Take the next token; return the stop string it completes, the earliest one.

        The text after the settled tokens is decoded with some context and appended to
        the kept tail; it settles once it does not end inside a character.
        """
        self._token_ids.append(token_id)
        text = self._tail + self._new_text()
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if not text.endswith("\ufffd"):
            self._settled = len(self._token_ids)
            self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return min(found)[1] if found else None

    def _new_text(self) -> str:
        context = self._token_ids[max(0, self._settled - _CONTEXT_TOKENS) : self._settled]
        before = decode(self._tokenizer, context, skip_special_tokens=False)
        both = decode(
            self._tokenizer, context + self._token_ids[self._settled :], skip_special_tokens=False
        )
        return both[len(before) :]


def decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special_tokens: bool
) -> str:
    """Decode ids exactly, without tidying spaces."""
    if not token_ids:
        return ""
    text = tokenizer.decode(
        list(token_ids),
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    assert isinstance(text, str)
    return text


def generated_text(
    tokenizer: PreTrainedTokenizerBase,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
) -> str:
    """Give the text that was generated after a prompt.

    Decoders strip or join spaces at the beginning of a sequence, so the output is decoded
    behind the prompt's last tokens and their text taken off; where that text changes (the
    prompt ended inside a character), the output is decoded alone.
    """
    context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
    before = decode(tokenizer, context, skip_special_tokens=skip_special_tokens)
    both = decode(
        tokenizer, context + list(output_token_ids), skip_special_tokens=skip_special_tokens
    )
    if both.startswith(before) and not before.endswith("\ufffd"):
        return both[len(before) :]
    return decode(tokenizer, output_token_ids, skip_special_tokens=skip_special_tokens)


def text_until_stop(
    tokenizer: PreTrainedTokenizerBase,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    stop: str,
    *,
    skip_special_tokens: bool,
    include_stop: bool,
) -> str:
    """Give the generated text up to the stop string that its last token completed."""

    def text(ids: Sequence[int]) -> str:
        return generated_text(
            tokenizer, prompt_token_ids, ids, skip_special_tokens=skip_special_tokens
        )

    whole, before = text(output_token_ids), text(output_token_ids[:-1]).rstrip("\ufffd")
    # Not before the last token: `min_tokens` lets earlier ones pass.
    at = whole.find(stop, max(0, len(before) - len(stop) + 1))
    if at < 0:
        # It holds a special token that the text leaves out; the rest of it is at the end.
        visible = stop
        for token in tokenizer.added_tokens_decoder.values():
            if token.special:
                visible = visible.replace(token.content, "")
        at = len(whole) - len(visible)
    return whole[:at] + stop if include_stop else whole[:at]
