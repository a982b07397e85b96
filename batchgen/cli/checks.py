"""Whether the values make sense, found out before anything is loaded.

Each check yields its complaints, so that all of them are named at once.
"""

import glob
import math
from collections.abc import Iterator
from pathlib import Path, PurePath, PurePosixPath

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import SandboxedEnvironment

from batchgen.checks import at_least, engine_complaints
from batchgen.cli.paths import where_looked_for
from batchgen.config import (
    Config,
    FieldOrder,
    InputConfig,
    LogConfig,
    Mode,
    NormalizeConfig,
    PromptConfig,
    PromptFormat,
    SamplingConfig,
    ScoreCalibration,
    StructuredConfig,
    UnicodeForm,
)
from batchgen.errors import UsageError
from batchgen.s3_uri import S3Uri, is_s3


def check(config: Config, given_input: str | None = None) -> None:
    """Check a configuration whose paths are absolute and whose mandatory values are there.

    Args:
        config: all of it.
        given_input: ``input.path`` as the user wrote it, for messages.

    Raises:
        UsageError: names every key whose value makes no sense, and what to do.
    """
    complaints = [
        *engine_complaints(config),
        *_input(config.input, given_input, config.job),
        *_prompt(config.prompt),
        *_sampling(config.sampling),
        *_structured(config.structured),
        *_counts(config),
        *_output(config),
        *_log(config.log),
    ]
    if complaints:
        raise UsageError(*complaints)


def _input(source: InputConfig, given: str | None, job: str | None) -> Iterator[str]:
    is_asked_later = is_s3(source.path) or glob.has_magic(source.path)
    if not is_asked_later and not Path(source.path).exists():
        yield (
            f"input.path={source.path} does not exist. Name a file, a directory or a glob."
            f"{where_looked_for(given, job)}"
        )
    if source.id_column == "":
        yield "input.id_column is empty. Name a column, or leave it out."
    yield from at_least("input.limit", source.limit, 1)


def _prompt(prompt: PromptConfig) -> Iterator[str]:
    yield from _prompt_sources(prompt)
    yield from _prompt_pieces(prompt)
    for name in ("template_file", "chat_template_file", "system_file", "shots_file"):
        path = getattr(prompt, name)
        if path is not None and not Path(path).is_file():
            yield f"prompt.{name}={path} is not a file."
    for name in prompt.chat_template_kwargs:
        if not name.isidentifier():
            yield f"prompt.chat_template_kwargs: {name!r} cannot be a variable of a template."
    template = prompt.template
    if template is None and prompt.template_file and Path(prompt.template_file).is_file():
        template = _read_text("prompt.template_file", prompt.template_file)
    if template is not None:
        yield from _template_syntax(prompt, template)


def _prompt_sources(prompt: PromptConfig) -> Iterator[str]:
    """Exactly one source: two that are named explicitly contradict each other."""
    names = ("column", "messages_column", "token_ids_column", "template", "template_file")
    named = [f"prompt.{name}" for name in names if getattr(prompt, name) is not None]
    if len(named) > 1:
        yield (
            f"{' and '.join(named)} are both named, but a prompt has one source. "
            "Leave one out, or set it to null where a job folder names it."
        )
    yield from (
        f"prompt.{name} is empty. Name a column, or leave it out."
        for name in names[:3]
        if getattr(prompt, name) == ""
    )
    if prompt.normalize.columns and not _has_rule(prompt.normalize):
        yield (
            f"prompt.normalize.columns={prompt.normalize.columns} names columns, but no rule of "
            "prompt.normalize is on. Set one, as in prompt.normalize.line_ends=true."
        )
    if prompt.field_order is not FieldOrder.given and not prompt.fields:
        yield (
            f"prompt.field_order={prompt.field_order} needs prompt.fields: the columns that the "
            "template lists."
        )
    if len(set(prompt.fields)) < len(prompt.fields):
        yield f"prompt.fields={prompt.fields} names a column twice."
    if prompt.system is not None and prompt.system_file is not None:
        yield "prompt.system and prompt.system_file are both named. Set one of them to null."


def _has_rule(normalize: NormalizeConfig) -> bool:
    return any(
        value not in (False, UnicodeForm.none)
        for name, value in vars(normalize).items()
        if name != "columns"
    )


def _prompt_pieces(prompt: PromptConfig) -> Iterator[str]:
    """What goes around a template is never dropped in silence where there is none."""
    if prompt.template is not None or prompt.template_file is not None:
        if prompt.shots_file is not None and not prompt.answer_column:
            yield "prompt.answer_column is empty. Name the column of the shots' answers."
        return
    for name in ("shots_file", "system", "system_file"):
        if getattr(prompt, name):
            yield (
                f"prompt.{name} needs prompt.template or prompt.template_file: other prompts "
                "are taken as they stand."
            )
    as_it_stands = prompt.column or prompt.token_ids_column
    if prompt.format is PromptFormat.chat and as_it_stands:
        yield (
            f"prompt.format=chat does not apply to the column {as_it_stands}, which is taken as "
            "it stands. Use prompt.template, as in 'prompt.template=\"{{ prompt }}\"'."
        )


def _template_syntax(prompt: PromptConfig, template: str) -> Iterator[str]:
    key = "prompt.template" if prompt.template is not None else "prompt.template_file"
    if not template.strip():
        yield f"{key} is empty: every prompt would be."
    try:
        SandboxedEnvironment().parse(template)
    except TemplateSyntaxError as error:
        yield f"{key} is not a Jinja template: line {error.lineno}: {error.message}."
    except RecursionError:
        yield f"{key} is nested too deeply."


def _sampling(sampling: SamplingConfig) -> Iterator[str]:
    problem = sampling.params().problem()
    if problem:
        yield f"sampling.{problem}."
    calibration, prior = sampling.score_calibration, sampling.score_prior
    if calibration is not ScoreCalibration.none and not sampling.score_choices:
        yield f"sampling.score_calibration={calibration} needs sampling.score_choices."
    if not prior:
        return
    if calibration is not ScoreCalibration.prior:
        yield "sampling.score_prior needs sampling.score_calibration=prior."
    fits = len(prior) == len(sampling.score_choices) and all(0 < share < 1 for share in prior)
    if not fits or not math.isclose(sum(prior), 1, abs_tol=1e-3):
        yield (
            f"sampling.score_prior={prior} must give each of sampling.score_choices a share "
            "above 0, and all together 1."
        )


def _structured(structured: StructuredConfig) -> Iterator[str]:
    # What a choice_file holds stands in choice by now.
    names = ("choice", "regex", "regex_file", "json", "json_file")
    named = [f"structured.{name}" for name in names if getattr(structured, name) is not None]
    if len(named) > 1:
        yield (
            f"{' and '.join(named)} are both named, but an output has one structure. Leave one "
            "out, or set it to null where a job folder names it."
        )
    for key in ("regex_file", "json_file"):
        path = getattr(structured, key)
        if path is not None and not Path(path).is_file():
            yield f"structured.{key}={path} is not a file."


def _counts(config: Config) -> Iterator[str]:
    max_rate, wall_time_s = config.errors.max_rate, config.budget.wall_time_s
    yield from at_least("schedule.window_rows", config.schedule.window_rows, 1)
    yield from at_least("output.rows_per_part", config.output.rows_per_part, 1)
    if wall_time_s is not None and not 0 < wall_time_s < math.inf:
        yield (f"budget.wall_time_s={wall_time_s} must be a positive number of seconds, or null.")
    if max_rate is not None and not 0 <= max_rate <= 1:
        yield f"errors.max_rate={max_rate} must lie between 0 and 1."


def _log(log: LogConfig) -> Iterator[str]:
    if not 0 < log.every_s < math.inf:
        yield f"log.every_s={log.every_s} must be a positive number of seconds."
    path = log.prometheus_file
    if path is None:
        return
    if not path.endswith(".prom"):
        yield (f"log.prometheus_file={path} must end in .prom: node exporter reads no other files.")
    if not Path(path).parent.is_dir():
        yield f"log.prometheus_file={path}: there is no directory {Path(path).parent}."


def _output(config: Config) -> Iterator[str]:
    """The output must not be read as input by the next run."""
    output, source = config.output.dir, config.input.path
    if config.mode is Mode.preview or not output:
        return
    if not is_s3(output) and Path(output).exists() and not Path(output).is_dir():
        yield f"output.dir={output} is a file. Name a directory."
    if _reads(source, output):
        yield (
            f"output.dir={output} is where input.path={source} lies, so the results would be "
            "mixed with the input. Name another directory."
        )


def _reads(source: str, output: str) -> bool:
    """Whether the input takes in files of the output directory, or lies in it."""
    if is_s3(source) or is_s3(output):
        return is_s3(source) and is_s3(output) and _reads_objects(source, output)
    target = Path(output).resolve()
    if Path(source).exists():
        found = Path(source).resolve()
        return found.is_relative_to(target) or (found.is_dir() and _is_read(target, found))
    if "**" in source:
        return _is_read(target, Path(source.split("**", 1)[0]).resolve())
    return Path(output, "part-00000.parquet").match(source)


def _reads_objects(source: str, output: str) -> bool:
    """Whether the same holds in a bucket, judged by names alone."""
    uris = S3Uri.parse("input.path", source), S3Uri.parse("output.dir", output)
    if uris[0].bucket != uris[1].bucket or uris[0].options != uris[1].options:
        return False
    found, target = (PurePosixPath("/", uri.key) for uri in uris)
    if "**" in found.parts:
        return _is_read(target, PurePosixPath(str(found).split("**", 1)[0]))
    if glob.has_magic(uris[0].key):
        return (target / "part-00000.parquet").match(str(found))
    return found.is_relative_to(target) or _is_read(target, found)


def _is_read(folder: PurePath, root: PurePath) -> bool:
    """Whether a reader that goes down from ``root`` comes through ``folder``."""
    if not folder.is_relative_to(root):
        return False
    return not any(part.startswith(("_", ".")) for part in folder.relative_to(root).parts)


def _read_text(key: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{key}={path} cannot be read as UTF-8 text: {error}.") from error
