"""The model's tokenizer: finding it, and rendering and encoding through it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, TypeAlias

from batchgen.errors import UsageError

Tokenizer: TypeAlias = Any
"""A transformers tokenizer (``PreTrainedTokenizerBase``); transformers is untyped here."""

_CONFIG, _WHOLE = "tokenizer_config.json", "tokenizer.json"
_VOCABULARIES = (_WHOLE, "tokenizer.*.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")


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
    if where.is_dir() and not _has_any(where, (_CONFIG, *_VOCABULARIES)):
        return None
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    name = path
    if where.suffix == ".gguf":
        if not where.is_file():
            raise UsageError(f"model.tokenizer={path}: there is no such file")
        name, options["gguf_file"] = str(where.parent), where.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:
        # Every kind of exception comes out of here, from missing files to broken JSON.
        said = repr(error) if isinstance(error, KeyError) else error
        reason = _what_is_missing(where) or said
        raise UsageError(f"model.tokenizer={path} cannot be loaded: {reason}") from error
    # Some families make one of special tokens and the word mark where they miss their file.
    if len(tokenizer) <= len(getattr(tokenizer, "added_tokens_decoder", ())) + 1:
        reason = _what_is_missing(where) or "it has no vocabulary"
        raise UsageError(f"model.tokenizer={path} cannot be used: {reason}")
    return tokenizer


def _has_any(folder: Path, patterns: Sequence[str]) -> bool:
    return any(any(folder.glob(pattern)) for pattern in patterns)


def _what_is_missing(folder: Path) -> str | None:
    """Return which file or package a tokenizer lacks, in truer words than its loading error's."""
    if not folder.is_dir() or (folder / _WHOLE).exists():
        return None
    if not _has_any(folder, _VOCABULARIES):
        return f"there is {_CONFIG}, but no vocabulary ({_WHOLE}, tokenizer.model or the like)"
    if (folder / "vocab.json").exists() and not (folder / "merges.txt").exists():
        return "there is vocab.json, but neither merges.txt nor tokenizer.json"
    for file in sorted(folder.glob("*.model")):
        # A SentencePiece model is a protobuf message, a tiktoken vocabulary is lines of text.
        is_sentencepiece = file.read_bytes()[:1] == b"\n"
        needed = ("sentencepiece", "protobuf") if is_sentencepiece else ("tiktoken",)
        lacking = [package for package in needed if not _is_installed(package)]
        if lacking:
            kind = "SentencePiece model" if is_sentencepiece else "tiktoken vocabulary"
            return f"{file.name} is a {kind}, which needs: pip install {' '.join(lacking)}"
    return None


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def has_chat_template(tokenizer: Tokenizer | None) -> bool:
    """Whether the tokenizer can render messages."""
    return tokenizer is not None and bool(tokenizer.chat_template)


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise ValueError where the tokenizer's Rust code panics.

    A panic is no ``Exception``: nothing but this would tell it from the end of the process.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer's library panicked: {error}") from error


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Tokenise texts in one call, each as a whole; special tokens' spellings count."""
    if not texts:
        return []
    with panics_as_errors():
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
    """Return the ids that the tokenizer puts before and behind a text by itself.

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
