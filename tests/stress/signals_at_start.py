"""Signal the command at random moments of its start, and check how it ends.

    python -m tests.stress.signals_at_start                  # 100 runs of each kind
    python -m tests.stress.signals_at_start --runs 1000 --seed 3

The command is started as from a shell, with all its imports, and is sent SIGTERM, SIGINT or
SIGHUP, the same twice, or SIGKILL within its first seconds. It must end with 75 and without a
traceback, unless it was done before; where the interpreter had not reached our code yet, the
signal may end it, too. After each of them the output directory must be fit for the same command.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.killed_job import make_model

KINDS: dict[str, tuple[signal.Signals, ...]] = {
    "TERM": (signal.SIGTERM,),
    "INT": (signal.SIGINT,),
    "HUP": (signal.SIGHUP,),
    "TERM twice": (signal.SIGTERM, signal.SIGTERM),
    "KILL": (signal.SIGKILL,),
}
# What `python -m` needs to come to the first line of ours, on a busy machine.
INTERPRETER_S = 0.3
DEADLINE_S = 120.0


@dataclass
class Starts:
    """Starts commands and signals them.

    Attributes:
        folder: holds model, input and outputs.
        draw: makes the moments.
        outcomes: exit codes so far, by kind of signal.
    """

    folder: Path
    draw: random.Random
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = make_model(self.folder / "model")
        rows = [{"id": n, "prompt": f"The quick brown fox {n}"} for n in range(4)]
        pq.write_table(pa.Table.from_pylist(rows), self.folder / "input.parquet")

    @property
    def commands(self) -> list[list[str]]:
        """The commands that are started in turn: a run, a plan, a sweep, the help."""
        job = [
            f"model.path={self.model}",
            f"input.path={self.folder / 'input.parquet'}",
            "sampling.max_tokens=4",
            "pool.num_blocks=64",
        ]
        run = [*job, f"output.dir={self.folder / 'run'}"]
        sweep = [*job, f"output.dir={self.folder}/sweep-${{pool.block_size}}"]
        return [run, [*run, "mode=plan"], ["-m", *sweep, "pool.block_size=8,16"], ["--help"]]

    def run(self, kind: str, arguments: Sequence[str], after_s: float) -> str:
        """Start a command, signal it, and return how it ended.

        Raises:
            AssertionError: it ended in a way that it must not.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "batchgen", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _wait(process, after_s)
            for number in KINDS[kind]:
                process.send_signal(number)
                _wait(process, self.draw.random() * 0.05)
            _, said = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
        code = process.returncode
        allowed = {0, -signal.SIGKILL} if kind == "KILL" else {0, 75}
        if after_s < INTERPRETER_S:
            allowed.add(-KINDS[kind][0])
        assert code in allowed, f"{kind} after {after_s:.3f} s: {code}\n{said}"
        # A KeyboardInterrupt of the interpreter's own start is not ours to prevent.
        assert code < 0 or "Traceback" not in said, said
        return str(code)

    def check(self, runs: int, span_s: float) -> None:
        """Signal so many runs of every kind within the first seconds.

        Raises:
            AssertionError: one ended in a way that it must not, or left what cannot be resumed.
        """
        for kind in KINDS:
            count = self.outcomes.setdefault(kind, Counter())
            for number in range(runs):
                arguments = self.commands[number % len(self.commands)]
                count[self.run(kind, arguments, self.draw.random() * span_s)] += 1
        for arguments in self.commands:
            done = subprocess.run(
                [sys.executable, "-m", "batchgen", *arguments], check=False, capture_output=True
            )
            assert done.returncode == 0, done.stderr.decode()


def _wait(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def main() -> None:
    """Read the arguments, signal, and say how the runs ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100, help="runs of each kind")
    parser.add_argument("--seconds", type=float, default=5.0, help="the span of the signals")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        starts = Starts(Path(folder), random.Random(arguments.seed))
        starts.check(arguments.runs, arguments.seconds)
    for kind, count in starts.outcomes.items():
        shown = ", ".join(f"{number} with {code}" for code, number in count.most_common())
        print(f"{kind}: {shown}")


if __name__ == "__main__":
    main()
