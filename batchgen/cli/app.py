"""The command: exit codes, the jobs of a sweep, and what the user is told."""

import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence

from batchgen import __version__
from batchgen.cli.compose import compose
from batchgen.cli.help import help_text
from batchgen.cli.jobs import list_jobs, store_jobs
from batchgen.cli.overrides import read_command_line, split_flags
from batchgen.cli.resources import conf_dir, jobs_dir
from batchgen.cli.settle import Settled, settle
from batchgen.config import Mode
from batchgen.errors import BatchgenError, ExitCode, UsageError

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
        return _guarded(lambda: _command(given))
    except SystemExit as stop:
        # argparse and Hydra's own flags (--hydra-help, --version) end this way.
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _guarded(work: Callable[[], ExitCode]) -> ExitCode:
    """Turn what goes wrong into an exit code and a message."""
    try:
        return work()
    except BatchgenError as error:
        _say(f"batchgen: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("batchgen: interrupted.")
        return ExitCode.INTERRUPTED
    except Exception:
        traceback.print_exc()
        return ExitCode.UNEXPECTED


def _command(arguments: Sequence[str]) -> ExitCode:
    conf, jobs = conf_dir(), jobs_dir()
    flags, _ = split_flags(arguments)
    if {"-h", "--help"} & set(flags):
        print(help_text(conf, jobs), end="")
        return ExitCode.DONE
    if "--version" in flags:
        print(f"batchgen {__version__}")
        return ExitCode.DONE
    line = read_command_line(arguments, conf)
    store_jobs(jobs, line.jobs)
    settled = _settle_all(compose(line.arguments, conf, jobs))
    _refuse_shared_outputs(settled)
    return _run_all(settled)


def _settle_all(composed: Sequence[dict[str, object]]) -> list[Settled]:
    """Check every job of a sweep before the first one starts."""
    settled: list[Settled] = []
    for number, values in enumerate(composed):
        try:
            settled.append(settle(values))
        except UsageError as error:
            where = f"Job {number} of the sweep: " if len(composed) > 1 else ""
            raise UsageError(f"{where}{error}") from error
    return settled


def _refuse_shared_outputs(settled: Sequence[Settled]) -> None:
    users: dict[str, list[int]] = defaultdict(list)
    for number, job in enumerate(settled):
        if job.config.mode in (Mode.run, Mode.plan):
            users[job.config.output.dir].append(number)
    shared = {place: numbers for place, numbers in users.items() if len(numbers) > 1}
    if not shared:
        return
    lines = [f"  {place}: jobs {', '.join(map(str, who))}" for place, who in shared.items()]
    raise UsageError(
        "Jobs of the sweep would write to the same output.dir:\n"
        + "\n".join(lines)
        + "\nPut what is swept into it, as in 'output.dir=out/${pool.block_size}', or the job's "
        "number: 'output.dir=out/${hydra:job.num}'."
    )


def _run_all(settled: Sequence[Settled]) -> ExitCode:
    worst = ExitCode.DONE
    for number, job in enumerate(settled):
        title = f"job {number} of {len(settled)}" if len(settled) > 1 else ""
        code = _guarded(lambda job=job, title=title: _run(job, title))  # type: ignore[misc]
        worst = max(worst, code, key=_SEVERITY.index)
        if code is ExitCode.INTERRUPTED:
            break
    return worst


def _run(job: Settled, title: str) -> ExitCode:
    if job.config.mode is Mode.jobs:
        print(list_jobs(jobs_dir()))
        return ExitCode.DONE
    _say(" ".join(["batchgen", __version__, title]).rstrip())
    for change in job.changes:
        _say(f"  {change}")
    for warning in job.warnings:
        _say(f"warning: {warning}")
    # Imported late: it brings torch, which no error above has to wait for.
    from batchgen.run import run

    return ExitCode(run(job.config, job.resolved_yaml))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
