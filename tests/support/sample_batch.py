"""A batch of samples from their parameters, one by one."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    forced: int | None = None


def sample_batch(entries: Sequence[OneSample], **logs: Any) -> SampleBatch:
    """Put samples together; the rows are numbered from 0. Logs are those of the batch."""
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
                forced=entry.forced,
            )
            for index, entry in enumerate(entries)
            if entry.params.changes_logits
            or entry.banned
            or entry.constraint
            or entry.forced is not None
        ),
        scored=tuple(
            replace(entry.scored, index=index)
            for index, entry in enumerate(entries)
            if entry.scored is not None
        ),
        **logs,
    )
