"""The kernels' checks in Triton's interpreter, in a process of their own.

The interpreter is on or off for a whole process, and compiling ahead of time fails where it
is on.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_kernels_are_right_in_the_interpreter() -> None:
    checks = sorted(str(path) for path in (HERE / "interpreted").glob("check_*.py"))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--durations=5", *checks]
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
