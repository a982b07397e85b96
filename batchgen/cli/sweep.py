"""The end of a sweep: its jobs side by side, as a table, a file and a picture.

The figures are those that each job left in its own output directory.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from batchgen.cli.settle import Settled, default_text
from batchgen.config import Mode
from batchgen.data.stores.loose import LooseFile
from batchgen.errors import ExitCode
from batchgen.report.plan_shapes import Sheet

_WITH_FIGURES = (ExitCode.DONE, ExitCode.TOO_MANY_ROW_ERRORS)
_LABEL_WIDTH = 260.0

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Measure:
    """A column of the table and a panel of the picture.

    Attributes:
        name: what heads the column.
        meaning: what heads the panel.
        take: finds it in what the job left; None where it is not there.
        digits: behind the point.
    """

    name: str
    meaning: str
    take: Callable[[Figures], float | None]
    digits: int = 0

    def shown(self, value: float | None) -> str:
        """Write a value."""
        return "-" if value is None else f"{value:,.{self.digits}f}"


_RUN = (
    _Measure("rows", "Rows", lambda each: each["rows"]),
    _Measure("failed", "Failed rows", lambda each: sum(each["errors"].values())),
    _Measure("generate_s", "Time to generate, s", lambda each: each["phases"]["generate_s"], 1),
    _Measure("tokens/s", "Generated tokens a second",
             lambda each: each["generated_tokens_per_s"], 1),
    _Measure("prefill", "Prompt tokens computed", lambda each: each["prefill_tokens_computed"]),
    _Measure("floor", "Floor of prompt tokens by blocks",
             lambda each: each["prefill_tokens_floor_block"]),
    _Measure("preempted", "Preemptions", lambda each: each["preemptions"]),
    _Measure("pool MiB", "Memory of the pool, MiB", lambda each: _mib(each["pool_bytes"])),
    _Measure("peak MiB", "Peak memory, MiB", lambda each: _mib(each["peak_memory_bytes"])),
)  # fmt: skip
_PLAN = (
    _Measure("rows", "Rows", lambda each: each["rows"]),
    _Measure("prompt tokens", "Prompt tokens of all requests", lambda each: each["request_tokens"]),
    _Measure("prefill", "Prompt tokens to compute", lambda each: each["expected_prefill_tokens"]),
    _Measure("floor", "Floor of prompt tokens by blocks",
             lambda each: each["prefill_tokens_floor_block"]),
    _Measure("rows at once", "Rows at once",
             lambda each: each["memory"] and each["memory"]["rows_at_once"]),
    _Measure("at most s", "Time to generate at most, s",
             lambda each: each["time"] and each["time"]["high_s"], 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SweptJob:
    """One job of a sweep.

    Attributes:
        number: its place in the sweep.
        values: the keys in which the jobs differ, as text.
        code: how it ended; None where it did not start.
        figures: what it left.
    """

    number: int
    values: Mapping[str, str]
    code: ExitCode | None
    figures: Figures | None

    @property
    def label(self) -> str:
        """What tells it from the others."""
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


def compare_sweep(settled: Sequence[Settled], codes: Sequence[ExitCode]) -> str | None:
    """Compare the jobs of a sweep that has ended, and write table and picture beside them.

    Args:
        settled: its jobs.
        codes: how those that were started ended.

    Returns:
        The table, and where it is kept if any job left figures; None for other modes.
    """
    mode = settled[0].config.mode
    if mode not in (Mode.run, Mode.plan) or any(job.config.mode is not mode for job in settled):
        return None
    measures = _RUN if mode is Mode.run else _PLAN
    jobs = _swept_jobs(settled, codes, "_summary.json" if mode is Mode.run else "_plan.json")
    table = _table(jobs, measures)
    if all(job.figures is None for job in jobs):
        return table
    place = _place([job.config.output.dir for job in settled])
    if place is None:
        return f"{table}\nthe jobs' output.dirs lie apart, so the comparison is not kept"
    content, picture = place.with_end(".json"), place.with_end(".svg")
    try:
        content.write(_content(jobs, measures))
        picture.write(_picture(jobs, measures))
    except OSError as error:
        return f"{table}\nthe comparison could not be kept at {content}: {error}"
    return f"{table}\ncomparison kept in {content}, drawn in {picture}"


def _swept_jobs(settled: Sequence[Settled], codes: Sequence[ExitCode], name: str) -> list[SweptJob]:
    given = [dict(change.split("=", 1) for change in job.changes) for job in settled]
    names = dict.fromkeys(name for values in given for name in values if name != "output.dir")
    swept = [name for name in names if len({values.get(name) for values in given}) > 1]
    jobs = []
    for number, (job, values) in enumerate(zip(settled, given, strict=True)):
        code = codes[number] if number < len(codes) else None
        figures = None
        if code in _WITH_FIGURES:
            figures = _read(LooseFile.below(job.config.output.dir, name))
        own = {name: values[name] if name in values else default_text(name) for name in swept}
        jobs.append(SweptJob(number, own, code, figures))
    return jobs


def _read(file: LooseFile) -> Figures | None:
    try:
        figures: Figures = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return figures


def _table(jobs: Sequence[SweptJob], measures: Sequence[_Measure]) -> str:
    head = ["job", *jobs[0].values, "exit", *(measure.name for measure in measures)]
    rows = [
        [
            str(job.number),
            *job.values.values(),
            "-" if job.code is None else str(int(job.code)),
            *(measure.shown(_value(job, measure)) for measure in measures),
        ]
        for job in jobs
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, *rows]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _value(job: SweptJob, measure: _Measure) -> float | None:
    return None if job.figures is None else measure.take(job.figures)


def _content(jobs: Sequence[SweptJob], measures: Sequence[_Measure]) -> str:
    content = [
        {
            "job": job.number,
            "keys": dict(job.values),
            "exit": None if job.code is None else int(job.code),
            **{measure.name: _value(job, measure) for measure in measures},
        }
        for job in jobs
    ]
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _picture(jobs: Sequence[SweptJob], measures: Sequence[_Measure]) -> str:
    sheet = Sheet()
    swept = ", ".join(jobs[0].values) or "nothing but output.dir"
    sheet.title(f"Sweep over {swept}")
    for measure in measures:
        values = [(job, _value(job, measure)) for job in jobs]
        # What is the same for all jobs is told once, in words.
        if len({value for _, value in values}) == 1:
            sheet.line(f"{measure.meaning}: {measure.shown(values[0][1])} in every job")
            continue
        sheet.heading(measure.meaning)
        sheet.bars(
            [
                (job.label, float(value or 0), float(value or 0), measure.shown(value))
                for job, value in values
            ],
            label_width=_LABEL_WIDTH,
        )
    return sheet.svg(f"{len(jobs)} jobs compared over {swept}")


def _place(folders: Sequence[str]) -> LooseFile | None:
    """Name the files after what the output directories' names begin with, beside them.

    None where they do not lie on one disk or in one bucket.
    """
    files = [LooseFile.of(folder) for folder in folders]
    if len({file.store for file in files}) > 1:
        return None
    paths = [file.path for file in files]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*paths, strict=False))
    parent, slash, name = "".join(letters[0] for letters in alike).rpartition("/")
    name = name.rstrip("-_.= ")
    name = "sweep" if not name or name == "sweep" else f"{name}-sweep"
    return replace(files[0], path=f"{parent}{slash}{name}")


def _mib(count: int | None) -> float | None:
    return None if count is None else count / 2**20
