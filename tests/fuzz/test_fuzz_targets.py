"""A few inputs of the quick fuzzers in every run of the suite, always the same ones."""

from pathlib import Path
from typing import Any

import pytest
from fuzz import TARGETS
from hypothesis import HealthCheck, given, settings

EXAMPLES = {"reader": 150, "overrides": 20}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_no_input_breaks_what_must_hold(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]

    with target.opened(tmp_path) as check:

        @settings(
            max_examples=EXAMPLES[name],
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(target.inputs(tmp_path))
        def attempt(example: Any) -> None:
            check(example)

        attempt()
