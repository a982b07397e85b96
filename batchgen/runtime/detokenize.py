"""From generated token ids to text, and stop strings across token borders.

The text of an output is what the tokenizer's decoder makes of it after the prompt: decoders
strip or join spaces at the beginning of a sequence, so the prompt's last tokens are decoded with
it and their text is taken off. No spaces are tidied. Output and prompt share no character: what
completes the prompt's last one is U+FFFD, as is a character whose last bytes never came.

Only generated tokens count for stop strings. They are looked for in that text, and in the same
text with special tokens spelled out, so that one of them can be a stop string too.
"""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

# Tokens before the newest ones that are decoded along with them: enough for a character of four
# byte tokens and for what a decoder joins or strips at a border.
_CONTEXT_TOKENS = 6
# Tokens after which the text before them is decoded no more. Decoding a few tokens takes little
# longer than decoding one, and each move decodes twice.
_MOST_UNSETTLED = 16
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """A tokenizer's decoder, and what has to be known of its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        vocabulary = tokenizer.get_vocab()
        spellings = (f"<0x{byte:02X}>" for byte in range(256))
        self._bytes = frozenset(vocabulary[each] for each in spellings if each in vocabulary)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode ids exactly, without tidying spaces."""
        return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def visible(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> list[int]:
        """List the ids that have a place in the text."""
        if not skip_special_tokens:
            return list(token_ids)
        return [token for token in token_ids if token not in self._special]

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no place in a text without special tokens."""
        return token_id in self._special

    @property
    def has_bytes(self) -> bool:
        """Whether no other token than these single bytes holds a part of a character."""
        return bool(self._bytes)

    def is_byte(self, token_id: int) -> bool:
        """Whether a token is one of SentencePiece's single bytes.

        A run of them is decoded as a whole: one byte too many turns it all into U+FFFD.
        """
        return token_id in self._bytes

    def tail(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
        """Take the last ids that have a place in the text, as many as a context needs."""
        found: list[int] = []
        for token in reversed(token_ids):
            if skip_special_tokens and token in self._special:
                continue
            found.append(token)
            if len(found) >= _CONTEXT_TOKENS and not self.is_byte(token):
                break
        return found[::-1]

    def text(
        self,
        prompt_token_ids: Sequence[int],
        output_token_ids: Iterable[int],
        *,
        skip_special_tokens: bool,
    ) -> str:
        """Return the text that was generated after a prompt."""
        decoder = OutputDecoder(self, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        decoder.extend(output_token_ids)
        return decoder.text


class OutputDecoder:
    """Decodes one output, at once or token by token.

    Attributes:
        text: of the tokens that are not settled; a later token may change it.
    """

    def __init__(
        self, tokens: Detokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokens = tokens
        self._skips = skip_special_tokens
        self._context = tokens.tail(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._context_text = ""
        self._token_ids: list[int] = []
        self._has_begun = False
        self.text = ""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Take the next tokens of the output."""
        visible = self._tokens.visible(token_ids, skip_special_tokens=self._skips)
        if not visible:
            return
        if not self._has_begun:
            self._has_begun = True
            self._part_from_prompt(visible[0])
        self._token_ids += visible
        self.text = self._decode(self._context + self._token_ids)[len(self._context_text) :]

    def settle(self) -> str:
        """Hand over the text so far where no later token can change it; else nothing."""
        if len(self._token_ids) < _MOST_UNSETTLED or self.text.endswith(_INCOMPLETE):
            return ""
        if self._tokens.is_byte(self._token_ids[-1]):
            return ""
        settled, self.text = self.text, ""
        context = self._context + self._token_ids
        self._set_context(self._tokens.tail(context, skip_special_tokens=self._skips))
        self._token_ids = []
        return settled

    def _part_from_prompt(self, first: int) -> None:
        """Keep the output's first token from joining a character of the prompt."""
        context, tokens = self._context, self._tokens
        if tokens.is_byte(first):
            while context and tokens.is_byte(context[-1]):
                context.pop()
        elif not tokens.has_bytes:
            while self._decode(context).endswith(_INCOMPLETE):
                context.pop()
        self._set_context(context)

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_text = self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokens.decode(token_ids, skip_special_tokens=self._skips)


class StopStringMatcher:
    """Watches one request's generated text for stop strings, token by token.

    Args:
        tokens: the tokenizer's.
        prompt_token_ids: the whole prompt.
        stop: not empty.
        skip_special_tokens: whether the output's text leaves special tokens out.

    Attributes:
        place: where in the output's text the stop string begins that was found last.
    """

    def __init__(
        self,
        tokens: Detokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._tokens = tokens
        self._stop = stop
        self._text = _SearchedText(
            OutputDecoder(tokens, prompt_token_ids, skip_special_tokens=skip_special_tokens), stop
        )
        self._spells_special = not skip_special_tokens
        # Only from the first special token on: before, nothing is spelled out.
        self._spelled: _SearchedText | None = None
        self._decoder = OutputDecoder(tokens, prompt_token_ids, skip_special_tokens=False)
        self._without_special: list[int] = []
        # Where special tokens begin and end in the spelled text, and their place in the text.
        self._special: list[tuple[int, int, int]] = []
        self.place = 0

    def push(self, token_id: int) -> str | None:
        """Take the next token; return the stop string it completes, the earliest one."""
        found = self._text.push(token_id)
        if not self._spells_special:
            found += self._push_spelled(token_id)
        if not found:
            return None
        self.place, stop = min(found)
        return stop

    def _push_spelled(self, token_id: int) -> list[tuple[int, str]]:
        """List the stop strings with a part of a special token, by their places in the text."""
        is_special = self._tokens.is_special(token_id)
        if self._spelled is None:
            if not is_special:
                self._without_special.append(token_id)
                return []
            self._spelled = _SearchedText(self._decoder, self._stop)
            for earlier in self._without_special:
                self._spelled.push(earlier)
        start = self._spelled.length
        found = self._spelled.push(token_id)
        if is_special:
            self._special.append((start, self._spelled.length, self._text.length))
        return [
            (max(0, place - max(0, begin - at)), stop)
            for at, stop in found
            for begin, place in self._first_special(at, at + len(stop))
        ]

    def _first_special(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the first special token between two places: where it begins, its place."""
        return [(b, place) for b, e, place in self._special if b < end and start < e][:1]


class _SearchedText:
    """An output's text, and where stop strings begin in it.

    Attributes:
        length: its characters so far.
    """

    def __init__(self, decoder: OutputDecoder, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._num_kept = max(map(len, stop)) - 1
        # The end of the settled text, and how many characters stand before it.
        self._tail = ""
        self._num_before_tail = 0
        # The text when it last did not end inside a character.
        self._seen = ""
        self.length = 0

    def push(self, token_id: int) -> list[tuple[int, str]]:
        """Take the next token; list the stop strings that it completes, with their places."""
        self._decoder.extend([token_id])
        text = self._tail + self._decoder.text
        self.length = self._num_before_tail + len(text)
        num_seen = _common_length(self._seen, text)
        found = []
        for stop in self._stop:
            at = text.find(stop, max(0, num_seen - len(stop) + 1))
            if at >= 0:
                found.append((self._num_before_tail + at, stop))
        if not text.endswith(_INCOMPLETE):
            self._seen = text
        if self._decoder.settle():
            self._tail = text[len(text) - min(len(text), self._num_kept) :]
            self._num_before_tail += len(text) - len(self._tail)
            self._seen = self._tail
        return found


def _common_length(one: str, other: str) -> int:
    """Count the characters with which two texts begin alike."""
    if other.startswith(one):
        return len(one)
    return next(at for at, (a, b) in enumerate(zip(one, other + "\0", strict=False)) if a != b)


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
