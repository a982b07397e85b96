"""Sweep the pool's block size over short rows, long rows, and as many rows as memory holds.

    python scripts/sweep_block_size.py
    python scripts/sweep_block_size.py --short-rows 32 --long-rows 1 --crowd-rows 64
    python scripts/sweep_block_size.py --block-sizes 16,128 model.path=/models/qwen3-0.6b

Each of the three is one Hydra multirun (`python -m batchgen -m pool.block_size=8,16,...`) on the
CPU in float32, over real text. *short*: questions of people, under 512 tokens with their
output, all running at once. *long*: conversations joined to over 4,096 tokens. *crowd*: short
rows again, but in a pool that holds half of them, so that the waste of a block size costs
rows that could run. A pool has the same bytes for every block size.

For each block size it gives tokens per second (prompt and output, over the generate phase) and
the waste: slots of a row's last block that hold no KV when the row ends, beside the half block
a row that one expects. What a workload wants is the block size with the least waste among
those within 3% of the best speed. Let nothing else run meanwhile.

By default some 190,000 prompt tokens are computed in all, which two cores do in about 15
minutes with the demo's model. Writes figures.json, figures.parquet and figures.png to --out.
Other keys of batchgen can follow.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from fetch_model import ROOT, fetch_model
from prepare_data import prepare_data

from batchgen.cli.escapes import in_quotes
from batchgen.errors import BatchgenError, EngineError, UsageError
from batchgen.prompts.tokenizer import load_tokenizer
from batchgen.runtime.kv_cache import kv_bytes_per_token
from batchgen.runtime.memory import GIB
from batchgen.runtime.model import ModelSource, geometry_without_weights

BLOCK_SIZES = [8, 16, 32, 64, 128]
# Block sizes whose speed differs by less than this are equally fast.
NOISE = 0.03
# The shortest question that is used, in tokens.
MIN_TOKENS = 16

Prompt = list[int]


# -- the rows -----------------------------------------------------------------------------


def questions(tokenizer: Any) -> Iterator[Prompt]:
    """Return the token ids of what people wrote first to an assistant."""
    table = pq.read_table(prepare_data() / "prompts.parquet", columns=["messages"])
    for messages in table["messages"]:
        yield _encode(tokenizer, messages[0]["content"].as_py())


def conversations(tokenizer: Any) -> Iterator[Prompt]:
    """Return the token ids of whole conversations."""
    table = pq.read_table(prepare_data() / "conversations.parquet", columns=["messages"])
    for messages in table["messages"].to_pylist():
        yield _encode(tokenizer, "\n\n".join(message["content"] for message in messages) + "\n\n")


def short_prompts(texts: Iterable[Prompt], limit: int) -> Iterator[Prompt]:
    """Return the texts of fewer than ``limit`` tokens, each once."""
    seen = set()
    for ids in texts:
        if MIN_TOKENS <= len(ids) < limit and tuple(ids) not in seen:
            seen.add(tuple(ids))
            yield ids


def long_prompts(texts: Iterable[Prompt], limit: int) -> Iterator[Prompt]:
    """Join texts, each used once, to prompts of more than ``limit`` tokens."""
    joined: Prompt = []
    for ids in texts:
        joined = joined + ids
        if len(joined) > limit:
            yield joined
            joined = []


def _encode(tokenizer: Any, text: str) -> Prompt:
    ids: Prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows, and the pool they run in.

    Attributes:
        name: short, long or crowd.
        title: what it is, in words.
        prompts: token ids of each row.
        pool_tokens: slots of the pool.
    """

    name: str
    title: str
    prompts: list[Prompt]
    pool_tokens: int


def make_workloads(options: argparse.Namespace, tokenizer: Any) -> list[Workload]:
    """Make the workloads that have any rows.

    Raises:
        UsageError: there is not enough text.
    """
    output, largest = options.max_tokens, max(options.block_sizes)
    short_limit, long_limit = options.short_limit, options.long_limit
    short = short_prompts(questions(tokenizer), short_limit - output)
    sources = {
        "short": (f"rows under {short_limit:,} tokens", short, options.short_rows),
        "long": (
            f"rows over {long_limit:,} tokens",
            long_prompts(conversations(tokenizer), long_limit),
            options.long_rows,
        ),
        "crowd": (f"rows under {short_limit:,}, pool full", short, options.crowd_rows),
    }
    workloads = []
    for name, (title, prompts, count) in sources.items():
        chosen = list(islice(prompts, count))
        if len(chosen) < count:
            raise UsageError(f"--{name}-rows {count}: the data has no more than {len(chosen)}")
        whole = sum(len(ids) + output + largest for ids in chosen)
        longest = max(map(len, chosen), default=0) + output + largest
        tokens = max(whole // 2, longest) if name == "crowd" else whole
        workloads.append(Workload(name, title, chosen, tokens))
    return [workload for workload in workloads if workload.prompts]


# -- the runs -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """What a workload did with a block size.

    Attributes:
        tokens_per_s: prompt and output tokens of all rows over the generate phase.
        mean_running_rows: rows in a step.
        wasted_tokens_per_row: slots of the last block without KV when a row ends.
        expected_tokens_per_row: half a block.
        wasted_share: of all slots that rows held when they ended.
        prefill_tokens: prompt tokens computed.
        preemptions: rows that had to make room.
    """

    workload: str
    block_size: int
    rows: int
    tokens_per_s: float
    generate_s: float
    mean_running_rows: float
    wasted_tokens_per_row: float
    expected_tokens_per_row: float
    wasted_share: float
    prefill_tokens: int
    preemptions: int


def sweep(
    workload: Workload,
    block_sizes: Sequence[int],
    model: str,
    overrides: Sequence[str],
    max_tokens: int,
) -> list[Figures]:
    """Run a workload with every block size, in one multirun.

    Raises:
        EngineError: the command failed; it has said why.
    """
    with tempfile.TemporaryDirectory(prefix="batchgen-sweep-") as temporary:
        folder = Path(temporary)
        pq.write_table(pa.table({"prompt_token_ids": workload.prompts}), folder / "rows.parquet")
        gib = workload.pool_tokens * bytes_per_token(model) / GIB
        command = [
            *(sys.executable, "-m", "batchgen", "-m"),
            f"model.path={in_quotes(model)}",
            f"input.path={in_quotes(str(folder / 'rows.parquet'))}",
            f"output.dir={in_quotes(f'{folder}/${{pool.block_size}}')}",
            f"pool.block_size={','.join(map(str, block_sizes))}",
            f"pool.cpu_memory_gib={gib:.9f}",
            "pool.swap_blocks=0",
            f"engine.max_num_seqs={len(workload.prompts)}",
            f"sampling.max_tokens={max_tokens}",
            "sampling.ignore_eos=true",
            *("model.device=cpu", "model.dtype=float32"),
            *overrides,
        ]
        code = subprocess.run(command, check=False).returncode
        if code:
            raise EngineError(f"the sweep over {workload.title} ended with exit code {code}")
        return [read_figures(workload.name, folder / str(size), size) for size in block_sizes]


def bytes_per_token(model: str) -> int:
    """Return the bytes of K and V of one token in float32.

    Raises:
        UsageError: the model cannot be used, or only its weights could tell.
    """
    layers = geometry_without_weights(ModelSource(model))
    if layers is None:
        raise UsageError(f"model.path={model}: the size of its KV is not known without weights")
    return kv_bytes_per_token(layers, torch.float32)


def read_figures(workload: str, folder: Path, block_size: int) -> Figures:
    """Read one job's output directory."""
    summary = json.loads((folder / "_summary.json").read_text())
    wasted, held, rows = measured_waste(pq.read_table(folder), block_size)
    tokens = summary["prompt_tokens"] + summary["completion_tokens"]
    generate_s = summary["phases"]["generate_s"]
    return Figures(
        workload=workload,
        block_size=block_size,
        rows=rows,
        tokens_per_s=tokens / generate_s,
        generate_s=generate_s,
        mean_running_rows=summary["mean_running_rows"],
        wasted_tokens_per_row=wasted / rows,
        expected_tokens_per_row=block_size / 2,
        wasted_share=wasted / held,
        prefill_tokens=summary["prefill_tokens_computed"],
        preemptions=summary["preemptions"],
    )


def measured_waste(output: pa.Table, block_size: int) -> tuple[int, int, int]:
    """Count the slots of rows' last blocks that hold no KV when the rows end.

    A row's last token is never stored. Rows that failed or took another row's result held
    no blocks and do not count.

    Returns:
        Slots without KV, slots held, rows.
    """
    held_any = pc.greater(pc.fill_null(output["peak_blocks"], 0), 0)
    rows = output.filter(pc.and_(pc.equal(output["status"], "ok"), held_any))
    held = block_size * (pc.sum(rows["peak_blocks"]).as_py() or 0)
    used = sum(pc.sum(rows[name]).as_py() or 0 for name in ("prompt_tokens", "completion_tokens"))
    return held - (used - rows.num_rows), held, rows.num_rows


def wanted(figures: Sequence[Figures]) -> Figures:
    """Choose the block size with the least waste among the fastest."""
    best = max(each.tokens_per_s for each in figures)
    fast = [each for each in figures if each.tokens_per_s >= (1 - NOISE) * best]
    return min(fast, key=lambda each: (each.wasted_tokens_per_row, each.block_size))


# -- what is shown ------------------------------------------------------------------------


def describe(workload: Workload, figures: Sequence[Figures]) -> str:
    """Write a workload's figures as a table, and what it wants."""
    lengths = [len(prompt) for prompt in workload.prompts]
    best = wanted(figures)
    return "\n".join(
        [
            f"{workload.name}: {len(lengths)} {workload.title}; prompts of {min(lengths):,} to "
            f"{max(lengths):,} tokens; a pool of {workload.pool_tokens:,}",
            "block size  tokens/s  rows at once  wasted a row  half a block  wasted  preempted",
            *(
                f"{each.block_size:>10}{each.tokens_per_s:>10,.1f}"
                f"{each.mean_running_rows:>14,.1f}{each.wasted_tokens_per_row:>14,.1f}"
                f"{each.expected_tokens_per_row:>14,.1f}{each.wasted_share:>8.1%}"
                f"{each.preemptions:>11,}"
                for each in figures
            ),
            f"{workload.name} rows want a block size of {best.block_size}: "
            f"{best.tokens_per_s:,.1f} tokens/s, {best.wasted_tokens_per_row:.1f} slots wasted "
            f"a row",
        ]
    )


def save(every: dict[str, list[Figures]], folder: Path) -> None:
    """Write ``figures.json``, ``figures.parquet`` and ``figures.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [asdict(each) for figures in every.values() for each in figures]
    choices = {name: wanted(figures).block_size for name, figures in every.items()}
    text = json.dumps({"wanted": choices, "figures": records}, indent=1)
    (folder / "figures.json").write_text(text + "\n")
    pq.write_table(pa.Table.from_pylist(records), folder / "figures.parquet")
    plot(every, folder / "figures.png")


def plot(every: dict[str, list[Figures]], path: Path) -> None:
    """Draw speed above waste, a column for each workload."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        2, len(every), figsize=(4.5 * len(every), 6), squeeze=False, layout="constrained"
    )
    for (speed, waste), (name, figures) in zip(axes.T, every.items(), strict=True):
        sizes = [each.block_size for each in figures]
        speed.plot(sizes, [each.tokens_per_s for each in figures], marker="o")
        speed.axvline(wanted(figures).block_size, linestyle=":", color="grey")
        speed.set_ylim(bottom=0)
        speed.set_title(name)
        speed.set_ylabel("tokens/s")
        measured = [each.wasted_tokens_per_row for each in figures]
        expected = [each.expected_tokens_per_row for each in figures]
        waste.plot(sizes, measured, marker="o", label="measured")
        waste.plot(sizes, expected, linestyle="--", label="half a block")
        waste.set_ylabel("slots wasted a row")
        waste.set_xlabel("block size")
        waste.legend()
        for axis in (speed, waste):
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
    figure.savefig(path, dpi=110)
    plt.close(figure)


# -- the command --------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, print, save, and give the exit code."""
    options, overrides = read_options(arguments)
    try:
        run(options, overrides)
    except BatchgenError as error:
        print(f"sweep_block_size: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, list[Figures]]:
    """Sweep every workload, print each, and save the figures.

    Raises:
        UsageError: the model or the data cannot be used.
        EngineError: a sweep failed.
    """
    named = [text for text in overrides if text.startswith("model.path=")]
    others = [text for text in overrides if text not in named]
    model = named[-1].partition("=")[2] if named else str(fetch_model())
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise UsageError(f"model.path={model} has no tokenizer, which the rows are made with")
    every = {}
    for workload in make_workloads(options, tokenizer):
        figures = sweep(workload, options.block_sizes, model, others, options.max_tokens)
        every[workload.name] = figures
        print(f"\n{describe(workload, figures)}\n", flush=True)
    save(every, options.out)
    print(f"figures and plot: {options.out}")
    return every


def read_options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line: our options, and the keys for batchgen."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [key=value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--block-sizes", type=_sizes, default=BLOCK_SIZES)
    parser.add_argument("--short-rows", type=int, default=64)
    parser.add_argument("--long-rows", type=int, default=4)
    parser.add_argument("--crowd-rows", type=int, default=128)
    parser.add_argument("--short-limit", type=int, default=512, help="tokens, output included")
    parser.add_argument("--long-limit", type=int, default=4096, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=32, help="output tokens of each row")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "sweep_block_size")
    return parser.parse_known_args(arguments)


def _sizes(text: str) -> list[int]:
    return sorted({int(size) for size in text.split(",")})


if __name__ == "__main__":
    sys.exit(main())
