"""Texts that an output may not hold, as the token sequences that spell them.

The rule is vLLM's and transformers': a word is spelled as the tokenizer spells it alone and
behind a space, and where the output's last tokens are all of a spelling but its last token,
that one is ruled out. So a word is kept out in these spellings; a model that is kept from them
may find another (letter by letter, or as a part of a longer token). vLLM leaves the spelling
behind a space out where it has another number of tokens; here it counts.
"""

from collections.abc import Sequence
from functools import lru_cache

from batchgen.errors import RowError, RowErrorType
from batchgen.prompts.tokenizer import Tokenizer, encode
from batchgen.sampling import SamplingParams

Spellings = tuple[tuple[int, ...], ...]


class BadWords:
    """Spells ``sampling.bad_words`` for one tokenizer, and checks what else speaks of tokens.

    Args:
        tokenizer: a transformers tokenizer, or None where the model has none.
        vocab_size: ids of the model's logits.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._spellings = lru_cache(maxsize=1024)(self._spell)

    def problem(self, params: SamplingParams) -> RowError | None:
        """Return why the parameters make no sense for this model, or None where they do."""
        named = {
            "logit_bias": [token for token, _ in params.logit_bias],
            "stop_token_ids": params.stop_token_ids,
        }
        for name, tokens in named.items():
            outside = next((token for token in tokens if token >= self._vocab_size), None)
            if outside is not None:
                return _invalid(
                    f"{name} names token {outside}, outside the model's vocabulary of "
                    f"{self._vocab_size}"
                )
        most = max(params.logprobs or 0, params.prompt_logprobs or 0)
        if most > self._vocab_size:
            return _invalid(
                f"logprobs={most} is more than the model's vocabulary of {self._vocab_size}"
            )
        if params.bad_words and self._tokenizer is None:
            return _invalid(
                "bad_words needs text, but the model has no tokenizer; name one with "
                "model.tokenizer, or use logit_bias"
            )
        unspelled = [word for word in params.bad_words if not self._spellings(word)]
        if unspelled:
            return _invalid(f"bad_words: no tokens of the model spell {unspelled[0]!r}")
        return None

    def spellings(self, words: Sequence[str]) -> Spellings:
        """Return the token sequences that may not come to an end in an output."""
        return tuple(dict.fromkeys(ids for word in words for ids in self._spellings(word)))

    def _spell(self, word: str) -> Spellings:
        alone, behind_space = encode(
            self._tokenizer, [word.lstrip(), " " + word.lstrip()], add_special_tokens=False
        )
        if not alone:
            return ()
        # Where the space is a token of its own, what follows it is ruled out already.
        is_covered = behind_space[-len(alone) :] == alone
        return tuple(map(tuple, [alone] if is_covered else [alone, behind_space]))


def _invalid(message: str) -> RowError:
    return RowError(RowErrorType.INVALID_SAMPLING_PARAMS, message)
