"""The step plan: all that the runtime learns from the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from batchgen.sampling import SamplingParams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
MaskWords = npt.NDArray[np.int32]


# Stands for a token where the model's logits were not numbers.
NO_TOKEN = -1
# Stands for a token where every token was ruled out.
NO_LEGAL_TOKEN = -2


class MaskSource(Protocol):
    """Returns for many constraints at once which tokens they allow next."""

    @property
    def num_words(self) -> int:
        """Words in a mask: one bit for each id of the vocabulary, 32 in a word."""

    def fill(self, constraints: Sequence[Any], masks: MaskWords) -> None:
        """Set the bits of allowed tokens.

        Args:
            constraints: [N] constraints of this source.
            masks: [N, ``num_words``] zeros; bit ``i % 32`` of word ``i // 32`` is token ``i``.
        """


class Constraint(Protocol):
    """What the output of one request has to be; engine and runtime know no grammar.

    Its state is a function of the tokens that were pushed, which are the request's output:
    preemption and recomputation change nothing in it.
    """

    @property
    def source(self) -> MaskSource:
        """Makes this constraint's masks; one source serves a whole run."""

    @property
    def is_complete(self) -> bool:
        """Whether the output is finished and nothing may follow, so that it has ended."""

    @property
    def problem(self) -> str | None:
        """Why no token is allowed, where the constraint itself has failed."""

    def push(self, token_id: int) -> None:
        """Take the next token of the output."""

    def forced(self) -> list[int]:
        """Return the next tokens as long as only one is allowed."""


@dataclass(frozen=True, slots=True)
class SpecialSample:
    """What only some samples have: bias, penalties, tokens that are held back, a constraint.

    Attributes:
        index: which sample of the batch.
        params: bias and penalties.
        token_ids: all known tokens; not to be changed or kept.
        num_prompt_tokens: where the output begins in ``token_ids``.
        banned: tokens that may not be chosen now (held back by ``min_tokens``, or the ends of
            bad words).
        constraint: rules out all other tokens than those it allows.
        forced: the one token that is chosen, where that is settled.
        has_bad_words: the newest token decides which tokens are ``banned``.
    """

    index: int
    params: SamplingParams
    token_ids: array[int]
    num_prompt_tokens: int
    banned: tuple[int, ...]
    constraint: Constraint | None = None
    forced: int | None = None
    has_bad_words: bool = False


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample of which no token is wanted, but how likely some are.

    Attributes:
        index: which sample of the batch.
        token_ids: [K] the tokens.
    """

    index: int
    token_ids: IntArray


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """N tokens, each beside the K likeliest ones in its place.

    Of equally likely tokens the lowest id counts as the likelier.

    Attributes:
        token_ids: [N, 1 + K] int32 the token itself, then the likeliest, the best first.
        logprobs: [N, 1 + K] float32 their log-probabilities by the model's own logits.
        ranks: [N] int32 the place of the token itself by likelihood; 1 is the likeliest.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]

    def __getitem__(self, part: slice) -> LogprobRows:
        """Return some of the tokens; writing there is writing here."""
        return LogprobRows(self.token_ids[part], self.logprobs[part], self.ranks[part])

    @classmethod
    def joined(cls, parts: Sequence[LogprobRows], num_best: int) -> LogprobRows:
        """Concatenate parts, each of ``num_best`` likeliest tokens at least."""
        return cls(
            np.concatenate([part.token_ids[:, : 1 + num_best] for part in parts]),
            np.concatenate([part.logprobs[:, : 1 + num_best] for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )

    def put(self, rows: LogprobRows) -> None:
        """Write as many tokens, of as many likeliest ones at least."""
        columns = self.token_ids.shape[1]
        self.token_ids[:] = rows.token_ids[:, :columns]
        self.logprobs[:] = rows.logprobs[:, :columns]
        self.ranks[:] = rows.ranks


@dataclass(frozen=True, slots=True)
class LoggedTokens:
    """Tokens of a request of which the log-probabilities are wanted.

    Attributes:
        index: which request's log of the step it belongs to, from 0.
        first: which of the step's given logits is the first that one of them follows.
        token_ids: [N] those that are known and follow N given logits.
        sample: the sample that is one more of them, after these; -1 for none.
        num_best: likeliest tokens that an entry lists.
    """

    index: int
    first: int
    token_ids: IntArray
    sample: int
    num_best: int

    @property
    def num_entries(self) -> int:
        """Entries of the step's output: N, or one more."""
        return len(self.token_ids) + (self.sample >= 0)


def _nowhere() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The S tokens to sample in a step, in row order.

    Attributes:
        rows: [S] row of the step whose last token's logits are used.
        temperature, top_p, min_p: [S] float64; a temperature of 0 is greedy.
        top_k: [S] int64; 0 and -1 keep all.
        noise_keys: [S] uint64 keys of the requests' noise.
        positions: [S] output tokens before this one; with the key it gives the noise.
        special: the samples that need more than that.
        scored: the samples of which no token is taken.
        given: [P] places among the step's tokens whose logits are wanted besides: what follows
            there is known.
        logged: tokens that follow these logits, or are sampled, and are wanted with their
            log-probabilities.
    """

    rows: IntArray
    temperature: FloatArray
    top_p: FloatArray
    min_p: FloatArray
    top_k: IntArray
    noise_keys: npt.NDArray[np.uint64]
    positions: IntArray
    special: tuple[SpecialSample, ...] = ()
    scored: tuple[ScoredSample, ...] = ()
    given: IntArray = field(default_factory=_nowhere)
    logged: tuple[LoggedTokens, ...] = ()

    @property
    def needs_host(self) -> bool:
        """Whether the next step cannot be planned before the host has read these tokens.

        A constraint must see a token before it can say which may follow, bad words depend on
        the tokens before them, penalties are over all tokens so far, and scores and logs are
        read by the host as they are.
        """
        return bool(self.scored or self.logged) or any(
            entry.constraint is not None or entry.has_bad_words or entry.params.has_penalties
            for entry in self.special
        )

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass computes. R rows, T tokens, rows one after another.

    The runtime first does ``swap_out``, then ``copies``, then ``swap_in``, then the forward
    pass; within each layer it writes the K and V of all T tokens before any row attends.

    Attributes:
        step: number of this step, from 0.
        token_ids: [T] tokens to run; ``-1 - i`` is the one that the step before this sampled
            as its ``i``-th, which the host need not know yet.
        positions: [T] their absolute positions.
        slots: [T] where their K and V go: ``block * block_size + offset``.
        query_starts: [R + 1] where each row begins in the T tokens.
        context_lens: [R] tokens a row has in the pool after this step.
        block_tables: [R, W] int32 blocks of each row; entries past a row's own, and those
            that are out of the model's window, are 0.
        samples: the tokens to sample.
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
    samples: SampleBatch
    swap_out: IntArray
    swap_in: IntArray
    copies: IntArray

    @property
    def logits_at(self) -> IntArray:
        """[S + P] places of the tokens whose logits are wanted; at least one."""
        ends = self.query_starts[1:] - 1
        wanted = np.concatenate([ends[self.samples.rows], self.samples.given])
        return wanted if len(wanted) else ends[-1:]

    @property
    def num_rows(self) -> int:
        """Requests in the step."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step came to, in the order of its plan's :class:`SampleBatch`.

    Attributes:
        token_ids: [S] sampled tokens; ``NO_TOKEN`` where the logits were not numbers,
            ``NO_LEGAL_TOKEN`` where every token was ruled out.
        scores: for each of ``samples.scored`` its [K] log-probabilities.
        logprobs: for each of ``samples.logged`` its entries, of ``num_best`` tokens at least.
    """

    token_ids: IntArray
    scores: tuple[FloatArray, ...] = ()
    logprobs: tuple[LogprobRows, ...] = ()
