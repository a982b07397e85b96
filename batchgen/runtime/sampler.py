"""From logits to tokens.

The order is vLLM's: bias, penalties, held-back tokens and those that a constraint rules out,
then greedy rows take the largest logit (the lowest id where several tie); the others divide
by the temperature and apply min_p, top_k and top_p, each over what the one before has left,
renormalised. At least one token always stays. Noise is a function of (seed, id, sample,
position) alone, so a row's result depends on no neighbour, no order and no resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.step import (
    NO_LEGAL_TOKEN,
    NO_TOKEN,
    FloatArray,
    IntArray,
    LogprobRows,
    MaskWords,
    SampleBatch,
    ScoredSample,
    SpecialSample,
    StepOutput,
)
from batchgen.runtime.device.transfers import Put
from batchgen.runtime.logprobs import LoggedLogits
from batchgen.sampling import SamplingParams

# Rows sampled at a time: bounds the float64 temporaries to some tens of MiB.
_ROWS = 32
# Sums of probabilities are compared with top_p up to this rounding.
_TOP_P_SLACK = 1e-7


@dataclass(frozen=True, slots=True)
class _RandomRows:
    """R of a batch's rows that are drawn together; all on the device.

    Attributes:
        rows: [R] int64 places in the batch.
        noise: [R, 1] float64 in [0, 1).
        temperature: [R, 1] float64.
        min_p, top_k, top_p: [R, 1] float64; None if no row asks for it.
    """

    rows: torch.Tensor
    noise: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How a batch's tokens are chosen, on the device.

    Attributes:
        samples: the batch.
        random: its rows that are not greedy, some at a time.
        banned: [B, 2] int64 pairs of row and token that may not be; None if all may.
    """

    samples: SampleBatch
    random: tuple[_RandomRows, ...]
    banned: torch.Tensor | None


def prepare(samples: SampleBatch, put: Put) -> SamplingMetadata:
    """Upload the sampling parameters of a batch, before the logits are there.

    Args:
        samples: S descriptions of how to sample.
        put: uploads an array.
    """
    random = np.flatnonzero(samples.temperature > 0)
    starts = range(0, len(random), _ROWS)
    banned = [(entry.index, token) for entry in samples.special for token in entry.banned]
    return SamplingMetadata(
        samples=samples,
        random=tuple(_random_rows(samples, random[at : at + _ROWS], put) for at in starts),
        banned=put(np.array(banned, dtype=np.int64)) if banned else None,
    )


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What the sampler found, the tokens still on the device.

    Attributes:
        token_ids: [S] int64; ``NO_TOKEN`` where a row's logits hold a NaN,
            ``NO_LEGAL_TOKEN`` where every token is ruled out.
        scores, logprobs: see :class:`~batchgen.engine.step.StepOutput`.
    """

    token_ids: torch.Tensor
    scores: tuple[FloatArray, ...]
    logprobs: tuple[LogprobRows, ...]


def sample_tokens(logits: torch.Tensor, sampling: SamplingMetadata) -> SamplerOutput:
    """Choose one token for each row; the host waits for nothing.

    Constraints, penalties, bias, scores and logs are the exception: those need the host.

    Args:
        logits: [S + P, V] float32 logits of the samples, then of the given tokens; the former
            are changed in place.
        sampling: how; see :func:`prepare`.
    """
    samples = sampling.samples
    logits, given = logits[: len(samples)], logits[len(samples) :]
    logged = LoggedLogits.take(logits, given, samples.logged)
    scores = _scores(logits, samples.scored)
    for entry in samples.special:
        if entry.params.logit_bias:
            _bias(logits[entry.index], entry.params)
        if entry.params.has_penalties:
            _penalize(logits[entry.index], entry)
    if sampling.banned is not None:
        rows, ids = sampling.banned.unbind(1)
        logits.view(-1).index_fill_(0, rows * logits.shape[1] + ids, float("-inf"))
    _constrain(logits, samples.special)
    _force(logits, samples.special)
    tokens = logits.argmax(dim=-1)
    for random in sampling.random:
        tokens.index_copy_(0, random.rows, _draw(logits.index_select(0, random.rows), random))
    # The largest logit of a row with a NaN is NaN: one look at [S] instead of [S, V].
    if len(samples):
        largest = logits.amax(dim=-1)
        tokens.masked_fill_(largest.isnan(), NO_TOKEN)
        tokens.masked_fill_(largest == float("-inf"), NO_LEGAL_TOKEN)
    return SamplerOutput(tokens, scores, logged.entries(tokens))


def sample(logits: torch.Tensor, samples: SampleBatch) -> StepOutput:
    """Choose one token for each row of logits that are there already; see :func:`sample_tokens`."""

    def put(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device)

    found = sample_tokens(logits, prepare(samples, put))
    return StepOutput(found.token_ids.cpu().numpy(), found.scores, found.logprobs)


def _scores(logits: torch.Tensor, scored: Sequence[ScoredSample]) -> tuple[FloatArray, ...]:
    """Return the log-probabilities that scored samples ask for, in float64."""
    found: list[FloatArray] = []
    for start in range(0, len(scored), _ROWS):
        entries = scored[start : start + _ROWS]
        rows = logits[[entry.index for entry in entries]].double().log_softmax(dim=-1)
        lengths = [len(entry.token_ids) for entry in entries]
        places = np.repeat(np.arange(len(entries)), lengths)
        tokens = np.concatenate([entry.token_ids for entry in entries])
        wanted = rows[torch.from_numpy(places), torch.from_numpy(tokens)].cpu().numpy()
        found.extend(np.split(wanted, np.cumsum(lengths)[:-1]))
    return tuple(found)


def _bias(logits: torch.Tensor, params: SamplingParams) -> None:
    """Add the bias to [V] logits in place."""
    tokens, numbers = zip(*params.logit_bias, strict=True)
    logits[list(tokens)] += torch.tensor(numbers, dtype=logits.dtype, device=logits.device)


def _penalize(logits: torch.Tensor, entry: SpecialSample) -> None:
    """Apply the three penalties to [V] logits in place."""
    params = entry.params
    known = torch.tensor(entry.token_ids, dtype=torch.int64, device=logits.device)
    if params.repetition_penalty != 1:
        seen = torch.unique(known)
        scores = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / factor, scores * factor)
    generated, counts = torch.unique(known[entry.num_prompt_tokens :], return_counts=True)
    logits[generated] -= params.frequency_penalty * counts + params.presence_penalty


def _constrain(logits: torch.Tensor, special: Sequence[SpecialSample]) -> None:
    """Rule out in [S, V] logits what constraints do not allow.

    The masks are made here, after the forward pass was started, so that on a GPU the CPU
    makes them while the device computes.
    """
    found = [(entry.index, entry.constraint) for entry in special if entry.constraint is not None]
    if not found:
        return
    indices, constraints = zip(*found, strict=True)
    source = constraints[0].source
    masks = np.zeros((len(found), source.num_words), dtype=np.int32)
    source.fill(constraints, masks)
    forbidden = np.zeros((len(logits), source.num_words), dtype=np.int32)
    forbidden[list(indices)] = ~masks
    bits = _bits(forbidden, logits.device)
    width = min(logits.shape[-1], bits.shape[-1])
    # In place and all at once: rows taken out and put back would be copied twice.
    logits[:, :width].masked_fill_(bits[:, :width], float("-inf"))
    if width < logits.shape[-1]:
        logits[list(indices), width:] = float("-inf")


def _force(logits: torch.Tensor, special: Sequence[SpecialSample]) -> None:
    """Leave one token in [S, V] logits where it is settled."""
    for entry in special:
        if entry.forced is not None:
            logits[entry.index] = float("-inf")
            logits[entry.index, entry.forced] = 0.0


def _bits(words: MaskWords, device: torch.device) -> torch.Tensor:
    """Unpack [S, words] to [S, 32 * words] booleans."""
    octets = words.astype("<i4", copy=False).view(np.uint8)
    if device.type == "cpu":
        # Ten times as fast as torch's shifts.
        return torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little").view(np.bool_))
    places = torch.arange(8, dtype=torch.uint8, device=device)
    packed = torch.from_numpy(octets).to(device)
    return ((packed[:, :, None] >> places) & 1).flatten(1).bool()


def _random_rows(samples: SampleBatch, rows: IntArray, put: Put) -> _RandomRows:
    """Upload how to draw [R] rows of a batch; filters that no row asks for are left out."""

    def column(values: npt.NDArray[np.float64] | IntArray) -> torch.Tensor:
        return put(values.astype(np.float64)[:, None])

    top_k, top_p, min_p = samples.top_k[rows], samples.top_p[rows], samples.min_p[rows]
    cuts = bool(((top_k > 0) | (top_p < 1)).any())
    return _RandomRows(
        rows=put(rows),
        noise=column(_uniform(samples.noise_keys[rows], samples.positions[rows])),
        temperature=column(samples.temperature[rows]),
        min_p=column(min_p) if (min_p > 0).any() else None,
        top_k=column(np.where(top_k > 0, top_k, np.inf)) if cuts else None,
        top_p=column(top_p) if cuts else None,
    )


def _draw(logits: torch.Tensor, random: _RandomRows) -> torch.Tensor:
    """Sample [R] tokens from [R, V] logits by inverting the distribution function."""
    cumulative = _filtered_probabilities(logits, random).cumsum(dim=-1)
    # Below the total even after rounding, so that a token with probability is found.
    total = cumulative[:, -1:]
    target = torch.minimum(random.noise * total, torch.nextafter(total, total * 0))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _filtered_probabilities(logits: torch.Tensor, random: _RandomRows) -> torch.Tensor:
    """Return [R, V] float64 probabilities after temperature, min_p, top_k and top_p."""
    # The maximum is subtracted before the division: no temperature overflows it.
    shifted = logits.double() - logits.max(dim=-1, keepdim=True).values.double()
    probabilities = torch.softmax(shifted / random.temperature.clamp_min(1e-30), dim=-1)
    if random.min_p is not None:
        floor = random.min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = _keep(probabilities, probabilities >= floor)
    if random.top_k is None or random.top_p is None:
        return probabilities
    # A stable sort: of equally likely tokens the lowest ids are kept first.
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)[None]
    ordered = _keep(ordered, rank < random.top_k)
    before = ordered.cumsum(dim=-1) - ordered
    kept = (before < random.top_p - _TOP_P_SLACK) | (rank == 0) | (random.top_p >= 1)
    ordered = _keep(ordered, kept)
    return torch.zeros_like(ordered).scatter_(-1, ids, ordered)


def _keep(probabilities: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Drop what is not kept and renormalise."""
    remaining = probabilities.masked_fill(~kept, 0.0)
    return remaining / remaining.sum(dim=-1, keepdim=True)


def _uniform(keys: npt.NDArray[np.uint64], positions: IntArray) -> npt.NDArray[np.float64]:
    """Hash [R] keys and positions to numbers in [0, 1) (SplitMix64's finaliser)."""
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    uniform: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform
