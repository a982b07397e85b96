"""The step plan: all that the runtime learns from the scheduler."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.sampling import SamplingParams

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to sample at the end of a row of the step.

    Attributes:
        row: the row of the step whose last token's logits are used.
        params: how the token is chosen.
        noise_key: 64-bit key of the request's noise.
        position: output tokens before this one; with the key it gives the noise.
        token_ids: all known tokens, for the penalties; not to be changed or kept.
        num_prompt_tokens: where the output begins in ``token_ids``.
        banned: tokens that may not be chosen now (held back by ``min_tokens``).
    """

    row: int
    params: SamplingParams
    noise_key: int
    position: int
    token_ids: array[int]
    num_prompt_tokens: int
    banned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass computes. R rows, T tokens, rows one after another.

    The runtime first does ``swap_out``, then ``copies``, then ``swap_in``, then the forward
    pass; within
    each layer it writes the K and V of all T tokens before any row attends.

    Attributes:
        step: number of this step, from 0.
        token_ids: [T] tokens to run.
        positions: [T] their absolute positions.
        slots: [T] where their K and V go: ``block * block_size + offset``.
        query_starts: [R + 1] where each row begins in the T tokens.
        context_lens: [R] tokens a row has in the pool after this step.
        block_tables: [R, W] int32 blocks of each row; entries past a row's own are 0.
        samples: the tokens to sample, in row order.
        swap_out: [N, 2] copies from pool block to CPU block.
        swap_in: [N, 2] copies from CPU block to pool block.
        copies: [N, 2] copies from pool block to pool block; no block is source and target.
    """

    step: int
    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_starts: IntArray
    context_lens: IntArray
    block_tables: npt.NDArray[np.int32]
    samples: tuple[Sample, ...]
    swap_out: IntArray
    swap_in: IntArray
    copies: IntArray

    @property
    def num_rows(self) -> int:
        """Requests in the step."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return len(self.token_ids)
