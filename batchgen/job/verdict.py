"""The verdict over a finished output: `errors.max_rate` against all of its rows."""

from batchgen.errors import ExitCode


def judge(failed: int, rows: int, max_rate: float | None) -> tuple[ExitCode, str]:
    """Return the exit code of an output whose rows are all done, and why it is not 0.

    Args:
        failed: input rows that failed, in whichever run.
        rows: input rows.
        max_rate: ``errors.max_rate``.
    """
    if max_rate is None or not rows or failed / rows <= max_rate:
        return ExitCode.DONE, ""
    return (
        ExitCode.TOO_MANY_ROW_ERRORS,
        f"{failed} of {rows} rows failed, more than errors.max_rate={max_rate} allows",
    )
