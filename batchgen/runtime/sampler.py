"""From logits to tokens.

The order is vLLM's: penalties, held-back tokens, then greedy rows take the largest
logit (the lowest id where several tie); the others divide by the temperature and apply
min_p, top_k and top_p, each over what the one before has left, renormalised. At least
one token always stays. Noise is a function of (seed, id, sample, position) alone, so a
row's result depends on no neighbour, no order and no resume.
"""

import numpy as np
import torch

from batchgen.engine.step import Sample

# Rows sampled at a time: bounds the float64 temporaries to some tens of MiB.
_ROWS = 32
# Sums of probabilities are compared with top_p up to this rounding.
_TOP_P_SLACK = 1e-7
_MASK = (1 << 64) - 1


def sample(logits: torch.Tensor, samples: tuple[Sample, ...]) -> list[int | None]:
    """Choose one token for each row.

    Args:
        logits: [S, V] float32, changed in place.
        samples: S descriptions of how to choose.

    Returns:
        S token ids; None where a row's logits hold a NaN.
    """
    for row, entry in enumerate(samples):
        if entry.params.has_penalties:
            _penalize(logits[row], entry)
        if entry.banned:
            logits[row, list(entry.banned)] = float("-inf")
    tokens = logits.argmax(dim=-1)
    random = [row for row, entry in enumerate(samples) if not entry.params.is_greedy]
    for start in range(0, len(random), _ROWS):
        rows = random[start : start + _ROWS]
        tokens[rows] = _draw(logits[rows], [samples[row] for row in rows])
    # The largest logit of a row with a NaN is NaN: one look at [S] instead of [S, V].
    broken = logits.amax(dim=-1).isnan() if len(samples) else tokens.bool()
    chosen, failed = tokens.tolist(), broken.tolist()
    return [None if bad else token for token, bad in zip(chosen, failed, strict=True)]


def _penalize(logits: torch.Tensor, entry: Sample) -> None:
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


def _draw(logits: torch.Tensor, samples: list[Sample]) -> torch.Tensor:
    """Sample [R] tokens from [R, V] logits by inverting the distribution function."""
    probabilities = _filtered_probabilities(logits, samples)
    cumulative = probabilities.cumsum(dim=-1)
    noise = torch.tensor(
        [_uniform(entry.noise_key, entry.position) for entry in samples],
        dtype=torch.float64,
        device=logits.device,
    )
    # Below the total even after rounding, so that a token with probability is found.
    total = cumulative[:, -1:]
    target = torch.minimum(noise[:, None] * total, torch.nextafter(total, total * 0))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _filtered_probabilities(logits: torch.Tensor, samples: list[Sample]) -> torch.Tensor:
    """Give [R, V] float64 probabilities after temperature, min_p, top_k and top_p."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    params = [entry.params for entry in samples]
    temperature = column([p.temperature for p in params]).clamp_min(1e-30)
    # The maximum is subtracted before the division: no temperature overflows it.
    shifted = logits.double() - logits.max(dim=-1, keepdim=True).values.double()
    probabilities = torch.softmax(shifted / temperature, dim=-1)
    if any(p.min_p > 0 for p in params):
        floor = column([p.min_p for p in params]) * probabilities.amax(dim=-1, keepdim=True)
        probabilities = _keep(probabilities, probabilities >= floor)
    if all(p.top_k <= 0 and p.top_p >= 1 for p in params):
        return probabilities
    # A stable sort: of equally likely tokens the lowest ids are kept first.
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)[None]
    top_k = column([p.top_k if p.top_k > 0 else logits.shape[-1] for p in params])
    ordered = _keep(ordered, rank < top_k)
    top_p = column([p.top_p for p in params])
    before = ordered.cumsum(dim=-1) - ordered
    ordered = _keep(ordered, (before < top_p - _TOP_P_SLACK) | (rank == 0) | (top_p >= 1))
    return torch.zeros_like(ordered).scatter_(-1, ids, ordered)


def _keep(probabilities: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Drop what is not kept and renormalise."""
    remaining = probabilities.masked_fill(~kept, 0.0)
    return remaining / remaining.sum(dim=-1, keepdim=True)


def _uniform(key: int, position: int) -> float:
    """Hash a key and a position to a number in [0, 1) (SplitMix64's finaliser)."""
    state = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    state ^= state >> 31
    return float(np.float64(state >> 11) * 2.0**-53)
