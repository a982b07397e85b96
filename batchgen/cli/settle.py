"""From composed values to the configuration a job runs with."""

import math
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from batchgen.cli.checks import check
from batchgen.cli.paths import absolute, looks_like_directory, resolve_output, resolve_paths
from batchgen.config import Config, Mode, PromptFormat
from batchgen.errors import UsageError
from batchgen.keys import declared_keys, misfit
from batchgen.text import refuse_lone_surrogates

_Section = TypeVar("_Section")
_JINJA = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_WRITTEN_ESCAPE = re.compile(r"\\[nt]")
_TEXT_OF_PROMPTS = (
    "prompt.template",
    "prompt.system",
    "prompt.separator",
    "prompt.answer_prefix",
    "sampling.stop",
    "sampling.bad_words",
    "sampling.score_choices",
    "structured.choice",
)


@dataclass(frozen=True, slots=True)
class Settled:
    """One job, ready to run.

    Attributes:
        config: checked, with absolute paths.
        resolved_yaml: the same as YAML text.
        changes: ``key=value`` for each key that differs from its default.
        warnings: what looks like a slip but is legal.
    """

    config: Config
    resolved_yaml: str
    changes: tuple[str, ...]
    warnings: tuple[str, ...]


def settle(values: Mapping[str, Any]) -> Settled:
    """Check the composed values of one job.

    Args:
        values: nested values of all declared keys, as ``compose`` gives them.

    Raises:
        UsageError: a mandatory value is missing, or a value makes no sense.
    """
    named = dict(_flatten(values, ""))
    problems = [misfit(key, named[name]) for name, key in declared_keys().items()]
    if any(problems):
        raise UsageError(*filter(None, problems))
    config = _build(Config, values)
    if config.mode is Mode.status and _names_no_job(config):
        config = resolve_output(_with_mandatory(config))
    elif config.mode is not Mode.jobs:
        given = _with_mandatory(config)
        config = _with_lists(resolve_paths(given))
        check(config, given.input.path)
    plain = _plain(config)
    flat = dict(_flatten(plain, ""))
    defaults = {name: _plain(key.default) for name, key in declared_keys().items()}
    changes = (f"{name}={_short(value)}" for name, value in flat.items() if value != defaults[name])
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)
    warnings = (*_written_escapes(flat), *_unprefixed_choices(config), *_hub_names(config))
    return Settled(config, text, tuple(changes), warnings)


def default_text(name: str) -> str:
    """Show a key's default as ``Settled.changes`` shows values."""
    return _short(_plain(declared_keys()[name].default))


def _build(section: type[_Section], values: Mapping[str, Any]) -> _Section:
    assert is_dataclass(section)
    hints = typing.get_type_hints(section)
    return section(
        **{
            item.name: _build(hints[item.name], values[item.name])
            if is_dataclass(hints[item.name])
            else values[item.name]
            for item in fields(section)
        }
    )


def _names_no_job(config: Config) -> bool:
    """Whether neither a model nor an input is named, so that there is nothing to run."""
    absent = declared_keys()["model.path"].default
    return {config.model.path, config.input.path} == {absent}


def _with_mandatory(config: Config) -> Config:
    """Name all mandatory values that are missing.

    A preview writes nothing, and a status runs nothing.
    """
    if config.mode is Mode.preview and config.output.dir == declared_keys()["output.dir"].default:
        config = replace(config, output=replace(config.output, dir=""))
    given = {
        "model.path": config.model.path,
        "input.path": config.input.path,
        "output.dir": config.output.dir,
    }
    if config.mode is Mode.preview:
        del given["output.dir"]
    if config.mode is Mode.status and _names_no_job(config):
        del given["model.path"], given["input.path"]
    missing = [name for name, value in given.items() if value.strip() in ("", "???")]
    if missing:
        listed = (f"  {name}: {declared_keys()[name].meaning}" for name in missing)
        raise UsageError("Nothing can start without a value for", *listed)
    return config


def _with_lists(config: Config) -> Config:
    """Put the lists of text that stand in files beside those that are named."""
    sampling, structured = config.sampling, config.structured
    stops = [*sampling.stop, *_texts("sampling.stop_file", sampling.stop_file)]
    scored = _texts("sampling.score_choices_file", sampling.score_choices_file)
    choices = _texts("structured.choice_file", structured.choice_file)
    _refuse_both("sampling.score_choices", sampling.score_choices, scored)
    _refuse_both("structured.choice", structured.choice, choices)
    sampling = replace(
        sampling, stop=list(dict.fromkeys(stops)), score_choices=sampling.score_choices or scored
    )
    choice = structured.choice if structured.choice_file is None else choices
    return replace(config, sampling=sampling, structured=replace(structured, choice=choice))


def _refuse_both(key: str, named: list[str] | None, in_file: list[str]) -> None:
    if named and in_file:
        raise UsageError(f"{key} and {key}_file are both named. Set one of them to null or [].")


def _texts(key: str, name: str | None) -> list[str]:
    """Read a YAML (or JSON, which is YAML) list of strings; an absent file holds none."""
    if name is None:
        return []
    try:
        texts = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        refuse_lone_surrogates(texts, "it")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(*f"{key}={name} cannot be read: {error}.".split("\n")) from error
    except RecursionError as error:
        raise UsageError(f"{key}={name} is nested too deeply.") from error
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(
            f"{key}={name} must hold a YAML or JSON list of strings. "
            'Put each into double quotes, as in ["</s>", "\\n\\n"].'
        )
    return texts


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Enum):
        return str(value.value)
    return list(value) if isinstance(value, list) else value


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in declared_keys():
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _written_escapes(flat: Mapping[str, Any]) -> Iterator[str]:
    r"""A ``\n`` of two characters is legal, but such a stop never matches."""
    for name in _TEXT_OF_PROMPTS:
        texts = flat[name] if isinstance(flat[name], list) else [flat[name] or ""]
        for text in texts:
            found = _WRITTEN_ESCAPE.search(_JINJA.sub("", text))
            if found:
                yield (
                    f"{name}: {found[0]} in {text!r} is a backslash and a letter. For a line "
                    "break or a tab put the value into double quotes: "
                    f"'{name}=\"...{found[0]}...\"'."
                )


def _hub_names(config: Config) -> Iterator[str]:
    """A directory that is not there is taken as a hub name, which takes long to fail."""
    for key, name in (
        ("model.path", config.model.path),
        ("model.tokenizer", config.model.tokenizer or ""),
    ):
        if looks_like_directory(name):
            yield (
                f"{key}={name}: there is no directory {absolute(name)}, so this is taken as a "
                "name on the Hugging Face hub."
            )


def _unprefixed_choices(config: Config) -> Iterator[str]:
    """Choices without the space that the shots' answers have are legal, but ill guessed."""
    prompt = config.prompt
    if prompt.format is not PromptFormat.plain or not prompt.shots_file:
        return
    for key, choices in (
        ("structured.choice", config.structured.choice or []),
        ("sampling.score_choices", config.sampling.score_choices),
    ):
        # An empty choice is refused later, and no space in front would mend it.
        given = filter(None, choices)
        bare = next((each for each in given if not each.startswith(prompt.answer_prefix)), None)
        if bare is not None:
            example = f"{prompt.answer_prefix}{bare}"
            yield (
                f"{key}: the answers of prompt.shots_file stand behind {prompt.answer_prefix!r} "
                f"(prompt.answer_prefix), {bare!r} does not. The model labels better with the "
                f"choices as it sees them: {example!r}."
            )


def _short(value: Any) -> str:
    """Show a value in one line, as it would be typed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        value = yaml.safe_dump(value, default_flow_style=True, width=math.inf).rstrip("\n")
    text = str(value) if not isinstance(value, str) else value.replace("\n", "\\n")
    return text if len(text) <= 120 else f"{text[:117]}..."
