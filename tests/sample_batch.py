"""A batch of samples from their parameters, one by one."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchgen.engine.step import Constraint, SampleBatch, ScoredSample, SpecialSample
from batchgen.sampling import SamplingParams


@dataclass(frozen=True)
class OneSample:
    """One token to sample: as :class:`SampleBatch`, but for one row."""

    params: SamplingParams
    key: int = 0
    position: int = 0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    constraint: Constraint | None = None
    scored: ScoredSample | None = None


def sample_batch(entries: Sequence[OneSample]) -> SampleBatch:
    """Put samples together; the rows are numbered from 0."""
    params = [entry.params for entry in entries]
    return SampleBatch(
        rows=np.arange(len(entries)),
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        noise_keys=np.array([entry.key for entry in entries], dtype=np.uint64),
        positions=np.array([entry.position for entry in entries], dtype=np.int64),
        special=tuple(
            SpecialSample(
                index=index,
                params=entry.params,
                token_ids=array("i", [*entry.prompt, *entry.output]),
                num_prompt_tokens=len(entry.prompt),
                banned=entry.banned,
                constraint=entry.constraint,
            )
            for index, entry in enumerate(entries)
            if entry.params.has_penalties or entry.banned or entry.constraint
        ),
        scored=tuple(
            replace(entry.scored, index=index)
            for index, entry in enumerate(entries)
            if entry.scored is not None
        ),
    )
