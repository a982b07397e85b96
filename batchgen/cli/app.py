"""The command: exit codes, the jobs of a sweep, and what the user is told."""

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath

from batchgen import __version__, early_signals
from batchgen.cli.compose import compose
from batchgen.cli.console import Console, asks_for_json, console_of
from batchgen.cli.help import help_text
from batchgen.cli.jobs import list_jobs, store_jobs
from batchgen.cli.overrides import config_dirs, read_command_line, split_flags
from batchgen.cli.resources import conf_dir, jobs_dir
from batchgen.cli.settle import Settled, settle
from batchgen.cli.sweep import compare_sweep
from batchgen.config import LogFormat, Mode
from batchgen.errors import BatchgenError, ExitCode, JobInterruptedError, UsageError
from batchgen.report.streams import queued_streams
from batchgen.s3_uri import S3Uri, is_s3
from batchgen.text import printable

# From best to worst: a sweep ends with the worst code of its jobs.
_SEVERITY = (
    ExitCode.DONE,
    ExitCode.TOO_MANY_ROW_ERRORS,
    ExitCode.USAGE,
    ExitCode.ENGINE_FAILED,
    ExitCode.UNEXPECTED,
    ExitCode.INTERRUPTED,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and give its exit code.

    Args:
        arguments: what follows ``python -m batchgen``; by default the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with queued_streams() as outbox, console_of(asks_for_json(given)) as console:
            code = _guarded(console, lambda: _command(given, console))
            if outbox.dropped:
                console.warn(f"{outbox.dropped} messages were dropped, since nobody read them")
            return code
    except SystemExit as stop:
        # argparse and Hydra's own flags (--hydra-help, --version) end this way.
        if early_signals.received() is not None:
            return ExitCode.INTERRUPTED
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _guarded(console: Console, work: Callable[[], ExitCode]) -> ExitCode:
    """Turn what goes wrong into an exit code and a message."""
    try:
        return work()
    except BatchgenError as error:
        console.fail(str(error), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        # Only where `main` is called by other Python code: the command has its own handlers.
        console.fail("interrupted.", ExitCode.INTERRUPTED)
        return ExitCode.INTERRUPTED
    except Exception as error:
        if early_signals.received() is not None:
            # Such as the end of a child process that got the same Ctrl-C.
            console.fail(_stopped(), ExitCode.INTERRUPTED)
            return ExitCode.INTERRUPTED
        console.fail_unexpectedly(error)
        return ExitCode.UNEXPECTED


def _stop_if_asked() -> None:
    """Stop between two parts of the command.

    Raises:
        JobInterruptedError: a signal came.
    """
    if early_signals.received() is not None:
        raise JobInterruptedError(_stopped())


def _stopped() -> str:
    return f"stopped by {early_signals.received()}; run the same command again to go on"


def _command(arguments: Sequence[str], console: Console) -> ExitCode:
    _stop_if_asked()
    conf = conf_dir()
    flags, _ = split_flags(arguments)
    jobs = [jobs_dir(), *(folder / "jobs" for folder in config_dirs(flags))]
    if {"-h", "--help"} & set(flags):
        text = help_text(conf, jobs)
        _stop_if_asked()
        print(text, end="")
        return ExitCode.DONE
    if "--version" in flags:
        print(f"batchgen {__version__}")
        return ExitCode.DONE
    _require_current_directory()
    line = read_command_line(arguments, conf)
    store_jobs(jobs, line.jobs)
    composed = compose(line.arguments, conf, jobs)
    _stop_if_asked()
    settled = _settle_all(composed)
    _refuse_shared_outputs(settled)
    return _run_all(settled, jobs, console)


def _require_current_directory() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "the current directory has been removed; change to one that is there"
        ) from None


def _settle_all(composed: Sequence[dict[str, object]]) -> list[Settled]:
    """Check every job of a sweep before the first one starts."""
    settled: list[Settled] = []
    for number, values in enumerate(composed):
        where = f"Job {number} of the sweep: " if len(composed) > 1 else ""
        try:
            settled.append(settle(values))
        except UsageError as error:
            raise UsageError(*f"{where}{error}".split("\n")) from error
        except OSError as error:
            # Not even whether it is there can be asked, as below a folder of somebody else's.
            if error.filename is None:
                raise
            keys = ", ".join(_naming(str(error.filename), values))
            raise UsageError(f"{where}{keys}: {error.filename}: {error.strerror}") from error
    return settled


def _naming(path: str, values: Mapping[str, object], group: str = "") -> Iterator[str]:
    """Give the keys whose values name a path, or something below it."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _naming(path, value, f"{group}{name}.")
        elif isinstance(value, str) and value and Path(value).absolute().is_relative_to(path):
            yield f"{group}{name}={value}"


def _refuse_shared_outputs(settled: Sequence[Settled]) -> None:
    users: dict[PurePath, list[int]] = defaultdict(list)
    for number, job in enumerate(settled):
        if job.config.mode in (Mode.run, Mode.plan):
            users[_place(job.config.output.dir)].append(number)
    # Whoever reads a directory reads what lies below it as well.
    shared = {
        place: [each for below, who in users.items() if below.is_relative_to(place) for each in who]
        for place in users
    }
    shared = {place: sorted(numbers) for place, numbers in shared.items() if len(numbers) > 1}
    if not shared:
        return
    lines = [f"  {place}: jobs {', '.join(map(str, who))}" for place, who in shared.items()]
    raise UsageError(
        "Jobs of the sweep would write to the same output.dir:",
        *lines,
        "Put what is swept into it, as in 'output.dir=out/${pool.block_size}', or the job's "
        "number: 'output.dir=out/${hydra:job.num}'.",
    )


def _place(output: str) -> PurePath:
    """Give what tells one output from another: two names may lead to one place."""
    if not is_s3(output):
        return Path(output).resolve()
    uri = S3Uri.parse("output.dir", output)
    return PurePosixPath(f"{uri.option('endpoint_override') or 's3:'}//{uri.bucket}", uri.key)


def _run_all(settled: Sequence[Settled], jobs: Sequence[Path], outer: Console) -> ExitCode:
    if settled and all(job.config.mode is Mode.jobs for job in settled):
        print(printable(list_jobs(jobs)))
        return ExitCode.DONE
    codes: list[ExitCode] = []
    for number, job in enumerate(settled):
        title = f"job {number} of {len(settled)}" if len(settled) > 1 else ""
        with outer.or_json(job.config.log.format is LogFormat.json) as console:
            codes.append(_guarded(console, functools.partial(_run, job, title, console)))
            console.end(codes[-1])
        if codes[-1] is ExitCode.INTERRUPTED:
            break
    comparison = compare_sweep(settled, codes) if len(settled) > 1 else None
    if comparison is not None:
        print(printable(comparison))
    return max(codes, key=_SEVERITY.index, default=ExitCode.DONE)


def _run(job: Settled, title: str, console: Console) -> ExitCode:
    _stop_if_asked()
    console.begin(" ".join(["batchgen", __version__, title]).rstrip(), job.changes)
    for warning in job.warnings:
        console.warn(warning)
    # Imported late: it brings torch, which no error above has to wait for.
    from batchgen.run import run

    _stop_if_asked()
    return ExitCode(run(job.config, job.resolved_yaml))
