"""What is said is never a reason for a job to end."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.cli.streams import Forgiving, forgiving_streams


def unread_pipe() -> io.TextIOWrapper:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1, encoding="utf-8")


def test_a_pipe_that_nobody_reads_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with unread_pipe() as out, unread_pipe() as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with forgiving_streams():
            for _ in range(3):
                print("to nobody", flush=True)
                print("to nobody", file=sys.stderr, flush=True)
        assert (sys.stdout, sys.stderr) == (out, err)
        # Nor is what waited in the stream itself, when the process ends.
        out.flush()


def test_a_full_disk_is_none_either() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        stream = Forgiving(full)
        stream.write("x" * 100_000)
        stream.flush()


def test_a_process_without_a_standard_error_goes_on() -> None:
    stream = Forgiving(None)
    assert stream.write("said") == 4
    stream.flush()
    assert not stream.isatty()


def test_what_the_terminal_cannot_spell_is_written_as_python_writes_it() -> None:
    bytes_ = io.BytesIO()
    stream = Forgiving(io.TextIOWrapper(bytes_, encoding="latin-1"))
    stream.write("caf\u00e9 \u4e2d\n")
    stream.flush()
    assert bytes_.getvalue() == b"caf\xe9 \\u4e2d\n"


def test_no_file_gets_the_number_of_a_closed_standard_error() -> None:
    code = (
        "import os; from batchgen.cli.streams import open_standard_descriptors as opened; "
        "opened(); file = open('/dev/null'); os.write(1, str(file.fileno()).encode())"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "{sys.executable}" -c "{code}" 0<&- 2>&-'],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert int(done.stdout) > 2
