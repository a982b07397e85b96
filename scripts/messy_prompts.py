"""What normalisation and the plan's advice win back on a deliberately messy set of prompts.

    python scripts/messy_prompts.py                 # plans only: hit tokens of the three forms
    python scripts/messy_prompts.py --run 300       # and a run of some rows in each form

The rows are real review sentences (scripts/prepare_data.py) under the examples of
jobs/sentiment. What is messy is the frame around them, as prompts come out of a pipeline of
many hands: its unicode form, its line ends and its blanks change from row to row, the examples
stand in any order, and a time stamp stands in front of all.

as it comes   the template over those columns
normalised    the same with prompt.normalize over the two columns that hold the frame
advised       and the time stamp behind what is shared, as the plan advises
"""

import argparse
import json
import random
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from job_rows import positive
from prepare_data import SHOTS_FILE, prepare_data

from batchgen.cli import app

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "smollm2-135m-instruct"
FRAME = (
    "Each review sentence is labelled as positive or negative.\n"
    "Names keep their spelling: Café Müller, naïve, résumé.\n"
)
EXAMPLES = (
    "{% for shot in shots %}Review: {{ shot.text }}\nSentiment: {{ shot.answer }}\n\n{% endfor %}"
)
QUESTION = "Review: {{ text }}\nSentiment:"
AS_IT_COMES = f"[{{{{ now }}}}]\n{{{{ frame }}}}\n{EXAMPLES}{QUESTION}"
ADVISED = f"{{{{ frame }}}}\n{EXAMPLES}[{{{{ now }}}}]\n{QUESTION}"
NORMALIZE = (
    "prompt.normalize.unicode=nfc",
    "prompt.normalize.line_ends=true",
    "prompt.normalize.trailing_space=true",
    "prompt.normalize.shots_order=true",
    "prompt.normalize.columns=[frame,shots]",
)


@dataclass(frozen=True)
class Form:
    """A way to make the prompts of the messy rows."""

    name: str
    template: str
    keys: Sequence[str]


FORMS = (
    Form("as it comes", AS_IT_COMES, ()),
    Form("normalised", AS_IT_COMES, NORMALIZE),
    Form("advised", ADVISED, NORMALIZE),
)


def messy_rows(sentences: Sequence[str], seed: int = 0) -> list[dict[str, Any]]:
    """Put each sentence beside a frame of its own spelling."""
    chance = random.Random(seed)
    shots = [json.loads(line) for line in SHOTS_FILE.read_text(encoding="utf-8").splitlines()]
    start = datetime(2025, 3, 1, 2, 30)
    rows = []
    for number, text in enumerate(sentences):
        order = chance.sample(shots, len(shots))
        rows.append(
            {
                "id": number,
                "now": (start + timedelta(seconds=37 * number)).isoformat(sep=" "),
                "frame": messy(FRAME, chance),
                "shots": [
                    {"text": messy(shot["text"], chance), "answer": shot["answer"]}
                    for shot in order
                ],
                "text": text,
            }
        )
    return rows


def messy(text: str, chance: random.Random) -> str:
    """Spell a text as one of many hands would."""
    text = unicodedata.normalize(chance.choice(["NFC", "NFD"]), text)
    lines = [line + " " * chance.choice([0, 0, 1, 2]) for line in text.split("\n")]
    return chance.choice(["\n", "\r\n"]).join(lines)


def plan_of(form: Form, data: Path, out: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Plan one form of the prompts."""
    if app.main([*arguments(form, data, out, keys), "mode=plan"]):
        raise SystemExit(1)
    plan: dict[str, Any] = json.loads((out / "_plan.json").read_text(encoding="utf-8"))
    return plan


def run_of(form: Form, data: Path, out: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Run one form of the prompts."""
    if app.main([*arguments(form, data, out, keys), "output.overwrite=true"]):
        raise SystemExit(1)
    summary: dict[str, Any] = json.loads((out / "_summary.json").read_text(encoding="utf-8"))
    return summary


def arguments(form: Form, data: Path, out: Path, keys: Sequence[str]) -> list[str]:
    """Give the command of one form."""
    template = out.parent / f"{form.name.replace(' ', '-')}.j2"
    template.parent.mkdir(parents=True, exist_ok=True)
    template.write_text(form.template, encoding="utf-8")
    given = [
        f"model.path={MODEL}",
        f"input.path={data}",
        f"output.dir={out}",
        f"prompt.template_file={template}",
        "prompt.format=plain",
        "sampling.max_tokens=4",
        'sampling.stop=["\\n"]',
    ]
    return [*given, *form.keys, *keys]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=positive, default=2000, help="rows that are planned")
    parser.add_argument("--run", type=positive, help="rows that are run in each form as well")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "messy")
    parser.add_argument("keys", nargs="*", help="further key=value of the job")
    options = parser.parse_args(given)
    reviews = pq.read_table(prepare_data() / "reviews.parquet").to_pylist()[: options.rows]
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(messy_rows([row["text"] for row in reviews])), data)
    lines = [f"{'form':12} {'prompt tokens':>13} {'hit tokens':>11} {'share':>6}"]
    for form in FORMS:
        plan = plan_of(form, data, options.out / form.name.replace(" ", "-"), options.keys)
        hits = plan["request_tokens"] - plan["prefill_tokens_floor"]
        lines.append(
            f"{form.name:12} {plan['request_tokens']:>13,} {hits:>11,} "
            f"{hits / plan['request_tokens']:>6.1%}  {json.dumps(plan['normalized'])}"
        )
    if options.run:
        lines.append(f"{'run':12} {'rows':>6} {'prefill tokens':>14} {'generate_s':>10}")
    for form in FORMS if options.run else ():
        out = options.out / f"{form.name.replace(' ', '-')}-run"
        summary = run_of(form, data, out, [*options.keys, f"input.limit={options.run}"])
        lines.append(
            f"{form.name:12} {summary['rows']:>6,} {summary['prefill_tokens_computed']:>14,} "
            f"{summary['phases']['generate_s']:>10.1f}"
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
