"""A small job for the tests of the benchmark: a random model and rows that share a prefix."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.tiny_models import save

# Tokens of each prompt; those above 20 begin with the same 20.
LENGTHS = [30, 21, 22, 25, 30, 9] * 4
OUTPUTS = [8, 5, 8, 1] * 6


def make_job(folder: Path, family: str = "llama") -> list[str]:
    """Write a model and 24 rows of token ids, 20 of which share 20 tokens."""
    model = save(family, folder / "model")
    rng = np.random.default_rng(1)
    shared = rng.integers(3, 199, 20).tolist()
    prompts = [
        (shared if length > 20 else []) + rng.integers(3, 199, _own(length)).tolist()
        for length in LENGTHS
    ]
    table = pa.table({"prompt_token_ids": prompts, "max_tokens": OUTPUTS})
    pq.write_table(table, folder / "in.parquet")
    return [
        f"model.path={model}",
        f"input.path={folder / 'in.parquet'}",
        "model.device=cpu",
        "pool.num_blocks=200",
        "sampling.ignore_eos=true",
    ]


def _own(length: int) -> int:
    return length - 20 if length > 20 else length
