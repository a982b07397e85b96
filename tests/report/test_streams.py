"""Nothing that is said is a reason for a job to wait or to end."""

import io
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen.report import streams
from batchgen.report.streams import Outbox, QueuedStream, queued_streams


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An end that waits a short while only."""
    monkeypatch.setattr(Outbox.drain, "__defaults__", (0.2,))
    yield


class Pipe:
    """A pipe as standard output and error, read only when a test reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reading, self.writing = os.pipe()
        stream = os.fdopen(self.writing, "w", encoding="utf-8")
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        self.read = b""

    def read_all(self, pause_s: float = 0.0) -> None:
        """Read to the end of the pipe."""
        while content := os.read(self.reading, 4096):
            self.read += content
            time.sleep(pause_s)

    def close_writing(self) -> None:
        """Close the end that is written to."""
        sys.stderr.close()


def say_much(lines: int = 20_000) -> str:
    for number in range(lines):
        print(f"line {number}", file=(sys.stdout, sys.stderr)[number % 2])
    return "".join(f"line {number}\n" for number in range(lines))


@pytest.mark.usefixtures("patience")
def test_t8_a_full_pipe_that_nobody_reads_stops_nothing_and_what_is_dropped_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = Pipe(monkeypatch)
    with queued_streams() as outbox:
        say_much(30_000)
        assert outbox.dropped > 1000
    # Not even what the interpreter says when it ends.
    os.write(pipe.writing, b"x" * 1_000_000)


def test_t8_a_slow_reader_gets_everything_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = Pipe(monkeypatch)
    reader = threading.Thread(target=pipe.read_all, args=(0.005,), daemon=True)
    reader.start()
    with queued_streams() as outbox:
        said = say_much(9_000)
    pipe.close_writing()
    reader.join()
    assert outbox.dropped == 0
    assert pipe.read.decode() == said


def test_a_closed_pipe_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = Pipe(monkeypatch)
    os.close(pipe.reading)
    with queued_streams():
        for _ in range(3):
            print("to nobody", flush=True)
            print("to nobody", file=sys.stderr, flush=True)
    # Nor is what is written behind our back, when the process ends.
    os.write(pipe.writing, b"to nobody")


def test_a_full_disk_is_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with queued_streams():
            print("x" * 100_000, file=sys.stderr, flush=True)
        print("x" * 100_000, file=full, flush=True)


@pytest.mark.usefixtures("patience")
def test_t8_a_stopped_terminal_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    termios.tcflow(slave, termios.TCOOFF)
    with os.fdopen(slave, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with queued_streams():
            assert sys.stderr.isatty()
            for number in range(20_000):
                print(number, file=sys.stderr)
    os.close(master)


def test_a_pipe_that_somebody_made_non_blocking_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = Pipe(monkeypatch)
    os.set_blocking(pipe.writing, False)
    reader = threading.Thread(target=pipe.read_all, args=(0.002,), daemon=True)
    reader.start()
    with queued_streams():
        said = say_much(9_000)
    pipe.close_writing()
    reader.join()
    assert pipe.read.decode() == said


def test_a_signal_handler_may_speak_while_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = Pipe(monkeypatch)

    def handler(number: int, frame: object) -> None:
        print("signal", file=sys.stderr)

    reader = threading.Thread(target=pipe.read_all, daemon=True)
    reader.start()
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with queued_streams() as outbox:
            say_much(5_000)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    pipe.close_writing()
    reader.join()
    assert outbox.dropped == 0
    assert pipe.read.count(b"line ") == 5_000


def test_a_process_without_a_standard_error_goes_on() -> None:
    stream = QueuedStream(None, Outbox())
    assert stream.write("said") == 4
    stream.flush()
    assert not stream.isatty()


def test_what_the_terminal_cannot_spell_is_written_as_python_writes_it(tmp_path: Path) -> None:
    outbox = Outbox()
    with (tmp_path / "log").open("w", encoding="latin-1") as log:
        QueuedStream(log, outbox).write("caf\u00e9 \u4e2d\n")
        outbox.close()
    assert (tmp_path / "log").read_bytes() == b"caf\xe9 \\u4e2d\n"


def test_a_stream_in_memory_is_written_at_once() -> None:
    stream = io.StringIO()
    QueuedStream(stream, Outbox()).write("said")
    assert stream.getvalue() == "said"


def test_no_file_gets_the_number_of_a_closed_standard_error() -> None:
    code = (
        f"import os; from {streams.__name__} import open_standard_descriptors as opened; "
        "opened(); file = open('/dev/null'); os.write(1, str(file.fileno()).encode())"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "{sys.executable}" -c "{code}" 0<&- 2>&-'],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert int(done.stdout) > 2
