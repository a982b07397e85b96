"""Kill a job at random moments, again and again, and check that nothing is lost or doubled.

    python -m tests.stress.torture                      # 200 kills
    python -m tests.stress.torture --kills 2000 --seed 3

A small job with rows of all kinds runs in a process of its own and is killed as by
``kill -9``: half of the times at a random moment, half of the times at a random step of what it
does to files. After each kill every file under a final name must be whole, no row there twice,
and each row what it is in an undisturbed run; then the same command goes on, to be killed again
or to end. Whenever a run ends, its output must be exactly the undisturbed one's.

One run in four finds a file system without locks. One in four has its lock removed at a random
moment while a second run begins: whoever loses it stops, and the same must hold.
"""

import argparse
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command_server import NO_LOCKS, CommandServer, Run
from tests.support.killed_job import KilledJob, Results, make_model

FAILPOINT = "BATCHGEN_FAILPOINT"
FAILED, REFUSED = 1, 2


@dataclass
class Torture:
    """Kills runs of one job.

    Attributes:
        kills: kills so far, by what the run was doing.
        ended: runs that ended by themselves and gave the undisturbed output.
        resumed: runs that found rows of a killed one.
        without_locks: runs on a file system without locks.
        taken_over: runs that stopped since their lock was removed.
        takes_over: whether locks are removed, and missing: not on object storage.
    """

    takes_over = True

    job: KilledJob
    command_server: CommandServer
    draw: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    resumed: int = 0
    without_locks: int = 0
    taken_over: int = 0

    def undisturbed(self) -> tuple[Results, float, int]:
        """Run once in peace: the results, the seconds it takes, the steps it has."""
        for _ in range(2):
            self.job.clear()
            begun = time.monotonic()
            run = self.start("*:say")
            assert run.wait() == 0, run.said
            duration_s = time.monotonic() - begun
        results = self.job.results()
        self.job.check_finished(results)
        return results, duration_s, run.said.count("failpoint ")

    def run(self, kills: int) -> None:
        """Kill until there are so many kills, then let the last run end.

        Raises:
            AssertionError: something was lost, doubled or changed.
        """
        expected, duration_s, steps = self.undisturbed()
        self.job.clear()
        while sum(self.kills.values()) < kills:
            if self.takes_over and self.draw.random() < 0.25:
                self.remove_lock(duration_s, expected)
            run = self.kill_somewhere(duration_s, steps)
            kept = self.job.check_kept(expected)
            if run.wait() == -signal.SIGKILL:
                self.kills[_doing(run)] += 1
                self.resumed += kept > 0
                continue
            self.check_end(run, expected)
        self.check_end(self.start(None), expected)

    def kill_somewhere(self, duration_s: float, steps: int) -> Run:
        """Start a run that is killed, unless it ends before."""
        if self.draw.random() < 0.5:
            run = self.start(f"*:kill:{self.draw.randint(1, steps)}")
            assert run.wait() is not None, run.said
            return run
        run = self.start(None)
        run.wait(self.draw.random() * duration_s)
        run.kill()
        return run

    def remove_lock(self, duration_s: float, expected: Results) -> None:
        """Remove a run's lock while it works, and let a second one begin.

        Raises:
            AssertionError: neither did the job, or something was lost, doubled or changed.
        """
        environment = self.surroundings()
        first = self.command_server.start(self.job.given, self.job.log, environment)
        first.wait(self.draw.random() * duration_s)
        (self.job.out / "_lock").unlink(missing_ok=True)
        log = self.job.log.with_name("second.txt")
        second = self.command_server.start(self.job.given, log, environment)
        codes = first.wait(), second.wait()
        assert set(codes) <= {0, FAILED, REFUSED}, first.said + second.said
        assert 0 in codes, first.said + second.said
        self.taken_over += FAILED in codes
        self.job.check_kept(expected)

    def check_end(self, run: Run, expected: Results) -> None:
        """Check a run that ended by itself, and sometimes begin anew.

        Raises:
            AssertionError: it failed, or its output is not the undisturbed one.
        """
        assert run.wait() == 0, run.said
        self.job.check_finished(expected)
        self.ended += 1
        # Half of the time the finished output is run over again, which must not touch it.
        if self.draw.random() < 0.5:
            self.job.clear()

    def start(self, failpoint: str | None) -> Run:
        """Start a run, at one of whose steps something happens."""
        more = {} if failpoint is None else {FAILPOINT: failpoint}
        return self.command_server.start(self.job.given, self.job.log, self.surroundings() | more)

    def surroundings(self) -> dict[str, str]:
        """Draw the environment of a run."""
        if not self.takes_over or self.draw.random() >= 0.25:
            return self.job.environment
        self.without_locks += 1
        return self.job.environment | NO_LOCKS


def _doing(run: Run) -> str:
    """Name the phase that a run was in, by what it said last."""
    phases = [line for line in run.said.splitlines() if line in PHASES]
    return phases[-1].strip("[]") if phases else "start"


PHASES = ("[plan]", "[load]", "[generate]", "[write]")


def main() -> None:
    """Read the arguments, kill, and say what was survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=12, help="input rows (at least 12)")
    arguments = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        job = KilledJob(Path(folder), model, arguments.rows)
        with CommandServer(model) as command_server:
            torture = Torture(job, command_server, random.Random(arguments.seed))
            torture.run(arguments.kills)
    print(f"{report(torture)}; {time.monotonic() - begun:.0f} s")


def report(torture: Torture) -> str:
    """Say what was survived, in a few lines."""
    by_phase = ", ".join(f"{count} in {phase}" for phase, count in torture.kills.most_common())
    return (
        f"{sum(torture.kills.values())} kills ({by_phase}); {torture.resumed} times rows of a "
        f"killed run were there\n{torture.ended} runs ended, each with the undisturbed output\n"
        f"{torture.without_locks} runs had no locks; {torture.taken_over} stopped since another "
        "run had their lock"
    )


if __name__ == "__main__":
    main()
