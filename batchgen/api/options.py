"""The keys of the command's groups ``model``, ``pool`` and ``engine`` as options of ``Engine``."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen.checks import engine_complaints
from batchgen.config import Config, EngineConfig, ModelConfig, PoolConfig
from batchgen.errors import UsageError
from batchgen.keys import declared_keys

_SECTIONS = {"model": ModelConfig, "pool": PoolConfig, "engine": EngineConfig}


def make_config(model: str, options: Mapping[str, Any]) -> Config:
    """Put the options into their groups.

    Raises:
        UsageError: one is no key of them, or its value makes no sense.
    """
    keys = {
        name.partition(".")[2]: name
        for name in declared_keys()
        if name.partition(".")[0] in _SECTIONS and name != "model.path"
    }
    grouped: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for option, value in options.items():
        if option not in keys:
            close = difflib.get_close_matches(option, keys, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(keys)}"
            raise UsageError(f"Engine has no option {option}; {hint}")
        grouped[keys[option].partition(".")[0]][option] = _checked(option, keys[option], value)
    sections = {name: make(**grouped[name]) for name, make in _SECTIONS.items() if name != "model"}
    config = replace(Config(), model=ModelConfig(path=model, **grouped["model"]), **sections)
    complaints = list(engine_complaints(config))
    if complaints:
        raise UsageError(*complaints)
    return config


def _checked(option: str, name: str, value: Any) -> Any:
    """Bring a value to its key's type, without guessing."""
    key = declared_keys()[name]
    if value is None and key.optional:
        return None
    try:
        if key.choices:
            return key.kind(value)
    except ValueError:
        pass
    else:
        is_number = key.kind is float and isinstance(value, int)
        is_kind = isinstance(value, key.kind) or is_number
        if is_kind and isinstance(value, bool) == (key.kind is bool):
            return value
    raise UsageError(f"Engine option {option}={value!r} must be {key.expected}")
