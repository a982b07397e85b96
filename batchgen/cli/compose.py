"""Hydra's part: from overrides to one plain set of values for each job of the sweep.

Hydra composes, the command runs. The function handed to ``hydra.main`` only collects, so that
every job of a sweep is checked before the first starts, the exit code is ours, and Hydra's
flags, sweeps and plugins work as everywhere else. ``HYDRA_FULL_ERROR`` makes Hydra raise its
errors instead of printing them and exiting with 1.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from batchgen.cli.escapes import in_quotes
from batchgen.cli.jobs import unknown_job
from batchgen.config import Config
from batchgen.errors import UsageError
from batchgen.keys import declared_keys, did_you_mean, sections, unknown_key


def compose(arguments: Sequence[str], conf: Path, jobs: Sequence[Path]) -> list[dict[str, Any]]:
    """Let Hydra compose every job of the command line.

    Args:
        arguments: overrides and flags, as ``read_command_line`` gives them.
        conf: the folder with Hydra's ``config.yaml``.
        jobs: the folders of job folders, for messages.

    Returns:
        For each job the nested values of all declared keys, interpolations resolved; ``???``
        where a mandatory value was not named. Empty where a flag such as ``--cfg`` asked
        Hydra to show something instead.

    Raises:
        UsageError: Hydra could not compose, or a key is not declared.
    """
    composed: list[dict[str, Any]] = []
    problems: list[UsageError] = []

    def collect(values: DictConfig) -> None:
        # Hydra would print a traceback of an error that left this function.
        try:
            composed.append(_plain(values))
        except UsageError as error:
            problems.append(error)
        except OmegaConfBaseException as error:
            problems.append(UsageError(_explain(error, jobs)))

    ConfigStore.instance().store(name="batchgen_schema", node=Config)
    decorate = hydra.main(version_base="1.3", config_path=str(conf.resolve()), config_name="config")
    try:
        with _hydra_process(arguments):
            decorate(collect)()
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise UsageError(*_explain(error, jobs).split("\n")) from error
    except RecursionError as error:
        raise UsageError("A config file of --config-dir is nested too deeply.") from error
    if problems:
        raise problems[0]
    return composed


@contextmanager
def _hydra_process(arguments: Sequence[str]) -> Iterator[None]:
    """Set what Hydra takes from the process: arguments, environment, a place for its files."""
    saved_arguments, saved_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    with TemporaryDirectory(prefix="batchgen-") as scratch:
        # Hydra leaves a multirun.yaml in its sweep directory; nothing may litter the caller's.
        places = [f"hydra.{kind}.dir={in_quotes(scratch)}" for kind in ("run", "sweep")]
        sys.argv = ["batchgen", *places, *arguments]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            yield
        finally:
            sys.argv = saved_arguments
            os.environ.pop("HYDRA_FULL_ERROR")
            if saved_flag is not None:
                os.environ["HYDRA_FULL_ERROR"] = saved_flag


def _plain(composed: DictConfig) -> dict[str, Any]:
    """Hold the composed values against the declared keys and resolve them."""
    given = _names(OmegaConf.to_container(composed, resolve=False), "")
    unknown = [name for name in given if name not in declared_keys()]
    if unknown:
        raise UsageError(*map(unknown_key, unknown))
    # A primary config of the user's own (--config-name) may lack the schema's types.
    typed = OmegaConf.merge(OmegaConf.structured(Config), composed)
    values = OmegaConf.to_container(typed, resolve=True, throw_on_missing=False)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def _names(values: Any, prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and f"{prefix}{name}" in sections():
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _explain(error: BaseException, jobs: Sequence[Path]) -> str:
    """Say in our words what Hydra or OmegaConf found."""
    if isinstance(error, MissingConfigException):
        return _missing_group(error, jobs)
    cause = _omegaconf_cause(error)
    if cause is None:
        return str(error).strip().split("\n\nSet the environment", 1)[0]
    name = str(cause.full_key or "")
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and name not in declared_keys():
        return _where(error) + unknown_key(name)
    reason = str(cause.msg or cause).split("\n", 1)[0].rstrip(".")
    key = declared_keys().get(name)
    if key is not None and isinstance(cause, ValidationError):
        return f"{_where(error)}{name} must be {key.expected}. {reason}."
    return f"{_where(error)}{name}: {reason}." if name else f"{_where(error)}{reason}."


def _omegaconf_cause(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None and not isinstance(error, OmegaConfBaseException):
        # Hydra chains its own errors to OmegaConf's, with and without a `from`.
        error = error.__cause__ or error.__context__
    return error


def _where(error: BaseException) -> str:
    """Name the preset file, where Hydra does: ``In 'pool/mine': ...``."""
    first = str(error).split("\n", 1)[0]
    return f"{first.split(':', 1)[0]}: " if first.startswith("In '") else ""


def _missing_group(error: MissingConfigException, jobs: Sequence[Path]) -> str:
    group, _, name = str(error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
    if group == "job":
        return unknown_job(name, jobs)
    options = list(error.options or ())
    if not group or not options:
        return str(error).split("\n", 1)[0]
    return (
        f"{group}={name}: no such preset.{did_you_mean(name, options)} "
        f"Presets of {group}: {', '.join(options)}."
    )
