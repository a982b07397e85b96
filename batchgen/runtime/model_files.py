"""A model's directory, looked at before anything is loaded from it.

Which of its files count, and whether they are what their names say: a file that was never
fetched, was cut or holds impossible numbers is named here, before transformers or a data set's
planning trips over it.
"""

import json
import os
import shlex
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from batchgen.errors import UsageError

_T = TypeVar("_T")

# What transformers reads beside the weights; other files change nothing.
_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken")
_MAY_BE_EMPTY = {".py", ".txt"}
_CONFIG = "config.json"
# Files that have to be JSON objects.
_OBJECTS = (
    _CONFIG,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_SAFETENSORS, _PICKLE, _INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
ADAPTER = "adapter_config.json"
_HEAD_BYTES = 64
_SHOWN_CHARACTERS = 40
_AGAIN = "download it again"
# Sizes of a model that are 1 or more wherever they are given, by their names in all families.
_SIZES = frozenset({
    "d_model", "ffn_dim", "head_dim", "hidden_size", "intermediate_size",
    "max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions",
    "num_attention_heads", "num_heads", "num_hidden_layers", "num_key_value_heads",
    "num_layers", "vocab_size",
})  # fmt: skip
_LAYERS = frozenset({"n_layer", "num_hidden_layers", "num_layers"})
_TOKEN_ID = "_token_id"
_WITH_NUMBERS = (_CONFIG, "generation_config.json")
_MOST_LAYERS = 10_000
_MOST = (1 << 31) - 1


class _FileProblemError(Exception):
    """What is wrong with a file, to follow its name."""


def check_model(path: str, *, allow_pickle: bool) -> None:
    """Look through a model's directory, or at its ``.gguf`` file; a hub name passes.

    Raises:
        UsageError: there is an adapter, or a file is not what it should be; it is named.
    """
    where = Path(path)
    is_gguf = where.suffix == ".gguf"
    folder = where.parent if is_gguf else where
    if not folder.is_dir():
        return
    if os.path.lexists(folder / ADAPTER):
        raise UsageError(f"model.path={path}: {no_adapters(str(folder))}")
    if is_gguf:
        _check("model.path", where, _check_weights)
        return
    check_files("model.path", folder)
    for weights in weight_files(folder, allow_pickle=allow_pickle):
        _check("model.path", weights, _check_weights)


def check_files(key: str, folder: Path) -> None:
    """Look at all files of a model's or a tokenizer's directory but its weights.

    Args:
        key: the key that names the directory, for the message.
        folder: the directory.

    Raises:
        UsageError: one is not what it should be.
    """
    for file in text_files(folder):
        _check(key, file, _check_text)
    for name in _OBJECTS:
        if (folder / name).exists():
            _check(key, folder / name, _read_object)
    for name in _WITH_NUMBERS:
        if (folder / name).exists():
            _check(key, folder / name, _check_numbers)


def no_adapters(path: str) -> str:
    """Say that adapters are not supported, with the line that merges one."""
    code = (
        "from peft import AutoPeftModelForCausalLM as Adapted; "
        f"Adapted.from_pretrained({path!r}, torch_dtype='auto').merge_and_unload()"
        ".save_pretrained('merged')"
    )
    return (
        f"it has {ADAPTER}, and adapters are not supported. Merge it into its base model with "
        f"peft, put the tokenizer's files beside it, and give model.path=merged: "
        f"python -c {shlex.quote(code)}"
    )


def text_files(folder: Path) -> list[Path]:
    """Return a directory's files that can count, but for the weights, in order of their names."""
    return sorted({file for pattern in _TEXT_FILES for file in folder.glob(pattern)})


def weight_files(folder: Path, *, allow_pickle: bool) -> list[Path]:
    """Return the files from which transformers takes a directory's weights.

    Raises:
        UsageError: there is an index, or a configuration, that cannot be read.
    """
    for name in (*_named_weights(folder), _SAFETENSORS, *([_PICKLE] if allow_pickle else [])):
        # A link without a target is the file that was meant.
        if os.path.lexists(folder / name):
            is_index = name.endswith(_INDEX)
            return _check("model.path", folder / name, _shards) if is_index else [folder / name]
        index = folder / f"{name}{_INDEX}"
        if os.path.lexists(index):
            return _check("model.path", index, _shards)
    return []


def _named_weights(folder: Path) -> list[str]:
    """Return the file that the configuration names, if it does."""
    if not (folder / _CONFIG).exists():
        return []
    named = _check("model.path", folder / _CONFIG, _read_object).get("transformers_weights")
    return [named] if isinstance(named, str) else []


def _shards(index: Path) -> list[Path]:
    """Return the files that an index names."""
    weight_map = _read_object(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise _FileProblemError(f"has no weight_map with the file of each tensor; {_AGAIN}")
    return [index.parent / name for name in sorted(set(names))]


def _check(key: str, file: Path, look: Callable[[Path], _T]) -> _T:
    """Look at a file; whatever is wrong is said with its name.

    Raises:
        UsageError: it is no regular file, cannot be read, or has a problem.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise _FileProblemError(f"is no regular file; move it away, or {_AGAIN}")
        return look(file)
    except FileNotFoundError as error:
        is_link = file.is_symlink()
        problem = f"is a link to {file.readlink()}, which is not there" if is_link else "is missing"
        raise UsageError(f"{key}: {file} {problem}; {_AGAIN}") from error
    except OSError as error:
        raise UsageError(f"{key}: {file} cannot be read: {error}") from error
    except _FileProblemError as error:
        raise UsageError(f"{key}: {file} {error}") from error


def _check_text(file: Path) -> None:
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES).lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        raise _FileProblemError(
            "looks like a Git LFS pointer; fetch the file itself with: git lfs pull"
        )
    if head.startswith((b"<!doctype", b"<html")):
        raise _FileProblemError(f"looks like a web page; {_AGAIN}")
    if not head and file.suffix not in _MAY_BE_EMPTY:
        raise _FileProblemError(f"is empty; {_AGAIN}")


def _check_weights(file: Path) -> None:
    _check_text(file)
    if file.suffix == ".safetensors":
        try:
            # Reads the header and holds it against the file's size.
            with safe_open(file, framework="pt"):
                return
        except SafetensorError as error:
            raise _FileProblemError(f"is damaged or cut ({error}); {_AGAIN}") from error
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    if file.suffix == ".gguf" and not head.startswith(b"GGUF"):
        raise _FileProblemError(f"is no GGUF file; {_AGAIN}")
    # The directory of a zip archive is its end.
    if head.startswith(b"PK") and not zipfile.is_zipfile(file):
        raise _FileProblemError(f"is cut; {_AGAIN}")


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _FileProblemError(f"is no JSON ({error}); {_AGAIN}") from error
    if not isinstance(content, dict):
        raise _FileProblemError(f"holds no JSON object; {_AGAIN}")
    return content


def _check_numbers(file: Path) -> None:
    """Refuse sizes that no model has; some would keep transformers busy without an end."""
    for name, number in _numbers(_read_object(file), ""):
        key = name.rpartition(".")[2]
        # A token id of -1 stands for none in some families.
        least = 1 if key in _SIZES else -1
        most = _MOST_LAYERS if key in _LAYERS else _MOST
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if not (is_whole and least <= number <= most):
            raise _FileProblemError(
                f"has {name}={_shown(number)}, which must be a whole number from {least} to "
                f"{most:,}"
            )


def _numbers(config: dict[str, Any], within: str) -> Iterator[tuple[str, Any]]:
    """Yield the sizes and token ids that a configuration gives, by their dotted names."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{within}{name}.")
        elif name in _SIZES or name.endswith(_TOKEN_ID):
            for number in value if isinstance(value, list) else [value]:
                if number is not None:
                    yield f"{within}{name}", number


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
