"""Hold JSON outputs of the real model against their schema, and time the masks.

    python scripts/check_json_outputs.py
    python scripts/check_json_outputs.py --rows 64

The sentiment job's sentences, with a JSON schema in the place of the label. Every output that
finished (not cut by max_tokens) is parsed and validated with `jsonschema`. Time is told of the
whole generate phase: what making and applying the masks takes of it. Exit code 1 where an output
is not valid, or the masks take more than 5% of the steps. Let nothing else run meanwhile.
Other keys of batchgen can follow.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from fetch_model import fetch_model
from job_rows import compose_job, open_rows, positive
from jsonschema import Draft202012Validator
from prepare_data import prepare_data

from batchgen.job.load import load_job_model
from batchgen.runtime import sampler

SCHEMA = {
    "type": "object",
    "properties": {
        "sentiment": {"enum": ["positive", "negative", "mixed"]},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
        "about": {"type": "string", "maxLength": 30},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["sentiment", "confidence", "about", "words"],
    "additionalProperties": False,
}
MOST_OVERHEAD = 0.05


class Stopwatch:
    """A function that counts the seconds spent in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.seconds = 0.0
        self._function = function

    def __call__(self, *given: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._function(*given)
        finally:
            self.seconds += time.perf_counter() - started


def invalid(texts: list[str]) -> list[str]:
    """Give those texts that are not JSON of the schema."""
    validator = Draft202012Validator(SCHEMA)

    def is_valid(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except json.JSONDecodeError:
            return False

    return [text for text in texts if not is_valid(text)]


def main() -> int:
    """Run the rows and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=positive, default=500)
    options, keys = parser.parse_known_args()
    config = compose_job(
        [
            "job=sentiment",
            f"model.path={fetch_model()}",
            f"input.path={prepare_data() / 'reviews.parquet'}",
            "input.limit=null",
            f"structured.json={json.dumps(json.dumps(SCHEMA))}",
            "sampling.stop=[]",
            "sampling.max_tokens=96",
            *keys,
        ]
    )
    masks = Stopwatch(sampler._constrain)
    with open_rows(config, options.rows) as rows, patch.object(sampler, "_constrain", masks):
        run = rows.run(config, load_job_model(config))
    ended = [row for row in run.answers.values() if row.finish_reason == "stop"]
    finished = [row.generated_text or "" for row in ended]
    bad = invalid(finished)
    share = masks.seconds / run.model_s
    print(f"rows {len(run.answers)}, finished {len(finished)}, of these not valid {len(bad)}")
    print(
        f"masks {masks.seconds:.2f} s of {run.model_s:.1f} s of steps ({share:.1%}); "
        f"{len(run.answers) / run.generate_s:.1f} rows/s"
    )
    print("\n".join(finished[:3]))
    print("\n".join(f"not valid: {text!r}" for text in bad[:5]))
    return 1 if bad or share > MOST_OVERHEAD or not finished else 0


if __name__ == "__main__":
    sys.exit(main())
