"""``mode=status``: how far a job is and what the same command would do; changes nothing."""

import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
import yaml  # type: ignore[import-untyped]

from batchgen.config import Config, Resume
from batchgen.data.input.reader import check_ids
from batchgen.data.output.directory import SUMMARY
from batchgen.data.output.finished import FinishedRows
from batchgen.data.output.glance import Glance
from batchgen.data.output.manifest import compare_manifest, describe
from batchgen.data.stores.store import Place, place_of, store_of
from batchgen.errors import UsageError
from batchgen.job.identity import fingerprint
from batchgen.job.identity_v1 import as_version_1
from batchgen.job.inputs import JobInputs
from batchgen.job.verdict import judge
from batchgen.prompts.row_sampling import row_params
from batchgen.prompts.store import PromptStore
from batchgen.runtime.model import resolve_device
from batchgen.sampling import SamplingParams


def describe_output(config: Config) -> str:
    """Say what stands in ``output.dir`` and what a resume would do.

    The command that a resume is judged by is the one given, where it names a model and an
    input, else the one that began the job.

    Raises:
        UsageError: there is no such directory, or it is damaged in a way that only a person
            can judge.
        OutputError: it cannot be read.
    """
    path = place_of("output.dir", config.output.dir)
    try:
        is_there = store_of(path).is_directory(path)
    except OSError as error:
        raise UsageError(f"output.dir={path} cannot be read: {error}") from error
    if not is_there:
        raise UsageError(f"output.dir={path} does not exist, so no job has been run there")
    glance = Glance.take(path, verify=config.output.verify)
    if glance.manifest is None:
        return f"{path}: no job has been run here"
    try:
        count = _Count.of(glance, glance.manifest)
        lines = [f"{path}: begun {glance.manifest['created']}"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"output.dir: the manifest in {path} is damaged ({error!r}); choose another "
            "output.dir, or set output.overwrite=true to begin anew"
        ) from error
    lines += [*_who(glance), *count.lines(), *_parts(config, glance), *_next(config, glance, count)]
    return "\n".join(lines)


class _Count:
    """Input rows of a job by what became of them."""

    def __init__(self, total: int, done: int, begun: int, finished: FinishedRows | None) -> None:
        self.total = total
        self.done = done
        self.begun = begun
        self.failed = 0 if finished is None else len(finished.error_row_indices)
        self._by_type = {} if finished is None else finished.errors_by_type

    @classmethod
    def of(cls, glance: Glance, manifest: Mapping[str, Any]) -> "_Count":
        """Count; the prompts that the last run planned say how many samples each row has."""
        made = manifest["fingerprint"]
        total = sum(file["rows"] for file in made["input"]["files"].values())
        total = min(total, made["input"]["limit"] or total)
        finished = glance.finished
        if finished is None:
            return cls(total, 0, 0, None)
        num_samples: int = made["sampling"]["n"]
        by_plan = _count_by_plan(glance.path, total, finished, num_samples)
        if by_plan is None and _is_whole(glance.path, finished) and glance.is_complete:
            # The plan of an output elsewhere goes when all is done.
            return cls(total, total, 0, finished)
        num_done, num_begun = by_plan or _count_by_job(finished, num_samples)
        return cls(total, num_done, num_begun, finished)

    @property
    def left(self) -> int:
        return self.total - self.done

    def lines(self) -> Iterator[str]:
        share = self.done / self.total if self.total else 1.0
        yield f"rows: {self.done:,} of {self.total:,} done ({share:.1%}), {self.left:,} left"
        if self.failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self._by_type.items())
            yield f"failed: {self.failed:,} of the rows that are done ({kinds})"
        if self.begun:
            yield f"begun: {self.begun:,} rows have only some of their samples; made again whole"


def _has_ended(glance: Glance) -> bool:
    """Whether the last run came to its end, whatever its verdict."""
    if glance.finished is None:
        return False
    return glance.is_complete or _is_whole(glance.path, glance.finished)


def _is_whole(path: Place, finished: FinishedRows) -> bool:
    """Whether as many rows are there as the last run counted."""
    try:
        rows = json.loads(store_of(path).read(path / SUMMARY))["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(rows == finished.num_rows)


def _count_by_job(finished: FinishedRows, num_samples: int) -> tuple[int, int]:
    """Count the rows that are done and those only begun, were all as the job's parameters say."""
    keys, counts = np.unique(finished.keys, return_counts=True)
    done = np.isin(keys, finished.error_keys) | (counts >= num_samples)
    return int(done.sum()), int((~done).sum())


def _count_by_plan(
    path: Place, total: int, finished: FinishedRows, num_samples: int
) -> tuple[int, int] | None:
    """Count the same by each row's own parameters, where the last plan is still there."""
    try:
        store = PromptStore(store_of(path).scratch(path) / "_plan" / "prompts.arrow")
    except UsageError:
        return None
    with store:
        if store.num_rows != total:
            return None
        params = row_params(store.sampling_params, SamplingParams(n=num_samples))
        wanted = np.array([each.n for each in params], dtype=np.int64)
        ids = pa.concat_arrays(store.row_ids.chunks or [pa.array([], store.row_ids.type)])
        done = finished.done(ids, wanted)
        begun = finished.done(ids, np.ones_like(wanted)) & ~done
        return int(done.sum()), int(begun.sum())


def _who(glance: Glance) -> Iterator[str]:
    if not glance.is_held:
        yield "run: none is at work"
        return
    yield f"run: {glance.owner or 'a process'} is at work"
    sample = glance.sample
    if sample is not None:
        when = datetime.fromtimestamp(sample["time"], UTC).isoformat(timespec="seconds")
        yield (
            f"engine: {sample['running']} rows running, {sample['waiting']} waiting, "
            f"{sample['generated_tokens']:,} tokens generated, as of {when}"
        )


def _parts(config: Config, glance: Glance) -> Iterator[str]:
    yield f"parts: {glance.num_parts} whole" + (", all of them read" * config.output.verify)
    if glance.damaged:
        run = "the next run with output.verify=true" if config.output.verify else "the next run"
        yield (
            f"damaged: {', '.join(glance.damaged)}; {run} sets them aside and runs their rows again"
        )
    if glance.is_replacing and not glance.is_held:
        yield "replacement: one is decided; the next run carries it out"


def _next(config: Config, glance: Glance, count: _Count) -> Iterator[str]:
    """Say what a run would do now."""
    if glance.is_held:
        yield "next: another run is refused while that process is at work"
        return
    refusal = _refusal(config, glance)
    if refusal is not None:
        yield f"next: a run is refused. {refusal}"
    elif not count.left and _has_ended(glance):
        # Without the job's keys it is the limit that the output was made with.
        code, why = judge(count.failed, count.total, _max_rate(config, glance))
        why = f" ({why})" if why else ""
        said = f"the same command does nothing and exits with {int(code)}{why}"
        yield f"next: the job is complete; {said}"
    elif count.left:
        yield f"next: the same command goes on with the {count.left:,} rows that are left"
    else:
        yield "next: every row is done; the same command finishes the output"
    if count.failed and refusal is None:
        yield f"output.retry_errors=true runs the {count.failed:,} failed rows again"


def _refusal(config: Config, glance: Glance) -> str | None:
    """Say why a run would be refused, if it would be."""
    assert glance.manifest is not None
    if glance.finished is None:
        return None
    is_named = "???" not in (config.model.path, config.input.path)
    if is_named and config.output.resume is Resume.never:
        return "output.resume=never refuses results that are there"
    try:
        job = config if is_named else _stored_config(glance.manifest)
        inputs = JobInputs.open(job)
        limit, id_column = job.input.limit, job.input.id_column
        digest = check_ids(inputs.source, id_column=id_column, limit=limit)
        device = resolve_device(job.model.device).type
        now = fingerprint(job, inputs, device=device, id_digest=digest)
    except UsageError as error:
        return str(error)
    differences = compare_manifest(glance.manifest, now, lambda: as_version_1(now, job, inputs))
    if not differences:
        return None
    return "\n".join(["These differ:", *describe(differences)])


def _max_rate(config: Config, glance: Glance) -> float | None:
    """Return the limit of failed rows that the next command has."""
    if "???" not in (config.model.path, config.input.path) or glance.manifest is None:
        return config.errors.max_rate
    try:
        return _stored_config(glance.manifest).errors.max_rate
    except UsageError:
        return None


def _stored_config(manifest: Mapping[str, Any]) -> Config:
    try:
        config: Config = _build(Config, yaml.safe_load(manifest["config"]))
    except (KeyError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UsageError(
            f"the configuration stored in the manifest cannot be read ({error!r}); give the "
            "job's own keys beside mode=status"
        ) from error
    return config


def _build(section: Any, values: Mapping[str, Any]) -> Any:
    """Build a section from plain values; keys that did not exist yet have their defaults."""
    hints = typing.get_type_hints(section)
    built = {}
    for item in fields(section):
        kind = hints[item.name]
        if item.name not in values:
            factory = item.default_factory
            built[item.name] = item.default if factory is MISSING else factory()
        elif is_dataclass(kind):
            built[item.name] = _build(kind, values[item.name])
        elif isinstance(kind, type) and issubclass(kind, Enum):
            built[item.name] = kind(values[item.name])
        else:
            built[item.name] = values[item.name]
    return section(**built)
