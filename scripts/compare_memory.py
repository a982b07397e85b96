"""Run the same rows under one KV budget through five ways of keeping KV, and compare them.

    python scripts/compare_memory.py                      # the demo's model on real text
    python scripts/compare_memory.py --rows 64 model.path=/models/qwen3-0.6b
    python scripts/compare_memory.py --no-model           # large shapes, the scheduler alone

The five are: a run of slots a row for the longest row there could be (contiguous, maximum);
a run a row for just its prompt and the output it turns out to have, first fit (contiguous,
first fit: no real system knows that length, so this is the best such a system could do);
blocks without a prefix cache; blocks whose prefixes are shared by whole blocks and evicted
least recently used first; and batchgen with all it has: rows in prefix order, sharing by the
token, eviction by the known future, swap. Only the last may reorder the rows.

Only admission and the count of memory differ. Rows with contiguous memory wait at a gate until
a run of slots fits; what then executes them is the same paged engine, over a pool large enough
that the gate alone decides.

Each row ends after a number of tokens drawn beforehand, which no scheduler knows. Time to the
first token counts from the start of the run, when all rows are there: waiting for memory is
part of it. With --no-model a step takes a fixed time and a time a token: seconds, tokens/s and
TTFT are then simulated, all else is counted.

Writes figures.json, figures.parquet and figures.png to --out.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from fetch_model import MODEL_DIR, ROOT, fetch_model
from memory_figures import notes, save, table
from memory_machines import Machine, ModelMachine, SimulatedMachine
from memory_rows import Shape, make_rows, random_stream, text_stream
from memory_runs import Figures, Ids, Limits, compare

from batchgen.errors import BatchgenError
from batchgen.prompts.tokenizer import load_tokenizer
from batchgen.runtime.model import ModelSource, load_model

# Shapes to start from; every entry is an option of the command.
WITH_MODEL = {
    "rows": 96,
    "groups": 4,
    "prompt_tokens": 296,
    "shared_tokens": [250],
    "output_tokens": 16,
    "spread": 0.5,
    "num_blocks": 160,
    "block_size": 16,
    "max_num_seqs": 64,
    "step_tokens": 512,
    "longest_tokens": 0,
}
# 16 rows of 4,096 tokens fill 4,096 blocks of 16; 205 blocks are the 80% that they share.
NO_MODEL = {
    **WITH_MODEL,
    "rows": 160,
    "groups": 1,
    "prompt_tokens": 3968,
    "shared_tokens": [0, 3280],
    "output_tokens": 128,
    "spread": 0.0,
    "num_blocks": 4096,
    "max_num_seqs": 256,
    "step_tokens": 8192,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, save, and give the exit code."""
    options = read_options(arguments)
    try:
        every = run(options)
        save(every, options.out)
    except BatchgenError as error:
        print(f"compare_memory: {error}", file=sys.stderr)
        return error.exit_code
    print(f"\nfigures and plot: {options.out}")
    return 0


def run(options: argparse.Namespace) -> list[Figures]:
    """Compare the variants for each number of shared tokens, and print the tables."""
    values = vars(options)
    machine, stream = open_machine(options)
    chosen = {item.name: values[item.name] for item in fields(Limits) if item.name in values}
    limits = Limits(**chosen, max_tokens=options.output_tokens)
    budget = limits.capacity * machine.bytes_per_token / 2**20
    print(
        f"KV budget: {limits.num_blocks:,} blocks of {limits.block_size} = {limits.capacity:,} "
        f"tokens, {budget:,.1f} MiB; steps of {limits.step_tokens:,} tokens"
    )
    if isinstance(machine, SimulatedMachine):
        print(machine.describe())
    every = []
    for shared_tokens in options.shared_tokens:
        shape = Shape(
            **{item.name: values[item.name] for item in fields(Shape)}
            | {"shared_tokens": shared_tokens}
        )
        rows = make_rows(shape, stream(shape))
        print(f"\n{shape.describe()}", flush=True)
        found = compare(rows, limits, machine, shared_tokens)
        print("\n".join((table(found), notes(found, len(rows)))).rstrip(), flush=True)
        every += found
    return every


def open_machine(options: argparse.Namespace) -> tuple[Machine, Callable[[Shape], Ids]]:
    """Return what runs the steps, and where the rows' tokens come from."""
    if options.no_model:
        machine = SimulatedMachine(step_s=options.step_ms / 1e3, token_s=options.token_us / 1e6)
        return machine, lambda shape: random_stream(shape, 50_000)
    path = str(options.model or fetch_model())
    loaded = load_model(
        ModelSource(path), dtype="float32", device=torch.device("cpu"), max_model_len=None
    )
    tokenizer = load_tokenizer(path, revision=None, trust_remote_code=False)
    if tokenizer is None:
        return ModelMachine(loaded), lambda shape: random_stream(shape, loaded.vocab_size)
    ids = text_stream(tokenizer)
    return ModelMachine(loaded), lambda shape: ids


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what it leaves out comes from the chosen shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-model", action="store_true", help="the scheduler alone")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "compare_memory")
    parser.add_argument("--shared-tokens", type=_counts, help="one shape for each: 0,3280")
    parser.add_argument("--spread", type=float, help="0 makes all rows equally long")
    for name in WITH_MODEL.keys() - {"shared_tokens", "spread"}:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--step-ms", type=float, default=8.0, help="with --no-model")
    parser.add_argument("--token-us", type=float, default=80.0, help="with --no-model")
    parser.add_argument(
        "model", nargs="?", type=_model_path, metavar="model.path=DIR", help=str(MODEL_DIR)
    )
    options = parser.parse_args(arguments)
    for name, value in (NO_MODEL if options.no_model else WITH_MODEL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def _model_path(text: str) -> str:
    key, _, path = text.partition("=")
    if key != "model.path" or not path:
        raise argparse.ArgumentTypeError(f"{text}: only model.path=DIR is taken")
    return path


if __name__ == "__main__":
    sys.exit(main())
