"""The table of declared keys, read off the dataclasses of ``batchgen.config``."""

import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from batchgen.config import Config
from batchgen.text import refuse_lone_surrogates

_WORDS: Mapping[Any, str] = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list[str]: "a list of text, as in [a,b]",
    list[int]: "a list of integers, as in [1,2]",
    dict[str, Any]: "values by name, as in {enable_thinking: false}",
    dict[int, float]: "numbers for integers, as in {50:-100,198:2}",
    list[float]: "a list of numbers, as in [0.2,0.8]",
}

_MOST_BITS = 64


@dataclass(frozen=True, slots=True)
class Key:
    """One declared key.

    Attributes:
        name: the full name, as in ``pool.block_size``.
        kind: its type without the None: a scalar type, an enum, or ``list[...]``.
        optional: whether it may be null.
        default: the value where nothing is named.
        meaning: its line in the help text.
        word: the one word that may stand for a list, if any.
    """

    name: str
    kind: Any
    optional: bool
    default: Any
    meaning: str
    word: str | None = None

    @property
    def is_mandatory(self) -> bool:
        """Whether the key has no default."""
        return bool(self.default == MISSING)

    @property
    def is_text(self) -> bool:
        """Whether values, or the items of a list, are text."""
        return self.kind in (str, list[str])

    @property
    def is_list(self) -> bool:
        """Whether the key holds a list."""
        return typing.get_origin(self.kind) is list

    @property
    def is_mapping(self) -> bool:
        """Whether the key holds a mapping."""
        return typing.get_origin(self.kind) is dict

    @property
    def has_free_names(self) -> bool:
        """Whether the key holds a mapping whose names are the user's."""
        return bool(self.kind == dict[str, Any])

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of an enum; empty for other kinds."""
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return tuple(str(member.value) for member in self.kind)
        return ()

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        words = f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.kind]
        words = f"{words}, or {self.word}" if self.word else words
        return f"{words}, or null" if self.optional else words


@functools.cache
def declared_keys() -> Mapping[str, Key]:
    """Give all keys by their full names, in the order of their declaration."""
    return {key.name: key for key in _keys_of(Config, "")}


def key_of(name: str) -> Key | None:
    """Give the key that a full name sets, as a whole or, as in ``a.kwargs.name``, in part."""
    keys = declared_keys()
    owners = (key for key in keys.values() if key.has_free_names)
    return keys.get(name) or next((key for key in owners if name.startswith(f"{key.name}.")), None)


def sections() -> tuple[str, ...]:
    """The groups of keys: model, input, prompt, prompt.normalize, and so on."""
    paths = (name.split(".")[:-1] for name in declared_keys())
    return tuple(
        dict.fromkeys(".".join(path[:end]) for path in paths for end in range(1, len(path) + 1))
    )


def misfit(key: Key, value: Any) -> str | None:
    """Say why a value does not fit a key, where OmegaConf would take it or fail on it."""
    if isinstance(value, list) and key.is_list:
        parts, kinds = value, typing.get_args(key.kind)
    elif isinstance(value, Mapping) and key.has_free_names:
        parts, kinds = list(_leaves(value)), (str, int, float, bool, types.NoneType)
    elif isinstance(value, Mapping) and key.is_mapping:
        parts, kinds = [*value, *value.values()], (float,)
    else:
        structures = () if key.is_mapping else (list, dict)
        parts, kinds = [value], (str, int, float, bool, types.NoneType, *structures)
    allowed = (*kinds, int) if float in kinds else kinds
    wrong = [each for each in parts if not isinstance(each, allowed)]
    if wrong or (bool not in allowed and any(isinstance(each, bool) for each in parts)):
        return f"{key.name} must be {key.expected}."
    if any(isinstance(each, int) and each.bit_length() > _MOST_BITS for each in parts):
        return f"{key.name} holds a number that has more than {_MOST_BITS} bits."
    if (key.is_text or key.has_free_names) and not _names_path(key.name):
        try:
            refuse_lone_surrogates(value, key.name)
        except ValueError as error:
            return f"{error}."
    return None


def _leaves(value: Any) -> Iterator[Any]:
    """Give what lists and mappings hold at any depth; a name that is no text as a mapping."""
    if isinstance(value, Mapping):
        yield from (name if isinstance(name, str) else {} for name in value)
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _names_path(name: str) -> bool:
    # Such a name may hold bytes that are no text, which Python gives as surrogates.
    return name.startswith(("input.", "model.", "output.")) or name.endswith("_file")


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Name the options that a misspelt name may have meant; empty where none is close."""
    candidates = list(options)
    leaf = name.rsplit(".", 1)[-1]
    by_leaf = {option: option.rsplit(".", 1)[-1] for option in candidates}
    close_leaves = difflib.get_close_matches(leaf, by_leaf.values(), n=3, cutoff=0.8)
    close = [option for option in candidates if by_leaf[option] in close_leaves]
    close.sort(key=lambda option: -difflib.SequenceMatcher(None, name, option).ratio())
    close += difflib.get_close_matches(name, candidates, n=3, cutoff=0.75)
    found = list(dict.fromkeys(close))[:3]
    return f" Did you mean {' or '.join(found)}?" if found else ""


def unknown_key(name: str, where: str = "") -> str:
    """Word the refusal of a key that is not declared.

    Args:
        name: the full name of the key.
        where: the file it stands in, empty for the command line.
    """
    if name in sections():
        inside = ", ".join(key for key in declared_keys() if key.startswith(f"{name}."))
        return f"{where}{name} is a group of keys, not a key. Its keys: {inside}."
    suggestion = did_you_mean(name, declared_keys()) or " All keys: python -m batchgen --help"
    return f"{where}{name} is not a key.{suggestion}"


def _keys_of(section: type, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(section)
    for declared in fields(section):
        hint = hints[declared.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _keys_of(hint, f"{prefix}{declared.name}.")
            continue
        kind, optional = _without_none(hint)
        factory = declared.default_factory
        default = declared.default if factory is NO_DEFAULT else factory()
        meaning = declared.metadata["help"]
        word = declared.metadata.get("word")
        yield Key(f"{prefix}{declared.name}", kind, optional, default, meaning, word)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if not isinstance(hint, types.UnionType):
        return hint, False
    (kind,) = (option for option in typing.get_args(hint) if option is not type(None))
    return kind, True
