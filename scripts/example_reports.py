"""Make outputs whose reports show what a report can look like; no real model is needed.

    python scripts/example_reports.py --to out/examples
    python scripts/example_reports.py --to out/examples --only small,failed
    python scripts/screenshot_report.py out/examples/* --to out/pictures

`small` is a few rows through a tiny random model. `failed` has rows that fail in several ways
and texts that would be markup. `stopped` is told to stop half-way. `large` has 100,000 rows
(`--rows`) whose tokens come from a counter instead of a model, in a pool that is too small.
"""

import argparse
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from job_rows import positive
from torture_job import composed, make_model, run_composed

from batchgen.engine.core import FinishedOutput
from batchgen.engine.step import StepOutput, StepPlan
from batchgen.runtime.executor import ModelExecutor

SEED = 20_241_130
_WORDS = [
    "the",
    "a",
    "one",
    "this",
    "that",
    "price",
    "weather",
    "river",
    "answer",
    "question",
    "model",
    "report",
    "table",
    "number",
    "house",
    "green",
    "early",
    "late",
    "small",
    "large",
    "good",
    "bad",
    "quick",
    "slow",
    "bright",
    "calm",
    "open",
    "closed",
    "first",
    "last",
]
_TASKS = (
    "Summarise the note in one sentence.",
    "Name the sentiment of the note.",
    "List the places that the note names.",
)


@contextmanager
def counted_tokens(stop_after: int | None = None) -> Iterator[None]:
    """Let tokens come from a counter: a step costs what planning and rows cost.

    Args:
        stop_after: steps after which the process is told to stop.
    """
    steps = 0

    def execute(self: ModelExecutor, plan: StepPlan) -> FinishedOutput:
        nonlocal steps
        steps += 1
        if steps == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        numbers = np.arange(len(plan.samples), dtype=np.int64)
        # Letters of a vocabulary of bytes.
        return FinishedOutput(StepOutput(65 + (steps * 7 + numbers * 13) % 26))

    with mock.patch.object(ModelExecutor, "execute", execute):
        yield


def _note(rng: np.random.Generator, words: int) -> str:
    return " ".join(rng.choice(_WORDS, words).tolist())


def shared_rows(rows: int) -> Iterator[dict[str, Any]]:
    """Notes under one of a few instructions, of many lengths."""
    rng = np.random.default_rng(SEED)
    for number in range(rows):
        task = _TASKS[number % len(_TASKS)]
        words = int(np.clip(rng.lognormal(1.3, 0.5), 1, 20))
        yield {
            "id": f"note-{number:06d}",
            "prompt": f"{task}\n\nNote: {_note(rng, words)}\nAnswer:",
        }


def failing_rows() -> Iterator[dict[str, Any]]:
    """Rows that fail in several ways, and rows whose text would be markup."""
    for number, row in enumerate(shared_rows(60)):
        own: dict[str, Any] = {}
        if number % 15 == 4:
            own = {"prompt": None}
        elif number % 20 == 7:
            own = {"prompt": "<script>alert('row')</script> & \"quoted\" " * 12}
        elif number % 20 == 9:
            own = {"prompt": ""}
        elif number % 20 == 13:
            own = {"sampling_params": json.dumps({"temperature": -1})}
        elif number % 20 == 16:
            own = {"id": f"<b>{number}</b>", "prompt": "<img src=x onerror=alert(1)> says & more"}
        yield {"sampling_params": None} | row | own


def run(folder: Path, model: Path, rows: list[dict[str, Any]], **keys: str) -> None:
    """Run one example over some rows."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder.parent / f"{folder.name}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), source)
    given = {
        "model.path": str(model),
        "input.path": str(source),
        "output.dir": str(folder),
        "output.overwrite": "true",
        "engine.attention": "torch",
        **{name.replace("__", "."): value for name, value in keys.items()},
    }
    code = run_composed(composed(given))
    print(f"{folder}: exit code {code}")


def main() -> None:
    """Read the command line and run the examples."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="the folder of the outputs")
    parser.add_argument("--rows", type=positive, default=100_000, help="rows of `large`")
    parser.add_argument("--only", default="small,failed,stopped,large", help="which examples")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    model = make_model(options.to / "_model")
    wanted, to = options.only.split(","), options.to
    if "small" in wanted:
        rows = list(shared_rows(48))
        run(to / "small", model, rows, sampling__max_tokens="12", pool__num_blocks="400")
    if "failed" in wanted:
        keys = {"sampling__max_tokens": "12", "pool__num_blocks": "16", "pool__swap_blocks": "8"}
        run(to / "failed", model, list(failing_rows()), errors__max_rate="0.5", **keys)
    if "stopped" in wanted:
        with counted_tokens(stop_after=400):
            keys = {"sampling__max_tokens": "40", "pool__num_blocks": "2000"}
            run(to / "stopped", model, list(shared_rows(4000)), **keys)
    if "large" in wanted:
        keys = {
            "pool__num_blocks": "600",
            "pool__swap_blocks": "300",
            "engine__max_num_seqs": "256",
            "engine__admission": "prompt",
        }
        with counted_tokens():
            run(
                to / "large",
                model,
                list(shared_rows(options.rows)),
                sampling__max_tokens="24",
                **keys,
            )


if __name__ == "__main__":
    main()
