"""Input columns on their way into the output: copied while planning, taken by the writer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchgen.data.input.reader import read_carried
from batchgen.data.output.carry import CarriedRows, write_carried
from batchgen.data.output.directory import OutputDir
from batchgen.data.output.files import OutputError
from batchgen.job.inputs import JobInputs


def copy_carried(inputs: JobInputs, output: OutputDir) -> None:
    """Copy the carried columns of the job's rows, where there are any.

    Raises:
        OutputError: the disk does not take them.
        UsageError: an input file can no longer be read.
    """
    if inputs.carried is None:
        return
    path = _path(output)
    try:
        write_carried(
            path, inputs.carried, read_carried(inputs.source, inputs.carried, inputs.num_rows)
        )
    except OSError as error:
        raise OutputError.at(path, error) from error


@contextmanager
def carried_rows(inputs: JobInputs, output: OutputDir) -> Iterator[CarriedRows | None]:
    """Open the copy, if there is one, and remove it afterwards."""
    if inputs.carried is None:
        yield None
        return
    path = _path(output)
    with CarriedRows(path) as rows:
        yield rows
    path.unlink(missing_ok=True)


def _path(output: OutputDir) -> Path:
    return output.scratch / "_plan" / "carried.arrow"
