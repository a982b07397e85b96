"""What was typed: Hydra's flags, and overrides checked against the declared keys."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException

from batchgen.cli.escapes import as_hydra, in_quotes, quoted_form
from batchgen.errors import UsageError
from batchgen.keys import Key, declared_keys, key_of, unknown_key

_FLAGS_WITH_A_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
)
_OVERRIDE = re.compile(
    r"(?P<name>(?P<sign>~|\+\+|\+)?(?P<key>[^=@+~]+)(?:@[^=]*)?)(?:=(?P<value>.*))?", re.DOTALL
)
_FILE_KEYS = {
    "prompt.template": "prompt.template_file",
    "prompt.system": "prompt.system_file",
    "sampling.stop": "sampling.stop_file",
    "sampling.score_choices": "sampling.score_choices_file",
    "structured.choice": "structured.choice_file",
    "structured.regex": "structured.regex_file",
    "structured.json": "structured.json_file",
}


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The command line, ready for Hydra.

    Attributes:
        arguments: overrides as Hydra should read them, then flags as typed.
        jobs: the names or folders that ``job`` is set to.
    """

    arguments: tuple[str, ...]
    jobs: tuple[str, ...]


def read_command_line(arguments: Sequence[str], conf: Path) -> CommandLine:
    """Check and rewrite the arguments.

    Args:
        arguments: what follows ``python -m batchgen``.
        conf: the folder of config groups; those of ``--config-dir`` count as well.

    Raises:
        UsageError: an unknown key, a value that cannot be read, or a comma without ``-m``.
    """
    flags, texts = split_flags(arguments)
    folders = [conf, *config_dirs(flags)]
    overrides = [_read_override(text, folders) for text in texts]
    is_multirun = "-m" in flags or "--multirun" in flags or "hydra.mode=MULTIRUN" in texts
    if not is_multirun:
        _refuse_sweeps(overrides)
    jobs = [job for item in overrides if item.key_or_group == "job" for job in _job_names(item)]
    lines = [_normalised(override) for override in overrides]
    # Flags last: ``--info`` would take an override behind it for its value.
    return CommandLine((*lines, *flags), tuple(jobs))


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell flags, with their values, from overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    takes_value = False
    for argument in arguments:
        is_flag = argument.startswith("-")
        (flags if is_flag or takes_value else overrides).append(argument)
        takes_value = is_flag and argument in _FLAGS_WITH_A_VALUE
    return flags, overrides


def config_dirs(flags: Sequence[str]) -> list[Path]:
    """Give the folders that ``--config-dir`` names, in order."""
    apart = [value for flag, value in pairwise(flags) if flag in ("--config-dir", "-cd")]
    joined = [flag.split("=", 1)[1] for flag in flags if flag.startswith("--config-dir=")]
    return [Path(value) for value in (*apart, *joined)]


def _read_override(text: str, folders: Sequence[Path]) -> Override:
    """Parse one override, its value rewritten to mean what YAML means."""
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        raise UsageError(f"Cannot read {text!r}: write key=value.")
    name, key, value = match["key"], key_of(match["key"]), match["value"]
    is_hydras = name.split(".")[0].split("/")[0] == "hydra"
    is_group = name == "job" or any((folder / name).is_dir() for folder in folders)
    if match["sign"] == "~" and not is_hydras:
        raise UsageError(f"{text}: a key cannot be removed. Set it to another value, or to null.")
    if value is None and not is_hydras:
        raise UsageError(f"Cannot read {text!r}: write key=value.")
    if key is None and not is_hydras and not is_group:
        raise UsageError(unknown_key(name))
    # Hydra takes a mapping's new entries for keys that are not declared, unless they are forced.
    force = "++" if key is not None and key.is_mapping and not match["sign"] else ""
    rewritten = text if is_hydras else f"{force}{match['name']}={_rewrite(name, value, key)}"
    return _parse(rewritten, name, value or "", key)


def _rewrite(name: str, value: str, key: Key | None) -> str:
    if key is not None and key.word == value:
        return f"[{in_quotes(value)}]"
    try:
        return as_hydra(value, is_text=key is not None and key.is_text)
    except ValueError as error:
        raise UsageError(f"{name}={value}: {error}.") from error


def _parse(text: str, name: str, value: str, key: Key | None) -> Override:
    is_list = key is not None and key.is_list
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UsageError(*_unreadable(name, value, reason, is_list=is_list)) from error
    if key is not None and key.kind is str and isinstance(override.value(), list | dict):
        reason = "brackets and braces outside quotes make a list or a mapping, not text"
        raise UsageError(*_unreadable(name, value, reason, is_list=False))
    return override


def _unreadable(name: str, value: str, reason: str, *, is_list: bool) -> list[str]:
    lines = [
        f"Cannot read {name}={value} ({reason}).",
        "Put text into double quotes, and all of it into single quotes for the shell:",
        f"  {quoted_form(name, value, is_list=is_list)}",
    ]
    if name in _FILE_KEYS:
        lines.append(f"or put it into a file and name that: {_FILE_KEYS[name]}=FILE")
    return lines


def _refuse_sweeps(overrides: Sequence[Override]) -> None:
    for override in overrides:
        if not override.is_sweep_override():
            continue
        name, value = str(override.input_line).split("=", 1)
        key = declared_keys().get(override.key_or_group)
        is_list = key is not None and key.is_list
        message = f"{name}={value} names several values, which is a sweep and needs -m."
        if key is not None and not key.is_text and not is_list:
            raise UsageError(message)
        whole = "one list" if is_list else "the value"
        raise UsageError(
            f"{message} Where the comma belongs to {whole}, write",
            f"  {quoted_form(name, value, is_list=is_list)}",
        )


def _job_names(override: Override) -> list[str]:
    """What ``job`` is set to; a glob over the job folders is left to Hydra."""
    value: Any = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    texts = [item.text if isinstance(item, QuotedString) else item for item in values]
    if None in texts or "" in texts:
        raise UsageError("job names no job folder. Leave it out, or see mode=jobs.")
    return [_job_name(text) for text in texts if isinstance(text, str)]


def _job_name(text: str) -> str:
    """Drop the slash that completion leaves at the end of a folder."""
    return text.rstrip("/") or text


def _normalised(override: Override) -> str:
    names = _job_names(override) if override.key_or_group == "job" else []
    line = str(override.input_line)
    return f"{line.split('=', 1)[0]}={','.join(map(in_quotes, names))}" if names else line
