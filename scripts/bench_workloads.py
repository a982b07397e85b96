"""The benchmark's data sets: seeded, with outputs of fixed lengths, each one Parquet file.

    python scripts/bench_workloads.py --directory data/bench      # write them, and say their sizes
    python scripts/bench_workloads.py --size gpu few_shot table

A row is `prompt_token_ids` and `max_tokens`, so that every engine gets the same tokens in and
makes as many out. Texts are the real ones of prepare_data.py; what is drawn from them comes
from a fixed seed, so a tokenizer always gives the same rows.
"""

import argparse
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from fetch_model import fetch_model
from prepare_data import prepare_data

from batchgen.cli.escapes import in_quotes
from batchgen.errors import BatchgenError, UsageError
from batchgen.prompts.order import neighbour_lcp, prefill_tokens, prefix_order
from batchgen.prompts.tokenizer import load_tokenizer

SEED = 20_240_607
SCHEMA = pa.schema([("prompt_token_ids", pa.list_(pa.int32())), ("max_tokens", pa.int32())])
SYSTEM = "Each review is labelled as positive or negative.\n\n"
QUESTIONS = (
    "What is this text about?",
    "Who speaks here, and to whom?",
    "Which names, places or products does it mention?",
    "Is its tone friendly, neutral or hostile?",
    "Which question does it leave open?",
    "How would you put it in one sentence?",
    "What would the writer do next?",
    "Which of its claims could be checked?",
)
CATEGORIES = ("camera", "music player", "phone", "router", "software", "kitchen", "baby", "garden")

Ids = list[int]


class Size(StrEnum):
    """How large a workload is: minutes on two cores, or enough for a large GPU."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt, and how many tokens every engine makes for it."""

    token_ids: Ids
    max_tokens: int


class Texts:
    """The real texts as token ids of one tokenizer.

    Args:
        tokenizer: a chat template is used where it has one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def reviews(self) -> list[dict[str, Any]]:
        """Review sentences with their rating and label."""
        rows: list[dict[str, Any]] = pq.read_table(prepare_data() / "reviews.parquet").to_pylist()
        return rows

    @cached_property
    def conversations(self) -> list[list[dict[str, str]]]:
        """Conversations: role and content of every message, the user's first."""
        table = pq.read_table(prepare_data() / "conversations.parquet", columns=["messages"])
        rows: list[list[dict[str, str]]] = table["messages"].to_pylist()
        return rows

    @cached_property
    def stream(self) -> npt.NDArray[np.int64]:
        """All conversations one after another, as the ids of one long text."""
        messages = (message for talk in self.conversations for message in talk)
        return np.array(self.encode("\n\n".join(each["content"] for each in messages)))

    def encode(self, text: str) -> Ids:
        """Return a text's ids, without special tokens around it."""
        ids: Ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def chat(self, messages: Sequence[dict[str, str]]) -> Ids:
        """Return the ids of a conversation at the point where the assistant answers."""
        if self._tokenizer.chat_template is None:
            turns = [f"{message['role']}: {message['content']}\n" for message in messages]
            return self.encode("".join(turns) + "assistant:")
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.encode(text)

    def pieces(self, rng: np.random.Generator, count: int, length: int) -> list[Ids]:
        """Cut pieces out of the stream, no two of which begin with the same token.

        Raises:
            UsageError: the tokenizer knows too few tokens for that.
        """
        starts = rng.permutation(len(self.stream) - length)
        _, first = np.unique(self.stream[starts], return_index=True)
        if len(first) < count:
            raise UsageError(
                f"this tokenizer gives pieces of only {len(first)} different beginnings, not "
                f"{count}; ask for fewer --rows, or another --model"
            )
        chosen = starts[np.sort(first)[:count]]
        return [self.stream[start : start + length].tolist() for start in chosen]


# -- the workloads ------------------------------------------------------------------------


def few_shot(
    texts: Texts, rng: np.random.Generator, *, rows: int, shots: int, sentences: int, output: int
) -> Iterator[Row]:
    """Label reviews after the same examples."""
    reviews = texts.reviews
    starts = rng.permutation(len(reviews) - sentences)[: shots + rows]
    examples, asked = starts[:shots], starts[shots:]

    def passage(start: int) -> str:
        return " ".join(review["text"] for review in reviews[start : start + sentences])

    def label(start: int) -> str:
        rating = sum(review["rating"] for review in reviews[start : start + sentences])
        return "positive" if rating > 0 else "negative"

    header = SYSTEM + "".join(
        f"Review: {passage(start)}\nSentiment: {label(start)}\n\n" for start in examples
    )
    for start in asked:
        yield Row(texts.encode(f"{header}Review: {passage(start)}\nSentiment:"), output)


def sharegpt(
    texts: Texts, rng: np.random.Generator, *, rows: int, longest: int, cap: int
) -> Iterator[Row]:
    """Answer people's messages, each alone, as long as the assistant once did."""
    turns = max(map(len, texts.conversations))
    pairs = (
        (talk[at], talk[at + 1])
        for at in range(0, turns, 2)
        for talk in texts.conversations
        if at + 1 < len(talk)
    )
    found = (
        Row(ids, min(cap, max(1, len(texts.encode(answer["content"])))))
        for question, answer in pairs
        if len(ids := texts.chat([question])) <= longest
    )
    yield from _shuffled(rng, islice(found, rows))


def multi_turn(
    texts: Texts,
    rng: np.random.Generator,
    *,
    rows: int,
    longest: int,
    least_turns: int,
    output: int,
) -> Iterator[Row]:
    """Continue conversations after each message of the user."""
    found: list[Row] = []
    for talk in texts.conversations:
        prompts = (texts.chat(talk[: end + 1]) for end in range(0, len(talk), 2))
        fitting = [Row(ids, output) for ids in prompts if len(ids) <= longest]
        if len(fitting) >= least_turns:
            found += fitting
        if len(found) >= rows:
            break
    yield from _shuffled(rng, found[:rows])


def documents(
    texts: Texts,
    rng: np.random.Generator,
    *,
    documents: int,
    questions: int,
    length: int,
    output: int,
) -> Iterator[Row]:
    """Ask every question about every document."""
    asked = [texts.encode(f"\n\nQuestion: {each}\nAnswer:") for each in QUESTIONS[:questions]]
    pieces = texts.pieces(rng, documents, length)
    rows = (Row(piece + question, output) for piece in pieces for question in asked)
    yield from _shuffled(rng, rows)


def batchllm(
    texts: Texts,
    rng: np.random.Generator,
    *,
    groups: int,
    degree: int,
    shared: int,
    own: int,
    output: int,
) -> Iterator[Row]:
    """Groups of rows with a long prefix each, shuffled (Zheng et al., BatchLLM, 2024)."""
    prefixes = texts.pieces(rng, groups, shared)
    endings = texts.pieces(rng, degree, own)
    rows = (Row(prefix + ending, output) for prefix in prefixes for ending in endings)
    yield from _shuffled(rng, rows)


def table(
    texts: Texts,
    rng: np.random.Generator,
    *,
    products: int,
    reviews: int,
    description: int,
    output: int,
) -> Iterator[Row]:
    """Rows of a joined table, column by column, shuffled (Liu et al., Optimizing LLM queries
    in relational workloads, 2024).

    A brand has several products of one category, and a product several reviews: what stands
    first repeats most.
    """
    descriptions = texts.pieces(rng, products, description)
    sentences = rng.choice(len(texts.reviews), products * reviews)
    question = "Does the review speak of the product's quality? Answer yes or no:"
    rows = []
    for number, sentence in enumerate(sentences):
        product = number // reviews
        brand = product // 2
        head = (
            f"category: {CATEGORIES[brand % len(CATEGORIES)]}\nbrand: brand {brand}\n"
            f"product: {product}\ndescription: "
        )
        review = texts.reviews[sentence]["text"]
        tail = f"\nreviewer: {rng.integers(10**6)}\nreview: {review}\n{question}"
        ids = texts.encode(head) + descriptions[product] + texts.encode(tail)
        rows.append(Row(ids, output))
    yield from _shuffled(rng, rows)


def unshared(
    texts: Texts, rng: np.random.Generator, *, rows: int, length: int, output: int
) -> Iterator[Row]:
    """Texts of which no two begin with the same token."""
    for piece in texts.pieces(rng, rows, length):
        yield Row(piece, output)


def decode_heavy(
    texts: Texts, rng: np.random.Generator, *, rows: int, shared: int, own: int, output: int
) -> Iterator[Row]:
    """One long prefix, and long outputs."""
    (prefix,) = texts.pieces(rng, 1, shared)
    for piece in texts.pieces(rng, rows, own):
        yield Row(prefix + piece, output)


def _shuffled(rng: np.random.Generator, rows: Iterator[Row] | list[Row]) -> Iterator[Row]:
    listed = list(rows)
    return (listed[place] for place in rng.permutation(len(listed)))


@dataclass(frozen=True, slots=True)
class Workload:
    """How a workload is made.

    Attributes:
        build: makes the rows from texts, a seeded generator, and the numbers of its size.
        numbers: for each size.
    """

    build: Callable[..., Iterator[Row]]
    numbers: Mapping[Size, Mapping[str, int]]


def _sizes(build: Callable[..., Iterator[Row]], **both: tuple[int, int]) -> Workload:
    """Describe a workload by its numbers at the CPU's and at the GPU's size."""
    columns = zip(*both.values(), strict=True)
    numbers = [dict(zip(both, column, strict=True)) for column in columns]
    return Workload(build, dict(zip(Size, numbers, strict=True)))


WORKLOADS: dict[str, Workload] = {
    "few_shot": _sizes(few_shot, rows=(64, 2_048), shots=(12, 20), sentences=(3, 3), output=(8, 8)),
    "sharegpt": _sizes(sharegpt, rows=(64, 1_024), longest=(1_024, 4_096), cap=(138, 512)),
    "multi_turn": _sizes(
        multi_turn, rows=(128, 1_024), longest=(760, 4_096), least_turns=(4, 1), output=(16, 64)
    ),
    "documents": _sizes(
        documents, documents=(16, 256), questions=(4, 8), length=(536, 2_000), output=(24, 64)
    ),
    "batchllm": _sizes(
        batchllm,
        groups=(8, 800),
        degree=(8, 8),
        shared=(500, 2_000),
        own=(50, 200),
        output=(24, 100),
    ),
    "table": _sizes(
        table, products=(8, 512), reviews=(8, 16), description=(200, 200), output=(4, 4)
    ),
    "unshared": _sizes(unshared, rows=(64, 2_048), length=(115, 512), output=(32, 128)),
    "decode_heavy": _sizes(
        decode_heavy, rows=(64, 1_024), shared=(1_500, 1_500), own=(60, 60), output=(64, 256)
    ),
}


# -- files and jobs -----------------------------------------------------------------------


def workload_rows(
    name: str, size: Size, texts: Texts, *, limit: int | None = None, cap: int | None = None
) -> list[Row]:
    """Make the rows of a workload.

    Args:
        name: a key of ``WORKLOADS``.
        size: of its two sizes.
        texts: what it is made from.
        limit: only so many rows, the first ones.
        cap: at most so many tokens out for a row.

    Raises:
        UsageError: the tokenizer has too few tokens.
    """
    workload = WORKLOADS[name]
    # One generator each, so that a workload does not depend on which others were made.
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    rows = list(islice(workload.build(texts, rng, **workload.numbers[size]), limit))
    if cap is None:
        return rows
    return [replace(row, max_tokens=min(cap, row.max_tokens)) for row in rows]


def write_workload(rows: Sequence[Row], path: Path) -> None:
    """Write rows to a Parquet file."""
    columns = {
        "prompt_token_ids": [row.token_ids for row in rows],
        "max_tokens": [row.max_tokens for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns, SCHEMA), path)


def job_arguments(path: Path, model: str, size: Size) -> list[str]:
    """Return the keys of the job over a workload's file.

    In float32 on a CPU, where all engines can be held to equal tokens; in bfloat16 on a GPU.
    """
    dtype = "float32" if size is Size.CPU else "bfloat16"
    return [
        f"model.path={in_quotes(model)}",
        f"input.path={in_quotes(str(path))}",
        f"model.dtype={dtype}",
        "sampling.ignore_eos=true",
    ]


def open_texts(model: str) -> Texts:
    """Load a model's tokenizer.

    Raises:
        UsageError: it has none.
    """
    tokenizer = load_tokenizer(model, revision=None, trust_remote_code=False)
    if tokenizer is None:
        raise UsageError(f"--model {model}: it has no tokenizer, and workloads are made of text")
    return Texts(tokenizer)


def describe(name: str, rows: Sequence[Row]) -> str:
    """Return what a workload comes to; E_1 is the prefill that sharing by the token leaves."""
    prompts = [np.array(row.token_ids, np.int32) for row in rows]
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    order = prefix_order(prompts.__getitem__, np.arange(len(rows)))
    floor = prefill_tokens(lengths[order], neighbour_lcp(prompts.__getitem__, order))
    output = sum(row.max_tokens for row in rows)
    return (
        f"{name:<13} {len(rows):6,} rows {lengths.sum():12,} tokens in, E_1 {floor:11,} "
        f"{output:10,} out"
    )


def main() -> int:
    """Write the files, say their sizes, and give the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(WORKLOADS))
    parser.add_argument("--size", type=Size, choices=list(Size), default=Size.CPU)
    parser.add_argument("--model", help="whose tokenizer (default: the demo's)")
    parser.add_argument("--directory", type=Path, help="write NAME.parquet there")
    options = parser.parse_args()
    unknown = set(options.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"unknown workload {', '.join(sorted(unknown))}")
    try:
        texts = open_texts(options.model or str(fetch_model()))
        for name in options.workloads or WORKLOADS:
            rows = workload_rows(name, options.size, texts)
            print(describe(name, rows))
            if options.directory is not None:
                write_workload(rows, options.directory / f"{name}.parquet")
    except BatchgenError as error:
        print(f"bench_workloads: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
