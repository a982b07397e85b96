"""Kill a job whose input and output lie on S3, and cut its line, again and again.

    python -m tests.stress.torture_s3                         # 40 kills, 20 runs over a bad line
    python -m tests.stress.torture_s3 --kills 200 --cuts 50

The storage is moto's server on loopback behind a line that a test can cut. Kills happen at a
random moment, at a random step of what the job does to files, and within a random request. After
each kill every part must be whole, no row may count twice, and each row that counts must be
what it is in an undisturbed run on a disk. A run over a bad line must end by itself with that
very output. Two runs at a time are tried as well: the second is refused.
"""

import argparse
import functools
import json
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.stress.torture import Torture, report
from tests.support.command_server import CommandServer, Run
from tests.support.killed_job import KilledJob, Results, make_model, read_whole
from tests.support.s3_loopback import ENVIRONMENT, S3, Fault, Proxy, serve_s3

PREPARE = "tests.support.s3_times:quick"
# Requests that change something.
CHANGES = "^(PUT|POST|DELETE) "
USAGE = 2


class StoredJob(KilledJob):
    """The same job in a bucket; what it leaves there is looked at in a copy on a disk.

    Args:
        folder: for that copy and the log.
        model: a folder from ``make_model``.
        s3: the server.
        address: by which the job reaches it.
    """

    def __init__(self, folder: Path, model: Path, s3: S3, address: str) -> None:
        super().__init__(folder, model)
        self.s3 = s3
        s3.put("in/rows.parquet", (folder / "input.parquet").read_bytes())
        self.given |= {"input.path": s3.uri("in", address), "output.dir": s3.uri("out", address)}
        self.environment = ENVIRONMENT | {"TMPDIR": str(folder / "tmp")}
        (folder / "tmp").mkdir()
        # Whole parts that a killed run did not live to enter are put aside, not removed.
        self.left_over = self.left_over - {"_quarantine"}

    def clear(self) -> None:
        """Remove the output and what is kept of it on this machine."""
        for key in self.s3.keys("out"):
            self.s3.client.delete_object(Bucket=self.s3.bucket, Key=f"out{key}")
        shutil.rmtree(self.environment["TMPDIR"])
        Path(self.environment["TMPDIR"]).mkdir()

    def check_kept(self, expected: Results) -> int:
        """Check an interrupted output as one reads it who heeds the list of parts."""
        self._copy()
        for part in self.parts():
            # Whole, even where it does not count.
            read_whole(part)
        counted = self.counted()
        for part in self.parts():
            if part.name not in counted:
                part.unlink()
        return super().check_kept(expected)

    def check_finished(self, expected: Results) -> None:
        """Check a finished output as one reads it who knows no list of parts."""
        self._copy()
        super().check_finished(expected)
        assert {part.name for part in self.parts()} <= set(self.counted())

    def counted(self) -> Sequence[str]:
        """Give the names in the newest list of parts of the copy."""
        lists = sorted(self.out.glob("_parts-*.json"))
        return json.loads(lists[-1].read_bytes())["parts"] if lists else []

    def _copy(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        for key in self.s3.keys("out/"):
            if key and not key.endswith("/"):
                path = self.out / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.s3.get(f"out/{key}"))


@dataclass
class StoredTorture(Torture):
    """Kills runs of one job in a bucket, and lets others go over a bad line.

    Attributes:
        proxy: the line.
        changes: requests of an undisturbed run that change something.
        cut_runs: runs over a bad line that gave the undisturbed output.
        failures: requests that failed in them.
    """

    takes_over = False
    job: StoredJob
    proxy: Proxy = field(default_factory=lambda: Proxy(""))
    changes: int = 0
    cut_runs: int = 0
    failures: int = 0
    _undisturbed: tuple[Results, float, int] | None = None

    def undisturbed(self) -> tuple[Results, float, int]:
        """Run once on a disk and once in the bucket, and compare; the first time only."""
        if self._undisturbed is not None:
            return self._undisturbed
        local = KilledJob(self.job.out.parent / "local", Path(self.job.given["model.path"]))
        run = self.command_server.start(local.given, local.log)
        assert run.wait() == 0, run.said
        expected = local.results()
        self.job.clear()
        self.proxy.seen.clear()
        begun = time.monotonic()
        run = self.start("*:say")
        assert run.wait() == 0, run.said
        duration_s = time.monotonic() - begun
        self.changes = sum(bool(re.search(CHANGES, line)) for line in self.proxy.seen)
        self.job.check_finished(expected)
        self._undisturbed = expected, duration_s, run.said.count("failpoint ")
        return self._undisturbed

    def kill_somewhere(self, duration_s: float, steps: int) -> Run:
        """Kill a run at a moment, at a step, or with a request half sent."""
        self.proxy.faults.clear()
        if self.draw.random() < 0.5:
            return super().kill_somewhere(duration_s, steps)
        return self.kill_within(CHANGES, self.draw.randrange(self.changes))

    def kill_within(self, request: str, skip: int = 0) -> Run:
        """Kill a run when some bytes of a request have left, unless it ends before.

        Args:
            request: an expression found in the request's first line.
            skip: such requests that pass.
        """
        fault = Fault(request, after_bytes=self.draw.randint(1, 6000), skip=skip)
        self.proxy.faults[:] = [fault]
        run = self.start(None)
        fault.then = functools.partial(run.send, signal.SIGKILL)
        assert run.wait() is not None, run.said
        self.proxy.faults.clear()
        return run

    def run_over_bad_line(self, expected: Results, faults: Sequence[Fault]) -> None:
        """Let a run begin anew over a line with faults, and end by itself.

        Raises:
            AssertionError: it failed, or its output is not the undisturbed one.
        """
        self.job.clear()
        self.proxy.faults[:] = faults
        run = self.start(None)
        code = run.wait()
        self.proxy.faults.clear()
        assert code == 0, run.said
        self.job.check_finished(expected)
        self.cut_runs += 1
        self.failures += sum(fault.happened for fault in faults)

    def random_faults(self) -> list[Fault]:
        """Draw one to four things that go wrong with requests of any kind."""
        kinds = (
            {"after_bytes": self.draw.randint(1, 6000)},
            {"answer_bytes": self.draw.randint(0, 300)},
            {"status": self.draw.choice((500, 503)), "times": self.draw.randint(1, 6)},
        )
        return [
            Fault(
                self.draw.choice((CHANGES, "PUT .*part-", "^(GET|HEAD) ")),
                skip=self.draw.randrange(self.changes),
                **self.draw.choice(kinds),
            )
            for _ in range(self.draw.randint(1, 4))
        ]

    def check_second_is_refused(self, expected: Results) -> None:
        """Start a run while another stands in the middle of an upload.

        Raises:
            AssertionError: both were at work.
        """
        self.job.clear()
        may_go_on = threading.Event()
        fault = Fault("PUT .*part-", skip=1, after_bytes=1, then=lambda: may_go_on.wait(30))
        self.proxy.faults[:] = [fault]
        first = self.start(None)
        while not fault.happened:
            assert first.wait(0.01) is None, first.said
        log = self.job.log.with_name("second.txt")
        second = self.command_server.start(self.job.given, log, self.job.environment)
        code = second.wait()
        may_go_on.set()
        assert code == USAGE, second.said
        assert f"is in use by process {first.pid} on" in second.said, second.said
        assert first.wait() == 0, first.said
        self.job.check_finished(expected)


@contextmanager
def stage(
    folder: Path, model: Path, s3: S3, command_server: CommandServer, seed: int
) -> Iterator[StoredTorture]:
    """Give a job in a bucket behind a line of its own.

    Args:
        folder: empty, for what lies on this machine.
        model: a folder from ``make_model``.
        s3: the server.
        command_server: prepared by ``PREPARE``.
        seed: of what is drawn.
    """
    (folder / "local").mkdir(parents=True)
    with Proxy(s3.address) as proxy:
        job = StoredJob(folder, model, s3, proxy.address)
        yield StoredTorture(job, command_server, random.Random(seed), proxy=proxy)


def main() -> None:
    """Read the arguments, kill and cut, and say what was survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--cuts", type=int, default=20, help="runs over a bad line")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name, serve_s3() as s3:
        folder = Path(name)
        model = make_model(folder / "model")
        with (
            CommandServer(model, PREPARE) as command_server,
            stage(folder / "job", model, s3, command_server, arguments.seed) as torture,
        ):
            expected, *_ = torture.undisturbed()
            torture.check_second_is_refused(expected)
            for _ in range(arguments.cuts):
                torture.run_over_bad_line(expected, torture.random_faults())
            torture.run(arguments.kills)
    print(
        f"{report(torture)}\n{torture.failures} requests failed in {torture.cut_runs} runs over a "
        f"bad line, each of which gave it as well\na second run at the same time was refused; "
        f"{time.monotonic() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
