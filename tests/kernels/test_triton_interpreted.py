"""The kernels' checks in Triton's interpreter, each file in a process of its own.

The interpreter is on or off for a whole process, and compiling ahead of time fails where it
is on.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))


@pytest.mark.parametrize("file", CHECKS, ids=lambda file: file.stem)
def test_kernels_are_right_in_the_interpreter(file: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--durations=5", str(file)]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
