"""Fuzz the reader, the templates, the command line and the resume for as long as you like.

    python scripts/fuzz.py reader --minutes 10
    python scripts/fuzz.py resume template --minutes 60 --seed 3

Inputs come from hypothesis, of another seed each round. A round is a process of its own, so that
what kills the process is found as well: it writes down each input before it tries it. Prints how
many inputs were tried and each fault with the smallest input that shows it; exits with 1 where
there are any.
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
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzzing import overrides, reader, resume, templates
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning

Opened = Callable[[Path], AbstractContextManager[Callable[[Any], None]]]

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
        tried: inputs.
        faults: by the place and kind of the error, its text.
    """

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
            target=_play, args=(target, number, seconds, folder)
        )
        process.start()
        process.join()
        notes = json.loads((folder / "notes.json").read_text())
        self.tried += notes["tried"]
        self.faults |= notes["faults"]
        if process.exitcode:
            how = signal.Signals(-process.exitcode).name if process.exitcode < 0 else "exit"
            self.faults[f"process ended: {how}"] = notes["trying"]


def _play(target: Target, number: int, seconds: float, folder: Path) -> None:
    """Play one round, in a process of its own."""
    notes = {"tried": 0, "faults": {}, "trying": ""}
    begun = time.monotonic()
    place = folder / "place"
    place.mkdir()
    (folder / "notes.json").write_text(json.dumps(notes))

    with target.opened(place) as check:
        # Rounds within the round: hypothesis stops at the first fault.
        while time.monotonic() - begun < seconds:
            _examples(target, check, number + 1000 * notes["tried"], begun + seconds, notes, folder)
    (folder / "notes.json").write_text(json.dumps(notes))
    sys.stdout.flush()
    os._exit(0)


def _examples(
    target: Target,
    check: Callable[[Any], None],
    number: int,
    end: float,
    notes: dict[str, Any],
    folder: Path,
) -> None:
    @seed(number)
    @settings(
        max_examples=_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(target.inputs(folder / "place"))
    def attempt(example: Any) -> None:
        if time.monotonic() > end:
            return
        notes["tried"] += 1
        notes["trying"] = repr(example)[:_SHOWN]
        (folder / "notes.json").write_text(json.dumps(notes))
        signal.alarm(_HANG_S)
        try:
            check(example)
        finally:
            signal.alarm(0)

    try:
        attempt()
    except Exception as failure:
        # Where the time was over before a fault could be shown again.
        is_group = isinstance(failure, ExceptionGroup)
        error = failure.exceptions[0] if is_group else failure
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        notes["faults"][where] = f"{str(error)[:_SHOWN]}\ninput: {notes['trying']}"


def main() -> int:
    """Read the arguments, fuzz, and tell what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Of inputs too long to be shown.
    warnings.simplefilter("ignore", HypothesisWarning)
    found = 0
    for name in arguments.targets:
        hunt, begun = Hunt(), time.monotonic()
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
