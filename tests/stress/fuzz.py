"""Fuzz the reader, the templates, the command line and the resume for as long as you like.

    python -m tests.stress.fuzz reader --minutes 10
    python -m tests.stress.fuzz resume template --minutes 60 --seed 3
    python -m tests.stress.fuzz reader --engine atheris

Inputs come from hypothesis, of another seed each round; with `--engine atheris` from atheris,
which is led by the code that they reach (see fuzzing/guided.py). A round is a process of its own,
so that what kills the process is found as well: it writes down each input before it tries it.
Prints how many inputs were tried and each fault with an input that shows it, which hypothesis has
made as small as it can; exits with 1 where there are any.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning

from tests.stress.fuzzing import guided, overrides, reader, resume, templates

Opened = Callable[[Path], AbstractContextManager[Callable[[Any], None]]]

ENGINES = ("hypothesis", "atheris")
_ROUND_S = 60.0
_EXAMPLES = 300
# An input that takes longer hangs; the signal's default ends the process.
_HANG_S = 90
_SHOWN = 3000


@dataclass(frozen=True)
class Target:
    """Something to fuzz.

    Attributes:
        inputs: given a folder, what is thrown at it.
        opened: given the same folder, what checks an input.
    """

    inputs: Callable[[Path], st.SearchStrategy[Any]]
    opened: Opened


TARGETS = {
    "reader": Target(lambda _: reader.INPUTS, reader.opened),
    "template": Target(templates.inputs, templates.opened),
    "overrides": Target(lambda _: overrides.INPUTS, overrides.opened),
    "resume": Target(lambda _: resume.INPUTS, resume.opened),
}


@dataclass
class Hunt:
    """What was tried and found.

    Attributes:
        engine: where inputs come from, one of ``ENGINES``.
        tried: inputs.
        faults: by the place and kind of the error, its text.
    """

    engine: str = "hypothesis"
    tried: int = 0
    faults: dict[str, str] = field(default_factory=dict)

    def run(self, target: Target, minutes: float, first_seed: int, folder: Path) -> None:
        """Play rounds until the time is over."""
        end, number = time.monotonic() + 60 * minutes, first_seed
        while time.monotonic() < end:
            left = end - time.monotonic()
            self._round(target, number, min(left, _ROUND_S), folder / str(number))
            number += 1

    def _round(self, target: Target, number: int, seconds: float, folder: Path) -> None:
        folder.mkdir(parents=True)
        process = multiprocessing.get_context("fork").Process(
            target=_play, args=(target, self.engine, number, seconds, folder)
        )
        process.start()
        process.join()
        notes = json.loads((folder / "notes.json").read_text())
        self.tried += notes["tried"]
        for where, text in notes["faults"].items():
            keep_shorter(self.faults, where, text)
        if process.exitcode:
            how = signal.Signals(-process.exitcode).name if process.exitcode < 0 else "exit"
            self.faults[f"process ended: {how}"] = notes["trying"]


def _play(target: Target, engine: str, number: int, seconds: float, folder: Path) -> None:
    """Play one round, in a process of its own."""
    notes = Notes(folder / "notes.json")
    place = folder / "place"
    place.mkdir()
    notes.write()

    with target.opened(place) as check:
        # On a busy machine the opening alone may take as long.
        notes.end = time.monotonic() + seconds
        if engine == "atheris":
            attempt = settings(database=None, deadline=None)(_attempt(target, check, notes, place))

            def noted(data: bytes) -> None:
                with notes.faults_noted():
                    attempt.hypothesis.fuzz_one_input(data)

            guided.play(noted, seconds, _HANG_S, folder.parent / "corpus")
        # Rounds within the round: hypothesis stops at the first fault.
        while not notes.is_over:
            _examples(_attempt(target, check, notes, place), number + 1000 * notes.tried, notes)
    notes.write()
    sys.stdout.flush()
    os._exit(0)


@dataclass
class Notes:
    """What a round has tried and found, in a file that outlives its process.

    Attributes:
        path: the file.
        end: when the round is over, by the monotonic clock.
        tried: inputs.
        faults: by the place and kind of the error, its text.
        trying: the input that is tried.
        failing: the last one that showed a fault.
    """

    path: Path
    end: float = 0.0
    tried: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    trying: str = ""
    failing: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the round's time is over."""
        return time.monotonic() > self.end

    def begin(self, example: Any) -> None:
        """Note an input before it is tried."""
        self.tried += 1
        self.trying = repr(example)[:_SHOWN]
        self.write()

    def write(self) -> None:
        """Bring the file up to date."""
        content = {"tried": self.tried, "faults": self.faults, "trying": self.trying}
        self.path.write_text(json.dumps(content))

    @contextmanager
    def faults_noted(self) -> Iterator[None]:
        """Note what is raised."""
        try:
            yield
        except Exception as failure:
            # Where the time was over before a fault could be shown again.
            is_group = isinstance(failure, ExceptionGroup)
            error = failure.exceptions[0] if is_group else failure
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            keep_shorter(self.faults, where, f"{str(error)[:_SHOWN]}\ninput: {self.failing}")
            self.write()


def keep_shorter(faults: dict[str, str], where: str, text: str) -> None:
    """Note a fault, unless a smaller input has shown it before."""
    if where not in faults or len(text) < len(faults[where]):
        faults[where] = text


def _attempt(
    target: Target, check: Callable[[Any], None], notes: Notes, place: Path
) -> Callable[[], None]:
    @given(target.inputs(place))
    def attempt(example: Any) -> None:
        if notes.is_over:
            return
        notes.begin(example)
        signal.alarm(_HANG_S)
        try:
            check(example)
        except Exception:
            # Where the time is over by then, hypothesis does not come back to it.
            notes.failing = notes.trying
            raise
        finally:
            signal.alarm(0)

    return attempt


def _examples(attempt: Callable[[], None], number: int, notes: Notes) -> None:
    """Try inputs of a seed, until there are enough or one shows a fault."""
    seeded = seed(number)(
        settings(
            max_examples=_EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            print_blob=False,
        )(attempt)
    )
    with notes.faults_noted():
        seeded()


def main() -> int:
    """Read the arguments, fuzz, and tell what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    arguments = parser.parse_args()
    # Of inputs too long to be shown.
    warnings.simplefilter("ignore", HypothesisWarning)
    found = 0
    for name in arguments.targets:
        hunt, begun = Hunt(arguments.engine), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            hunt.run(TARGETS[name], arguments.minutes, arguments.seed, Path(folder))
        minutes = (time.monotonic() - begun) / 60
        for where, text in hunt.faults.items():
            print(f"--- {name}: {where}\n{text}\n")
        print(f"{name}: {hunt.tried:,} inputs in {minutes:.1f} minutes, {len(hunt.faults)} faults")
        sys.stdout.flush()
        found += len(hunt.faults)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
