"""A request: one sample of one prompt on its way through the engine."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from batchgen.engine.logprobs import NEVER, TokenLogprobs
from batchgen.engine.prefix_index import Node
from batchgen.engine.repetition import RepetitionWatch
from batchgen.engine.step import Constraint, FloatArray, IntArray
from batchgen.errors import RowError
from batchgen.sampling import SamplingParams


class Status(StrEnum):
    """Where a request stands; it is in exactly one of the scheduler's queues.

    An ending request has left them and holds nothing: its last token is still to be read.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    ENDING = "ending"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ERROR = "error"


class TextStop(Protocol):
    """Watches the generated text for stop strings; the engine itself sees no text.

    Attributes:
        place: where in the output's text the stop string begins that was found last.
    """

    place: int

    def push(self, token_id: int) -> str | None:
        """Take the next generated token; return the stop string it completes, if any."""


@dataclass(slots=True)
class BlockAccount:
    """What a request took from the pool and gave back, kept through preemption.

    At the end ``hit_blocks + new_blocks == freed_blocks``.

    Attributes:
        hit_blocks: taken from the cache.
        new_blocks: newly allocated, swap-in included.
        freed_blocks: released by this request.
        peak_blocks: most held at once.
        cached_tokens: prompt tokens found in the cache at the first admission.
        num_preemptions: times it was preempted.
        swapped_out_blocks: copied to the CPU pool.
        swapped_in_blocks: copied back.
        recomputed_tokens: run through the model again after a preemption.
    """

    hit_blocks: int = 0
    new_blocks: int = 0
    freed_blocks: int = 0
    peak_blocks: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    recomputed_tokens: int = 0


@dataclass(slots=True)
class Timeline:
    """Moments on the engine's clock, in seconds; None until they happen."""

    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class SwappedBlocks:
    """Where a swapped-out request's private KV lies in the CPU pool.

    Attributes:
        first: index in the block table of the first block that was copied.
        blocks: CPU blocks, in table order.
        num_computed: tokens that were computed when it was copied.
        is_windowed: nothing before ``first`` is needed any more.
    """

    first: int
    blocks: list[int]
    num_computed: int
    is_windowed: bool


@dataclass(slots=True, eq=False)
class Request:
    """One sample to generate, and all the engine knows about it.

    ``num_computed`` chases ``len(token_ids)``: prefill, chunked prefill, decode and
    resumption after a preemption are the same thing.

    Attributes:
        request_id: the caller's number for it, unique among live requests.
        token_ids: prompt, then what was generated so far; the last one is below 0 where it
            was sampled and not read yet.
        num_prompt_tokens: where the prompt ends in ``token_ids``.
        params: how tokens are chosen.
        noise_key: 64-bit key of this request's sampling noise, see :func:`noise_key`.
        text_stop: watches for stop strings, where the request has any.
        constraint: what the output has to be, where that is not free.
        bad_words: token sequences that may not come to an end in the output.
        logprobs: of its tokens, as far as they are wanted.
        forced: output tokens to come that are settled already.
        repetition: detects repetition, if that ends the output.
        scored_tokens: [K] tokens of which only the log-probabilities after the prompt are
            wanted; such a request generates nothing.
        scores: [K] these log-probabilities, once the step that gives them was processed.
        max_total_tokens: prompt and output together at most.
        priority: a request with a higher number is preempted first.
        arrival: position in the order of submission; earlier goes first.
        num_computed: tokens whose KV is in the pool.
        max_computed: the highest ``num_computed`` before it was last preempted.
        block_table: the pool's blocks that hold its KV, in order.
        num_released: leading entries of the table that are out of the window; they are -1.
        leaf: index node of the last published block; the next hangs below it.
        num_published: leading blocks of the table that are in the prefix index.
        publishes: False once another request's block took this content's place.
        swapped: its KV in the CPU pool, while swapped out.
        left_in_index: while it is ending, the index nodes of its private blocks.
        stopped_by_text: ``stop_reason`` is a stop string, not a token id.
        batch_index: its index in the :class:`InputBatch` while it runs, else -1.
    """

    request_id: int
    token_ids: array[int]
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: int
    max_total_tokens: int
    text_stop: TextStop | None = None
    constraint: Constraint | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    repetition: RepetitionWatch | None = None
    logprobs: TokenLogprobs | None = None
    forced: list[int] = field(default_factory=list)
    scored_tokens: IntArray | None = None
    scores: FloatArray | None = None
    priority: int = 0
    arrival: int = -1
    status: Status = Status.WAITING
    num_computed: int = 0
    max_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    num_released: int = 0
    leaf: Node | None = None
    num_published: int = 0
    publishes: bool = True
    swapped: SwappedBlocks | None = None
    left_in_index: list[Node] = field(default_factory=list)
    batch_index: int = -1
    account: BlockAccount = field(default_factory=BlockAccount)
    timeline: Timeline = field(default_factory=Timeline)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    stopped_by_text: bool = False
    error: RowError | None = None

    @classmethod
    def create(
        cls,
        request_id: int,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        noise_key: int = 0,
        text_stop: TextStop | None = None,
        constraint: Constraint | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
        logs_prompt: bool = True,
        scored_tokens: IntArray | None = None,
        priority: int = 0,
    ) -> Request:
        """Make a request for a prompt; its output ends at ``max_model_len`` at the latest.

        ``logs_prompt`` says whether ``prompt_logprobs`` counts: one of a row's samples is enough.
        """
        token_ids = array("i", prompt_token_ids)
        num_prompt_tokens = len(token_ids)
        max_total_tokens = min(num_prompt_tokens + params.max_tokens, max_model_len)
        return cls(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            params=params,
            noise_key=noise_key,
            max_total_tokens=max_total_tokens,
            text_stop=text_stop,
            constraint=constraint,
            bad_words=bad_words,
            repetition=_repetition_watch(params, max_total_tokens - num_prompt_tokens),
            logprobs=TokenLogprobs.wanted(params, num_prompt_tokens, with_prompt=logs_prompt),
            scored_tokens=scored_tokens,
            priority=priority,
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def first_logits(self) -> int:
        """The first position of which logits are wanted still, besides those of the last token.

        All positions that were computed before it was preempted have given theirs.
        """
        if self.logprobs is None:
            return NEVER
        return max(self.logprobs.first_logits, self.max_computed)

    @property
    def is_scored(self) -> bool:
        """Whether it wants log-probabilities after its prompt and generates nothing."""
        return self.scored_tokens is not None

    @property
    def has_placeholder(self) -> bool:
        """Whether the newest token was sampled, but not read yet."""
        return self.token_ids[-1] < 0

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, the one that ended the output included."""
        return self.token_ids[self.num_prompt_tokens :].tolist()


def _repetition_watch(params: SamplingParams, max_output_tokens: int) -> RepetitionWatch | None:
    # An output that is shorter than what has to repeat needs no watch, whose memory grows with it.
    is_possible = 0 < params.stop_on_repetition <= max_output_tokens
    return RepetitionWatch(params.stop_on_repetition) if is_possible else None


def noise_key(seed: int, row_id: int | str, sample_index: int) -> int:
    """Key the sampling noise of one sample, whatever its neighbours and the order.

    Returns:
        A 64-bit number; with the output position it gives each token's noise.
    """
    text = f"{seed}|{type(row_id).__name__}|{row_id}|{sample_index}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
