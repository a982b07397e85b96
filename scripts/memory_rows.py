"""The rows of compare_memory.py: shapes with shared prefixes, on random or real tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from prepare_data import prepare_data

from batchgen.errors import UsageError

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rows look like, in tokens.

    Attributes:
        rows: how many.
        groups: rows are spread over so many shared prefixes, shuffled.
        prompt_tokens: the mean prompt, its shared prefix included.
        shared_tokens: the shared prefix; 0 where nothing is shared.
        output_tokens: the most a row may generate.
        spread: a row's own part of the prompt is up to this share longer or shorter, and
            its output up to this share shorter than it may be.
    """

    rows: int
    groups: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    spread: float

    def describe(self) -> str:
        """Say the shape in a line."""
        total = self.prompt_tokens + self.output_tokens
        return (
            f"{self.rows:,} rows of {total:,} tokens, {self.output_tokens} of them output, spread "
            f"{self.spread:.0%}; {self.shared_tokens:,} ({self.shared_tokens / total:.0%}) shared, "
            f"{self.groups} groups"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its prompt's [L] token ids, and how many tokens it generates."""

    prompt: Ids
    output_tokens: int


def make_rows(shape: Shape, stream: Ids, seed: int = 0) -> list[Row]:
    """Cut rows out of a stream of token ids, no part of it twice.

    Raises:
        UsageError: the stream is too short.
    """
    rng = np.random.default_rng(seed)
    own = (shape.prompt_tokens - shape.shared_tokens) * (
        1 + shape.spread * rng.uniform(-1, 1, shape.rows)
    )
    own_tokens = np.maximum(1, own.round().astype(int))
    outputs = shape.output_tokens * (1 - shape.spread * rng.uniform(0, 1, shape.rows))
    lengths = [shape.shared_tokens] * shape.groups + own_tokens.tolist()
    if sum(lengths) > len(stream):
        raise UsageError(
            f"the rows need {sum(lengths):,} tokens of text, there are {len(stream):,}: lower "
            f"--rows or --prompt-tokens"
        )
    pieces = np.split(stream[: sum(lengths)], np.cumsum(lengths)[:-1])
    prefixes, endings = pieces[: shape.groups], pieces[shape.groups :]
    group_of = rng.permutation(np.arange(shape.rows) % shape.groups)
    return [
        Row(np.concatenate((prefixes[group], ending)), max(1, round(output)))
        for group, ending, output in zip(group_of.tolist(), endings, outputs, strict=True)
    ]


def random_stream(shape: Shape, vocab_size: int) -> Ids:
    """Return random token ids, enough for a shape."""
    count = shape.groups * shape.shared_tokens + 2 * shape.rows * shape.prompt_tokens
    return np.random.default_rng(1).integers(0, vocab_size, count, dtype=np.int32)


def text_stream(tokenizer: Any) -> Ids:
    """Return the token ids of people's reviews and questions, one after the other."""
    folder = prepare_data()
    reviews = pq.read_table(folder / "reviews.parquet", columns=["text"])["text"].to_pylist()
    prompts = pq.read_table(folder / "prompts.parquet", columns=["messages"])["messages"]
    questions = [messages[0]["content"] for messages in prompts.slice(0, 1000).to_pylist()]
    ids = tokenizer("\n\n".join(reviews + questions), add_special_tokens=False)["input_ids"]
    return np.asarray(ids, dtype=np.int32)
