"""The model's tokenizer: finding it, and rendering and encoding through it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from batchgen.errors import UsageError

Tokenizer: TypeAlias = Any
"""A transformers tokenizer (``PreTrainedTokenizerBase``); transformers is untyped here."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> Tokenizer | None:
    """Load a tokenizer from a directory, a hub name, or a ``.gguf`` file.

    Returns None for a directory that has no tokenizer at all, which is enough for rows
    of token ids.

    Raises:
        UsageError: the files are there but cannot be loaded, or the name is not found.
    """
    from transformers import AutoTokenizer

    where = Path(path)
    if where.is_dir() and not any((where / name).exists() for name in _TOKENIZER_FILES):
        return None
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    name = path
    if where.suffix == ".gguf":
        if not where.is_file():
            raise UsageError(f"model.tokenizer={path}: there is no such file")
        name, options["gguf_file"] = str(where.parent), where.name
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:
        # Every kind of exception comes out of here, from missing files to broken JSON.
        raise UsageError(f"model.tokenizer={path} cannot be loaded: {error}") from error


def has_chat_template(tokenizer: Tokenizer | None) -> bool:
    """Whether the tokenizer can render messages."""
    return tokenizer is not None and bool(tokenizer.chat_template)


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Tokenise texts in one call, each as a whole; special tokens' spellings count."""
    if not texts:
        return []
    batch = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids: list[list[int]] = batch["input_ids"]
    return ids


def added_edges(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Give the ids that the tokenizer puts before and behind a text by itself.

    Raises:
        ValueError: it does not put them around the text.
    """
    bare, whole = (encode(tokenizer, ["a"], add_special_tokens=added)[0] for added in (False, True))
    found = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
    if not found:
        raise ValueError("this tokenizer changes a text that it puts special tokens around")
    at = found[0]
    return whole[:at], whole[at + len(bare) :]


def added_bos(tokenizer: Tokenizer) -> int | None:
    """Return the id of the BOS that the tokenizer puts before a text by itself, if any."""
    bos = tokenizer.bos_token_id
    alone = encode(tokenizer, [""], add_special_tokens=True)[0]
    return bos if bos is not None and alone[:1] == [bos] else None
