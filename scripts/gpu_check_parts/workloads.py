"""Rows of the three workloads that throughput is measured on, as random tokens.

Lengths are those of scripts/bench_workloads.py; the tokens' values change nothing for speed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpu_check_parts.engines import Row

Rng = np.random.Generator
# Log-normal lengths of ShareGPT's conversations as published engines measure them: the mean
# prompt has some 200 tokens, the mean answer 200; answers are cut off at 256, so that a run is
# short.
_SHAREGPT = ((4.9, 1.0, 4, 1024), (4.9, 0.9, 4, 256))


def few_shot(rng: Rng, rows: int, vocab_size: int, scale: float = 1.0) -> list[Row]:
    """Labels: 1,500 shared tokens, 40 to 80 of a row's own, 8 out."""
    prefix = _ids(rng, round(1500 * scale), vocab_size)
    own = rng.integers(max(1, round(40 * scale)), max(2, round(80 * scale)) + 1, rows)
    return [Row(prefix + _ids(rng, int(count), vocab_size), 8) for count in own]


def sharegpt(rng: Rng, rows: int, vocab_size: int, scale: float = 1.0) -> list[Row]:
    """Conversations: nothing shared, prompts and answers of very different lengths."""
    prompts, outputs = (
        np.clip(rng.lognormal(mean, sigma, rows), least, most) * scale
        for mean, sigma, least, most in _SHAREGPT
    )
    return [
        Row(_ids(rng, max(1, int(prompt)), vocab_size), max(2, int(output)))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def unshared(rng: Rng, rows: int, vocab_size: int, scale: float = 1.0) -> list[Row]:
    """Nothing shared, all alike: 512 in, 64 out. The cache can only cost."""
    count = max(1, round(512 * scale))
    output = max(2, round(64 * scale))
    return [Row(_ids(rng, count, vocab_size), output) for _ in range(rows)]


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of a kind.

    Attributes:
        make: draws rows.
        most_rows: so many take seconds at most, whatever the engine.
    """

    make: Callable[..., list[Row]]
    most_rows: int


WORKLOADS = {
    "few_shot": Workload(few_shot, 20_000),
    "sharegpt": Workload(sharegpt, 512),
    "unshared": Workload(unshared, 512),
}


def _ids(rng: Rng, count: int, vocab_size: int) -> list[int]:
    ids: list[int] = rng.integers(3, vocab_size, count).tolist()
    return ids
