"""What the command itself says on standard error, as text or as JSON lines."""

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from batchgen.errors import ExitCode
from batchgen.report.json_log import JsonLines, json_on_stderr
from batchgen.text import printable


class Console:
    """Says how a job begins, what is wrong with it, and how it ends.

    Args:
        lines: takes events; None for text.
    """

    def __init__(self, lines: JsonLines | None = None) -> None:
        self._lines = lines

    @contextmanager
    def or_json(self, as_json: bool) -> Iterator["Console"]:
        """Give a console that writes JSON where this one or the caller wants it."""
        if self._lines is not None or not as_json:
            yield self
            return
        with json_on_stderr() as lines:
            yield Console(lines)

    def begin(self, title: str, changes: Sequence[str]) -> None:
        """Say what is run, and which keys differ from their defaults."""
        text = "\n".join([title, *(f"  {change}" for change in changes)])
        self._say(text, "job_started", changes=list(changes))

    def warn(self, text: str) -> None:
        """Say what looks like a slip."""
        self._say(text if self._lines else f"warning: {text}", "message", "warning")

    def fail(self, text: str, code: ExitCode) -> None:
        """Say what is wrong."""
        self._say(f"batchgen: {text}", "error", "error", exit_code=int(code))

    def fail_unexpectedly(self, error: Exception) -> None:
        """Say where something went wrong that nobody thought of."""
        text = "".join(traceback.format_exception(error)).rstrip()
        self._say(text, "error", "error", exit_code=int(ExitCode.UNEXPECTED))

    def end(self, code: ExitCode) -> None:
        """Say the exit code, to programs only: people see it."""
        if self._lines is not None:
            name = code.name.lower()
            self._lines.write(
                "job_ended", f"exit code {int(code)} ({name})", exit_code=int(code), outcome=name
            )

    def _say(self, text: str, event: str, level: str = "info", **fields: object) -> None:
        text = printable(text)
        if self._lines is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._lines.write(event, text, level, **fields)


@contextmanager
def console_of(as_json: bool) -> Iterator[Console]:
    """Give a console for the time before the job's own format is known."""
    with Console().or_json(as_json) as console:
        yield console


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether the command line itself names the format, so that its own errors have it, too."""
    wanted = {f"{sign}log.format={quote}json{quote}" for sign in ("", "+", "++") for quote in "\"'"}
    return any(each in wanted or each.lstrip("+") == "log.format=json" for each in arguments)
