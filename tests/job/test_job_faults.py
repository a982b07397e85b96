"""Every step of a run fails in every way; the same command always gives the same output."""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from tests.stress.torture import FAILPOINT, Torture, report
from tests.support.command_server import NO_LOCKS, CommandServer, Run
from tests.support.killed_job import KilledJob, Results
from tests.support.notes import Note

FAULTS = ("kill", "term", "enospc", "eio", "lock removed", "no locks")
REPLACING = ("kill", "lock removed", "no locks")
KILLED, INTERRUPTED = -9, 75
# What happens at the step itself; the others happen around it.
AT_STEP = {"lock removed": "stop", "no locks": "kill"}
# What the operating system refuses ends a run with one of these.
FAILED = (1, 2)


@dataclass(frozen=True)
class Scene:
    """A command, by what it is given beyond the job's own keys, and the output it finds.

    Attributes:
        points: beginnings of the steps that fail in it.
        faults: how they do.
    """

    name: str
    arguments: tuple[str, ...] = ()
    before: Path | None = None
    points: tuple[str, ...] = ("",)
    faults: tuple[str, ...] = FAULTS


@dataclass(frozen=True)
class Cell:
    """One step of one scene that fails in one way."""

    scene: Scene
    point: str
    nth: int
    fault: str


class Stage:
    """Plays cells in a folder of its own."""

    def __init__(self, folder: Path, model: Path, command_server: CommandServer) -> None:
        folder.mkdir(parents=True)
        self.job = KilledJob(folder, model)
        self._command_server = command_server

    def run(
        self, scene: Scene, fault: str = "", failpoint: str | None = None, log: str = "log.txt"
    ) -> Run:
        environment = {} if failpoint is None else {FAILPOINT: failpoint}
        environment |= NO_LOCKS if fault == "no locks" else {}
        more = dict(argument.split("=", 1) for argument in scene.arguments)
        return self._command_server.start(
            self.job.given | more, self.job.log.with_name(log), environment
        )

    def set(self, scene: Scene) -> None:
        shutil.rmtree(self.job.out, ignore_errors=True)
        if scene.before is not None:
            shutil.copytree(scene.before, self.job.out)

    def points(self, scene: Scene) -> Sequence[str]:
        """The steps of an undisturbed run, in their order."""
        self.set(scene)
        run = self.run(scene, failpoint="*:say")
        assert run.wait() == 0, run.said
        return [line.split()[1][:-1] for line in run.said.splitlines() if "failpoint" in line]

    def play(self, cell: Cell, expected: Results) -> str:
        """Let a step fail, then give the same command again: what went wrong, or nothing."""
        self.set(cell.scene)
        at_step = AT_STEP.get(cell.fault, cell.fault)
        run = self.run(cell.scene, cell.fault, f"{cell.point}:{at_step}:{cell.nth}")
        try:
            if cell.fault == "lock removed":
                self._let_another_in(run, cell, expected)
            code = run.wait()
            assert f"failpoint {cell.point}: {at_step}" in run.said, "it never came to it"
            assert code in self._codes(cell), f"exit code {code}"
            self.job.check_kept(expected)
            again = self.run(cell.scene, cell.fault)
            assert again.wait() == 0, f"the same command again: {again.said}"
            self.job.check_finished(expected)
        except (AssertionError, OSError) as error:
            return f"{error}\n{run.said}"
        return ""

    def _let_another_in(self, run: Run, cell: Cell, expected: Results) -> None:
        """Remove the lock of a run that is stopped, let another do the job, and go on with it."""
        assert run.wait_until_stopped(), "it never stopped"
        (self.job.out / "_lock").unlink(missing_ok=True)
        second = self.run(cell.scene, log="second.txt")
        code = second.wait()
        run.send(signal.SIGCONT)
        run.wait()
        assert code == 0, f"the second run: {second.said}"
        self.job.check_finished(expected)

    def _codes(self, cell: Cell) -> tuple[int, ...]:
        if cell.fault in ("kill", "no locks"):
            return (KILLED,)
        if cell.fault == "lock removed":
            # One that had nothing left to change does not find out.
            return (*FAILED, 0)
        # A signal that comes when all is done changes nothing any more.
        is_done = (self.job.out / "_SUCCESS").exists()
        return ((INTERRUPTED, 0) if is_done else (INTERRUPTED,)) if cell.fault == "term" else FAILED


@pytest.fixture(scope="module")
def stages(torture_model: Path, command_server: CommandServer) -> Iterator[Sequence[Stage]]:
    # In memory where that is to be had: a process that dies takes nothing of it along.
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with TemporaryDirectory(dir=place) as folder:
        # A worker of several has a core of its own.
        count = len(os.sched_getaffinity(0))
        yield [Stage(Path(folder) / str(n), torture_model, command_server) for n in range(count)]


def cells(stage: Stage, scene: Scene) -> list[Cell]:
    """Every step of a scene, the first and the last time that it comes to it."""
    return [
        Cell(scene, point, nth, fault)
        for point, count in Counter(stage.points(scene)).items()
        if point.startswith(scene.points)
        for nth in sorted({1, count})
        for fault in scene.faults
    ]


def test_h07_every_step_that_fails_in_every_way_loses_and_doubles_nothing(
    stages: Sequence[Stage], tmp_path: Path, note: Note
) -> None:
    first = Scene("run")
    stages[0].set(first)
    assert stages[0].run(first).wait() == 0
    expected = stages[0].job.results()
    finished = shutil.copytree(stages[0].job.out, tmp_path / "finished")
    scenes = [
        first,
        Scene("retry", ("output.retry_errors=true",), finished, ("switch", "replace"), REPLACING),
        Scene("overwrite", ("output.overwrite=true",), finished, ("clear",)),
    ]
    todo = [cell for scene in scenes for cell in cells(stages[0], scene)]

    def play(lot: tuple[Stage, Sequence[Cell]]) -> list[tuple[Cell, str]]:
        stage, mine = lot
        return [(cell, stage.play(cell, expected)) for cell in mine]

    lots = [(stage, todo[n :: len(stages)]) for n, stage in enumerate(stages)]
    with ThreadPoolExecutor(len(stages)) as pool:
        outcome = {cell: wrong for lot in pool.map(play, lots) for cell, wrong in lot}
    note(table({cell: outcome[cell] for cell in todo}))
    failures = [f"{cell}: {wrong}" for cell, wrong in outcome.items() if wrong]
    assert not failures, "\n\n".join(failures)


def table(outcome: Mapping[Cell, str]) -> str:
    """The fault matrix: a line for each step, a column for each fault."""
    rows: dict[str, dict[str, str]] = {}
    for cell, wrong in outcome.items():
        name = f"{cell.scene.name}: {cell.point}" + (f" #{cell.nth}" if cell.nth > 1 else "")
        rows.setdefault(name, {})[cell.fault] = "FAILED" if wrong else "ok"
    width = max(map(len, rows))
    head = f"\n{'step':{width}}  " + "  ".join(f"{fault:12}" for fault in FAULTS)
    lines = (
        f"{name:{width}}  " + "  ".join(f"{found.get(fault, '-'):12}" for fault in FAULTS)
        for name, found in rows.items()
    )
    return "\n".join([head, *lines])


def test_fifty_kills_at_random_moments_lose_and_double_nothing(
    tmp_path: Path, torture_model: Path, command_server: CommandServer, note: Note
) -> None:
    torture = Torture(KilledJob(tmp_path, torture_model), command_server, Random(20))
    torture.run(50)
    assert sum(torture.kills.values()) == 50
    note(report(torture))
