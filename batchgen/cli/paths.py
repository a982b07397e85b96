"""Paths made absolute once, against the caller's directory."""

import glob
import os
import re
from dataclasses import replace
from pathlib import Path

from batchgen.config import Config
from batchgen.errors import UsageError
from batchgen.s3_uri import S3Uri, is_s3

# What people call the folders of their models, and no owner on the hub is called.
_FOLDERS = frozenset({"checkpoint", "checkpoints", "model", "models", "weights"})
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve_paths(config: Config) -> Config:
    """Give the configuration with absolute paths; hub names stay as they are.

    Raises:
        UsageError: a path is an address that cannot be used, or names no model.
    """
    model, prompt, sampling = config.model, config.prompt, config.sampling
    structured = config.structured
    tokenizer = model.tokenizer
    return replace(
        config,
        model=replace(
            model,
            path=_model("model.path", model.path),
            tokenizer=None if tokenizer is None else _model("model.tokenizer", tokenizer),
        ),
        input=replace(config.input, path=_input(config.input.path)),
        prompt=replace(
            prompt,
            template_file=_file(prompt.template_file),
            chat_template_file=_file(prompt.chat_template_file),
            system_file=_file(prompt.system_file),
            shots_file=_file(prompt.shots_file),
        ),
        sampling=replace(
            sampling,
            stop_file=_file(sampling.stop_file),
            score_choices_file=_file(sampling.score_choices_file),
        ),
        structured=replace(
            structured,
            choice_file=_file(structured.choice_file),
            regex_file=_file(structured.regex_file),
            json_file=_file(structured.json_file),
        ),
        output=resolve_output(config).output,
        log=replace(config.log, prometheus_file=_file(config.log.prometheus_file)),
    )


def resolve_output(config: Config) -> Config:
    """Give the configuration with only ``output.dir`` made absolute.

    Raises:
        UsageError: it is an address that cannot be written to.
    """
    return replace(config, output=replace(config.output, dir=_output(config.output.dir)))


def absolute(path: str) -> str:
    """Give the absolute path against the caller's directory; links are not followed."""
    return os.path.normpath(expand(path).absolute())


def expand(path: str) -> Path:
    """Put the home directory for a leading tilde, where it names one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def where_looked_for(given: str | None, job: str | None) -> str:
    """Say of a relative path that it is the caller's, not the job folder's.

    Args:
        given: the path as the user wrote it; for None and absolute ones nothing is said.
        job: ``job``; a job that was named by its path is known by the absolute one.
    """
    if given is None or expand(given).is_absolute():
        return ""
    said = f" {given} is relative, so it was looked for in the current directory."
    if job is not None and Path(job).is_absolute() and Path(job, given).exists():
        said += f" There is {Path(job, given)}: name it so, or run the command in {job}."
    return said


def looks_like_directory(name: str) -> bool:
    """Whether a model's name that is no path that exists may well be meant as one.

    Args:
        name: a resolved ``model.path`` or ``model.tokenizer``.
    """
    folder, slash, _ = name.partition("/")
    return bool(folder and slash) and (folder in _FOLDERS or Path(folder).is_dir())


def _model(key: str, name: str) -> str:
    """Tell a model's directory or file from a hub name."""
    if not name.strip():
        raise UsageError(f"{key} is empty. Name a model, or leave the key out.")
    path = Path(absolute(name))
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return str(path)
    if path.exists():
        raise UsageError(f"{key}={name} is neither a directory nor a .gguf file.")
    if not _HUB_NAME.fullmatch(name) or name.endswith(".gguf"):
        raise UsageError(
            f"{key}={name} does not exist (looked for {path}). "
            "Name a directory, a .gguf file, or a hub name such as owner/model."
        )
    return name


def _input(path: str) -> str:
    if is_s3(path):
        return str(S3Uri.parse("input.path", path))
    _refuse_uri("input.path", path)
    expanded = expand(path)
    if expanded.exists() or not glob.has_magic(path):
        return absolute(path)
    # The caller's directory is no pattern, whatever characters it holds.
    return os.path.normpath(Path(glob.escape(str(Path.cwd()))) / expanded)


def _output(path: str) -> str:
    if is_s3(path):
        return _output_address(path)
    _refuse_uri("output.dir", path)
    return absolute(path) if path else path


def _output_address(path: str) -> str:
    uri = S3Uri.parse("output.dir", path)
    if not uri.key or glob.has_magic(uri.key):
        raise UsageError(f"output.dir={uri} must name a prefix in the bucket, without wildcards.")
    return str(uri)


def _file(path: str | None) -> str | None:
    return absolute(path) if path else path


def _refuse_uri(key: str, path: str) -> None:
    scheme, mark, _ = path.partition("://")
    if mark:
        # What follows may hold a password, so it is not repeated.
        raise UsageError(
            f"{key}={scheme}://... is a URI of a kind that cannot be used. Name a local path"
            " or s3://BUCKET/PREFIX."
        )
