"""Fuzzing the resume: files of an output are deleted, cut and changed, then the command runs."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.stress.fuzzing.bytes import Edit, apply, edits
from tests.stress.torture import FAILPOINT
from tests.support.command_server import CommandServer, Run
from tests.support.killed_job import KilledJob, Results, make_model

# Where runs are killed whose outputs are then damaged; the last one is not killed.
KILLS = (
    *("prompts.durable:kill:1", "part.synced:kill:1", "part.durable:kill:2", "switch.durable:kill"),
    *("replace.removed:kill:1", "replace.moved:kill:1", "summary.durable:kill:1", None),
)
_REFUSED = (1, 2)


class What(StrEnum):
    """What is done to a file."""

    DELETE = "delete"
    EMPTY = "empty"
    EDIT = "edit"
    COPY = "copy"
    PART = "part"
    FOLDER = "folder"
    OVER = "over"


@dataclass(frozen=True)
class Harm:
    """One change of the output directory.

    Attributes:
        what: which.
        file: which of the files, modulo their number, in order of their names.
        other: which file is copied over it, likewise.
        edits: of its bytes.
    """

    what: What
    file: int
    other: int
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Input:
    """An output directory and what happens to it.

    Attributes:
        state: which of ``KILLS`` it was left by.
        harms: one after another.
    """

    state: int
    harms: tuple[Harm, ...]


_HARM = st.builds(
    Harm, st.sampled_from(What), st.integers(0, 30), st.integers(0, 30), edits(at_least=1)
)
INPUTS = st.builds(
    Input,
    st.integers(0, len(KILLS) - 1),
    st.lists(_HARM, min_size=1, max_size=3).map(tuple),
)


class Scene:
    """A job, the outputs that killed runs of it left, and its undisturbed results.

    Attributes:
        outcomes: how often the damaged outputs were completed, refused, or completed around
            a part that only a reader that verifies checksums finds damaged.
    """

    def __init__(self, folder: Path, model: Path, command_server: CommandServer) -> None:
        self.outcomes = {"completed": 0, "refused": 0, "damage left": 0}
        self._job = KilledJob(folder, model)
        self._command_server = command_server
        self._states = [self._state(folder / f"state{n}", kill) for n, kill in enumerate(KILLS)]
        self._expected = self._job.results()

    def check(self, given: Input) -> None:
        """Damage an output and run the command over it.

        Raises:
            AssertionError: it crashed, or its output lacks rows, has some twice or others.
        """
        self._restore(self._states[given.state])
        for harm in given.harms:
            self._inflict(harm)
        run = self._start()
        code = run.wait()
        assert "Traceback" not in run.said, run.said
        if code != 0:
            assert code in _REFUSED, f"{code}: {run.said}"
            assert "batchgen: " in run.said, run.said
            self.outcomes["refused"] += 1
            run = self._start({"output.overwrite": "true"})
            assert run.wait() == 0, run.said
        else:
            self.outcomes["completed"] += 1
        self._check_complete(run)

    def _check_complete(self, run: Run) -> None:
        """Compare the rows with the undisturbed ones; rows in damaged parts are not lost unseen."""
        found: Results = {}
        try:
            found = self._job.results()
        except AssertionError as error:
            if not _has_damage(self._job.parts()):
                raise AssertionError(f"{error}\n{run.said}") from error
            self.outcomes["damage left"] += 1
            return
        wrong = {key for key in found.keys() | self._expected.keys()
                 if found.get(key) != self._expected.get(key)}  # fmt: skip
        assert not wrong, f"{sorted(wrong)}\n{run.said}"
        assert (self._job.out / "_SUCCESS").exists(), run.said

    def _state(self, kept: Path, kill: str | None) -> Path:
        shutil.rmtree(self._job.out, ignore_errors=True)
        self._start(failpoint=kill).wait()
        return shutil.copytree(self._job.out, kept)

    def _restore(self, state: Path) -> None:
        shutil.rmtree(self._job.out, ignore_errors=True)
        shutil.copytree(state, self._job.out)

    def _start(self, more: dict[str, str] | None = None, failpoint: str | None = None) -> Run:
        environment = {} if failpoint is None else {FAILPOINT: failpoint}
        return self._command_server.start(
            self._job.given | (more or {}), self._job.log, environment
        )

    def _inflict(self, harm: Harm) -> None:
        files = sorted(path for path in self._job.out.rglob("*") if path.is_file())
        if not files:
            return
        path, other = files[harm.file % len(files)], files[harm.other % len(files)]
        match harm.what:
            case What.DELETE:
                path.unlink()
            case What.EMPTY:
                path.write_bytes(b"")
            case What.EDIT:
                path.write_bytes(apply(harm.edits, path.read_bytes()))
            case What.COPY:
                shutil.copyfile(path, path.with_name(f"_copy{harm.other}"))
            case What.PART:
                name = f"part-{harm.other:05}-0123abcd.parquet"
                copy_over(path, self._job.out / name)
            case What.FOLDER:
                path.unlink()
                path.mkdir()
            case What.OVER:
                copy_over(other, path)


def copy_over(source: Path, target: Path) -> None:
    """Copy a file over another, which may be itself."""
    with contextlib.suppress(shutil.SameFileError):
        shutil.copyfile(source, target)


def _has_damage(parts: Sequence[Path]) -> bool:
    """Whether a page of a part fails its checksum: loud damage, for who looks."""
    for part in parts:
        try:
            pq.read_table(part, page_checksum_verification=True)
        except (OSError, pa.ArrowException):
            return True
    return False


@contextmanager
def opened(folder: Path) -> Iterator[Callable[[Input], None]]:
    """Give what checks an input; the job lies in a folder."""
    model = make_model(folder / "model")
    with CommandServer(model) as command_server:
        scene = Scene(folder, model, command_server)
        yield scene.check
        print(", ".join(f"{count} {name}" for name, count in scene.outcomes.items()))
