"""Where texts with a common head may be cut, so that the head is tokenised only once.

Tokenising the two sides of a cut alone must give the ids of the whole, whatever follows. That
is shown here and not tried: a letter or digit of ASCII and then a blank or a line feed stand in
no token together where the tokenizer splits words by one of the patterns below. No alternative
of theirs matches both characters, none looks behind itself, and none that ends before the cut
looks beyond it, as every run it examines ends at the letter. So each pattern splits at the cut,
and splits each side as it would alone. Byte pairs are merged within a word only.
"""

import re
from collections.abc import Sequence
from typing import Any

from batchgen.prompts.limits import component_description
from batchgen.prompts.tokenizer import Tokenizer, encode

# A cut saves little in shorter heads.
MIN_HEAD_CHARS = 64

_CUT = re.compile(r"[A-Za-z0-9][ \n]")
_SEARCHED_CHARS = 4096
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = frozenset((_GPT2, _LLAMA3, _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")))


def can_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether :func:`head_length` finds cuts that change no id of this tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.model.__class__.__name__ != "BPE" or backend.model.dropout:
        return False
    # A class of the model's own may do anything with a text before the backend sees it.
    if not type(tokenizer).__module__.startswith("transformers."):
        return False
    normalizer = component_description(backend.normalizer)
    # NFC leaves such pairs alone: nothing composes with a blank or a line feed behind it.
    return (
        (normalizer is None or normalizer["type"] == "NFC")
        and _adds_nothing_behind(tokenizer)
        and _splits_at_cuts(component_description(backend.pre_tokenizer))
        and all(_leaves_cuts(token) for token in tokenizer.added_tokens_decoder.values())
    )


def head_length(texts: Sequence[str]) -> int:
    """Return how many leading characters the texts share up to a cut; 0 where too few."""
    if len(texts) < 2:
        return 0
    head = _common_head(min(texts), max(texts))
    if len(head) < MIN_HEAD_CHARS:
        return 0
    # A cut is usually near; a head without any for so long is not worth the search.
    start = max(0, len(head) - _SEARCHED_CHARS)
    cuts = [match.start() + 1 for match in _CUT.finditer(head, start)]
    return cuts[-1] if cuts and cuts[-1] >= MIN_HEAD_CHARS else 0


def _common_head(first: str, last: str) -> str:
    both = zip(first, last, strict=False)
    return first[: next((at for at, (a, b) in enumerate(both) if a != b), len(first))]


def _splits_at_cuts(part: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer splits at every cut, and each side as it would alone."""
    if part is None:
        return False
    match part["type"]:
        case "ByteLevel":
            return bool(part["use_regex"]) and not part["add_prefix_space"]
        case "Split":
            known = part["pattern"].get("Regex") in _PATTERNS
            return known and part["behavior"] == "Isolated" and not part["invert"]
        case "Sequence":
            # Digits are split off by looking at single characters, so that a cut is one to
            # them or changes nothing. What comes behind the split sees each word alone.
            parts = part["pretokenizers"]
            splitting = [each for each in parts if each["type"] != "Digits"]
            return (
                all(each["type"] in ("Digits", "ByteLevel", "Split") for each in parts)
                and not any(each.get("add_prefix_space") for each in parts)
                and any(map(_splits_at_cuts, splitting[:1]))
            )
    return False


def _adds_nothing_behind(tokenizer: Tokenizer) -> bool:
    bare, whole = (encode(tokenizer, ["a"], add_special_tokens=adds)[0] for adds in (False, True))
    return whole[-len(bare) :] == bare


def _leaves_cuts(token: Any) -> bool:
    """Whether an added token is found alike in the whole text and beside a cut."""
    looks_around = token.lstrip or token.rstrip or token.single_word
    return not looks_around and not re.search(r"[A-Za-z0-9]\s", token.content)
