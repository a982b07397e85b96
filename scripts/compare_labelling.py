"""Compare three ways of labelling real sentences: free text, one of two choices, scores.

    python scripts/compare_labelling.py
    python scripts/compare_labelling.py --rows 64 --out /tmp/labels

Each is a run of `python -m batchgen job=sentiment` over sentences of Amazon reviews whose label
is the side of a rating by 20 people (data/reviews.parquet), with the same eight shots. Of the
scores, the label is told twice: by the larger probability, and calibrated to equal shares of
both labels (`sampling.score_calibration=prior`), which asks the model for nothing more.

For each it gives the share of labels that agree with the people, the share that are legal at
all, rows per second of the generate phase, and the prefill that the plan predicted beside the
achieved. Exit code 1 where a choice or a score gives an illegal label, or a prediction is off
by more than 1%. Some 2,000 rows take two cores about ten minutes. Let nothing else run
meanwhile. Writes figures.json to --out. Other keys of batchgen can follow.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from fetch_model import ROOT, fetch_model
from job_rows import positive
from prepare_data import prepare_data

LABELS = ("positive", "negative")
# As the shots' answers stand behind "Sentiment:".
CHOICES = json.dumps([f" {label}" for label in LABELS])
MOST_PREFILL_ERROR = 0.01

Row = dict[str, Any]

WAYS = {
    "free text": (),
    "choice": (f"structured.choice={CHOICES}", "sampling.stop=[]"),
    "scores": (f"sampling.score_choices={CHOICES}", "sampling.score_calibration=prior"),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """How one way of labelling did.

    Attributes:
        way: its name.
        rows: output rows.
        legal: share of rows whose label is one of the two.
        agreed: share of rows whose label is that of the people.
        rows_per_s: rows over the generate phase.
        prefill_predicted, prefill_achieved: tokens, of the plan and of the run.
    """

    way: str
    rows: int
    legal: float
    agreed: float
    rows_per_s: float
    prefill_predicted: int
    prefill_achieved: int

    @property
    def prefill_error(self) -> float:
        """How far the prediction was off, as a share of the achieved."""
        return abs(self.prefill_predicted - self.prefill_achieved) / max(1, self.prefill_achieved)


def run_way(way: str, rows: int, out: Path, keys: Sequence[str]) -> Path:
    """Run the job in one way, anew, and give its output directory.

    Raises:
        CalledProcessError: the command failed.
    """
    directory = out / way.replace(" ", "-")
    command = [
        *(sys.executable, "-m", "batchgen", "job=sentiment"),
        f"model.path={fetch_model()}",
        f"input.path={prepare_data() / 'reviews.parquet'}",
        f"input.limit={rows}",
        f"output.dir={directory}",
        "output.overwrite=true",
        *WAYS[way],
        *keys,
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    return directory


def figures_of(way: str, directory: Path, reviews: Path) -> Iterator[Figures]:
    """Hold the output of one way against the people's labels."""
    summary = json.loads((directory / "_summary.json").read_text(encoding="utf-8"))
    people = pq.read_table(reviews, columns=["id", "label"])
    wanted = dict(zip(people["id"].to_pylist(), people["label"].to_pylist(), strict=True))
    rows = pq.read_table(directory).to_pylist()
    for name, label_of in LABEL_OF[way].items():
        answers = [(label_of(row) or "").strip() for row in rows]
        agreed = [wanted[row["id"]] == answer for row, answer in zip(rows, answers, strict=True)]
        yield Figures(
            way=name,
            rows=len(rows),
            legal=sum(answer in LABELS for answer in answers) / len(rows),
            agreed=sum(agreed) / len(rows),
            rows_per_s=len(rows) / summary["phases"]["generate_s"],
            prefill_predicted=summary["expected_prefill_tokens"],
            prefill_achieved=summary["prefill_tokens_computed"],
        )


def _written(row: Row) -> str | None:
    text: str | None = row["generated_text"]
    return text


def _likeliest(row: Row) -> str | None:
    scores = dict(row["label_logprobs"] or ())
    return max(scores, key=lambda label: scores[label], default=None)


def _calibrated(row: Row) -> str | None:
    label: str | None = row["label"]
    return label


LABEL_OF: dict[str, dict[str, Callable[[Row], str | None]]] = {
    "free text": {"free text": _written},
    "choice": {"choice": _written},
    "scores": {"scores": _likeliest, "scores, calibrated": _calibrated},
}


def table(found: Sequence[Figures]) -> str:
    """Write the figures of all ways under each other."""
    lines = [f"{'':20} {'rows':>6} {'legal':>7} {'agree':>7} {'rows/s':>7}  prefill: plan, run"]
    lines += [
        f"{each.way:20} {each.rows:>6} {each.legal:>7.1%} {each.agreed:>7.1%} "
        f"{each.rows_per_s:>7.1f}  {each.prefill_predicted:,}, {each.prefill_achieved:,} "
        f"({each.prefill_error:.2%} off)"
        for each in found
    ]
    return "\n".join(lines)


def complaints(found: Sequence[Figures]) -> list[str]:
    """Say what is not as it has to be."""
    said = [
        f"{each.way}: {1 - each.legal:.1%} of the labels are not legal"
        for each in found
        if each.legal < 1 and each.way != "free text"
    ]
    return said + [
        f"{each.way}: the predicted prefill is off by {each.prefill_error:.1%}"
        for each in found
        if each.prefill_error > MOST_PREFILL_ERROR
    ]


def main() -> int:
    """Run all ways and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=positive, default=2_000)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "labelling")
    options, keys = parser.parse_known_args()
    reviews = prepare_data() / "reviews.parquet"
    found: list[Figures] = []
    for way in WAYS:
        directory = run_way(way, options.rows, options.out.resolve(), keys)
        found += figures_of(way, directory, reviews)
    (options.out / "figures.json").write_text(
        json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8"
    )
    print(table(found))
    said = complaints(found)
    print("\n".join(said))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
