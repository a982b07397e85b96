"""Time batchgen against transformers' static batching, interleaved in one process.

    python scripts/bench.py                          # 256 rows, each engine once
    python scripts/bench.py --rows 256 --repeats 3 --static-rows 64

Both make the same number of tokens for each row, in float32, from the same token ids. Rows
per second are medians over the repeats, from ids to text, without loading the model. Let
nothing else run meanwhile.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fetch_model import fetch_model
from job_rows import JobRows, compose_job, open_rows, positive
from prepare_data import prepare_data
from stock import load_stock

from batchgen.cli.escapes import in_quotes
from batchgen.config import Config
from batchgen.errors import BatchgenError
from batchgen.job.load import load_job_model
from batchgen.prompts.plan import Plan

STATIC_BATCH = 16
ENGINES = ("ours", "static")


def few_shot() -> list[str]:
    """Few-shot labels of review sentences: a long shared prefix, 8 tokens out."""
    return [
        "job=sentiment",
        f"model.path={in_quotes(str(fetch_model()))}",
        f"input.path={in_quotes(str(prepare_data() / 'reviews.parquet'))}",
        "model.dtype=float32",
        "sampling.max_tokens=8",
        "sampling.ignore_eos=true",
        "sampling.stop=[]",
    ]


# Each gives the arguments of a job whose outputs have a fixed length.
WORKLOADS: dict[str, Callable[[], list[str]]] = {"few_shot": few_shot}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one engine.

    Attributes:
        outputs: tokens generated for each row, by its position in the input.
        seconds: from token ids to text.
        prefill_tokens: prompt tokens that went through the model, padding included.
        plan: ours alone: what was to be computed.
    """

    outputs: dict[int, list[int]]
    seconds: float
    prefill_tokens: int
    plan: Plan | None = None

    @property
    def rows_per_s(self) -> float:
        """Rows finished in a second."""
        return len(self.outputs) / self.seconds


class Ours:
    """batchgen with the job's own keys."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._model = load_job_model(config)

    def run(self, rows: JobRows) -> Measurement:
        """Run all rows."""
        run = rows.run(self._config, self._model)
        outputs = {
            answer.row_index: list(answer.output_token_ids or ()) for answer in run.answers.values()
        }
        return Measurement(outputs, run.seconds, run.prefill_tokens, run.plan)


class Static:
    """transformers' ``generate`` over batches of rows of like length, padded on the left.

    Args:
        limit: how many rows to run, spread evenly; None for all.
    """

    def __init__(self, config: Config, limit: int | None) -> None:
        self._max_tokens = config.sampling.max_tokens
        self._limit = limit
        self._model = load_stock(config, torch.float32, "sdpa").model

    def run(self, rows: JobRows) -> Measurement:
        """Run the rows, the longest first."""
        store, tokenizer = rows.store, rows.inputs.tokenizer
        chosen = spread(store.good_rows.tolist(), self._limit)
        started = time.perf_counter()
        chosen.sort(key=lambda row: -store.lengths[row])
        outputs: dict[int, list[int]] = {}
        prefill_tokens = 0
        for start in range(0, len(chosen), STATIC_BATCH):
            batch = chosen[start : start + STATIC_BATCH]
            prompts = [store.ids(row).tolist() for row in batch]
            prefill_tokens += len(prompts) * max(map(len, prompts))
            generated = self._generate(prompts)
            if tokenizer is not None:
                tokenizer.batch_decode(generated, skip_special_tokens=True)
            indices = store.row_index[batch].tolist()
            outputs |= dict(zip(indices, generated, strict=True))
        return Measurement(outputs, time.perf_counter() - started, prefill_tokens)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        device = self._model.device
        output: Any = self._model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=self._max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[list[int]] = output[:, width:].tolist()
        return tokens


def spread(rows: list[int], limit: int | None) -> list[int]:
    """Choose some rows at even distances."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[index * len(rows) // limit] for index in range(limit)]


@dataclass(slots=True)
class Results:
    """All measurements of one workload, by engine, in the order they were made."""

    runs: dict[str, list[Measurement]] = field(default_factory=dict)

    def rows_per_s(self, engine: str) -> float:
        """Give an engine's median over the repeats."""
        return statistics.median(run.rows_per_s for run in self.runs[engine])

    def describe(self) -> str:
        """Say speeds, ratios, computed tokens and agreement."""
        lines = [self._speed(engine) for engine in self.runs]
        ours = self.runs.get("ours", [])
        others = [engine for engine in self.runs if engine != "ours" and ours]
        lines += [
            f"ours is {self.rows_per_s('ours') / self.rows_per_s(engine):.2f} x {engine}"
            for engine in others
        ]
        lines += [_prefill(run.prefill_tokens, run.plan) for run in ours[:1] if run.plan]
        lines += [_agreement(ours[0], self.runs[engine][0], engine) for engine in others]
        return "\n".join(lines)

    def _speed(self, engine: str) -> str:
        runs = self.runs[engine]
        each = ", ".join(f"{run.seconds:.2f}" for run in runs)
        return (
            f"{engine:<8} {self.rows_per_s(engine):8.2f} rows/s; {len(runs[0].outputs)} rows in "
            f"{each} s; prefill {runs[0].prefill_tokens:,} tokens"
        )


def _prefill(computed: int, plan: Plan) -> str:
    floor, floor_block = plan.prefill_tokens_floor, plan.prefill_tokens_floor_block
    return (
        f"prefill of ours: {computed:,} tokens, {computed / floor_block:.3f} x the floor by blocks "
        f"({floor_block:,}), {computed / floor:.3f} x E_1 ({floor:,}); without sharing "
        f"{plan.request_tokens:,}; {plan.num_duplicates} rows are duplicates"
    )


def _agreement(ours: Measurement, other: Measurement, engine: str) -> str:
    equal = sum(ours.outputs.get(row) == tokens for row, tokens in other.outputs.items())
    return f"tokens equal to {engine}: {equal} of {len(other.outputs)} rows"


def make_engines(names: Sequence[str], config: Config, static_rows: int | None) -> dict[str, Any]:
    """Load each engine once."""
    makers: dict[str, Callable[[], Any]] = {
        "ours": lambda: Ours(config),
        "static": lambda: Static(config, static_rows),
    }
    return {name: makers[name]() for name in names}


def measure(rows: JobRows, engines: dict[str, Any], repeats: int) -> Results:
    """Run the engines in turn, so that a machine that slows down slows all of them."""
    results = Results({name: [] for name in engines})
    for repeat in range(repeats):
        for name, engine in engines.items():
            print(f"run {repeat + 1} of {repeats}: {name}", file=sys.stderr, flush=True)
            results.runs[name].append(engine.run(rows))
    return results


def bench(
    arguments: Sequence[str],
    *,
    rows: int,
    engines: Sequence[str],
    repeats: int,
    static_rows: int | None,
) -> Results:
    """Measure a job's first rows.

    Raises:
        BatchgenError: as ``python -m batchgen`` with these arguments.
    """
    config = compose_job(arguments)
    # The workload's own number of rows, not that of the job folder it comes from.
    config = replace(config, input=replace(config.input, limit=None))
    with open_rows(config, rows) as tokenised:
        return measure(tokenised, make_engines(engines, config, static_rows), repeats)


def main() -> int:
    """Measure, print, and give the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [key=value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="few_shot")
    parser.add_argument("--engines", type=_engines, default=ENGINES, help=",".join(ENGINES))
    parser.add_argument("--rows", type=positive, default=256)
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--static-rows", type=positive, help="static batching on so many rows")
    options, overrides = parser.parse_known_args()
    given = vars(options)
    arguments = [*WORKLOADS[given.pop("workload")](), *overrides]
    try:
        print(bench(arguments, **given).describe())
    except BatchgenError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    return 0


def _engines(text: str) -> list[str]:
    names = text.split(",")
    unknown = set(names) - set(ENGINES)
    if unknown:
        raise argparse.ArgumentTypeError(f"{text}: choose from {','.join(ENGINES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
