"""A few inputs of each fuzzer in every run of the suite, always the same ones."""

import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.stress.fuzz import TARGETS, Hunt, Target
from tests.stress.fuzzing.resume import copy_over

EXAMPLES = {"reader": 150, "template": 300, "overrides": 20, "resume": 20}


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_input_breaks_what_must_hold(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]

    with target.opened(tmp_path) as check:

        @settings(
            max_examples=EXAMPLES[name],
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # tests/stress/fuzz.py makes what it finds small; here that would take minutes.
            phases=[Phase.generate],
        )
        @given(target.inputs(tmp_path))
        def attempt(example: Any) -> None:
            check(example)

        attempt()


def test_a_file_that_is_copied_over_itself_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_text("rows")
    copy_over(path, path)
    assert path.read_text() == "rows"
    copy_over(path, tmp_path / "other")
    assert (tmp_path / "other").read_text() == "rows"


def target(check: Callable[[int], None]) -> Target:
    class Opened:
        def __init__(self, folder: Path) -> None:
            assert folder.is_dir()

        def __enter__(self) -> Callable[[int], None]:
            return check

        def __exit__(self, *_: object) -> None:
            pass

    return Target(lambda _: st.integers(0, 1000), Opened)


def test_a_hunt_counts_its_inputs_and_shrinks_what_it_finds(tmp_path: Path) -> None:
    def check(number: int) -> None:
        assert number < 17, "too large"

    hunt = Hunt()
    hunt.run(target(check), 0.1, 0, tmp_path)
    assert hunt.tried > 10
    (found,) = hunt.faults.values()
    assert found.startswith("too large")
    assert found.endswith("input: 17")


def test_a_hunt_survives_what_kills_a_process_and_names_the_input(tmp_path: Path) -> None:
    def check(number: int) -> None:
        if number > 500:
            # pytest's would fill the log with a crash that is meant.
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)

    hunt = Hunt()
    hunt.run(target(check), 0.05, 0, tmp_path)
    (where,) = hunt.faults
    assert "SIGSEGV" in where
    assert int(hunt.faults[where]) > 500
