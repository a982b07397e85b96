"""Paged attention that reads a shared prefix once for all the rows that share it.

A row's keys fall into segments that it shares with its neighbours, and its own. Each is
attended to by itself; the results join by their log-sum-exp, which is exact (Hydragen,
FlashInfer's cascade). Everything is `bmm` over whole groups of rows: on a CPU one call a
row costs more than its arithmetic.

Shapes: T packed tokens, Hq query heads, Hkv key/value heads, D head size, N pool blocks of
B tokens. Query head ``h`` reads key/value head ``h // (Hq // Hkv)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Scores computed at a time, in elements: the temporaries should stay in the caches.
_MAX_SCORES = 1 << 21


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """Blocks that a range of tokens sees as a whole.

    Attributes:
        blocks: [n] int64 blocks, all full.
        first_token, end_token: the packed tokens that see them.
    """

    blocks: torch.Tensor
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """Rows of like size with the keys behind their shared segments, padded to one shape.

    R rows, n queries and W blocks a row at most, C = W * B keys.

    Attributes:
        tokens: [R, n] packed tokens; padding repeats a row's last one.
        real: [R, n] whether it is no padding.
        blocks: [R, W] int64 blocks; padding is any valid block.
        hidden: [R, n, C] what a query may not see: later keys and padding.
        unused: [R, C] keys that no query of the row may see; they may hold NaN.
    """

    tokens: torch.Tensor
    real: torch.Tensor
    blocks: torch.Tensor
    hidden: torch.Tensor
    unused: torch.Tensor


@dataclass(frozen=True, slots=True)
class CascadeLayout:
    """How a step's rows share their keys.

    Every token is in exactly one of ``own``; it may be in several segments.
    """

    segments: Sequence[SharedSegment]
    own: Sequence[OwnKeys]


def cascade_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: CascadeLayout,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend causally to each row's blocks, in float32.

    Args:
        query: [T, Hq, D].
        key_cache: [N, B, Hkv, D].
        value_cache: [N, B, Hkv, Dv].
        layout: which keys each token sees.
        scale: factor on the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.

    Returns:
        [T, Hq, Dv] in the query's dtype.
    """
    scaled = query.float() * scale
    out = scaled.new_empty(*query.shape[:2], value_cache.shape[-1])
    lse = scaled.new_empty(query.shape[:2])
    for rows in layout.own:
        _attend_own(scaled, key_cache, value_cache, rows, softcap, out, lse)
    for segment in layout.segments:
        _join_segment(scaled, key_cache, value_cache, segment, softcap, out, lse)
    return out.to(query.dtype)


def _attend_own(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: OwnKeys,
    softcap: float | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Fill the rows of ``out`` [T, Hq, Dv] and ``lse`` [T, Hq] from their own keys."""
    num_rows, n = rows.tokens.shape
    num_kv_heads = key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    key = key_cache[rows.blocks].flatten(1, 2).float()  # [R, C, Hkv, D]
    value = value_cache[rows.blocks].flatten(1, 2).float()
    value.masked_fill_(rows.unused[:, :, None, None], 0.0)
    grouped = query[rows.tokens].view(num_rows, n, num_kv_heads, group, -1)
    hidden = rows.hidden[:, :, None, :]
    tokens = rows.tokens[rows.real]
    for head in range(num_kv_heads):
        scores = torch.bmm(
            grouped[:, :, head].reshape(num_rows, n * group, -1), key[:, :, head].transpose(1, 2)
        )
        scores = _cap(scores, softcap).view(num_rows, n, group, -1)
        scores.masked_fill_(hidden, float("-inf"))
        weights, sums = _exponentials(scores.flatten(1, 2))
        mixed = torch.bmm(weights, value[:, :, head]).div_(sums.total)
        heads = slice(head * group, (head + 1) * group)
        out[tokens, heads] = mixed.view(num_rows, n, group, -1)[rows.real]
        lse[tokens, heads] = sums.lse.view(num_rows, n, group)[rows.real]


def _join_segment(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    segment: SharedSegment,
    softcap: float | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attend a range of tokens to a segment and join the result to theirs."""
    num_kv_heads = key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    # [Hkv, D, P] and [Hkv, P, Dv]: views with strides that bmm takes as they are.
    key = key_cache[segment.blocks].flatten(0, 1).float().permute(1, 2, 0)
    value = value_cache[segment.blocks].flatten(0, 1).float().permute(1, 0, 2)
    piece = max(1, _MAX_SCORES // (query.shape[1] * key.shape[2]))
    for start in range(segment.first_token, segment.end_token, piece):
        end = min(start + piece, segment.end_token)
        grouped = query[start:end].view(end - start, num_kv_heads, group, -1).transpose(0, 1)
        scores = torch.bmm(grouped.reshape(num_kv_heads, (end - start) * group, -1), key)
        weights, sums = _exponentials(_cap(scores, softcap))
        mixed = torch.bmm(weights, value).div_(sums.total)

        def by_token(tensor: torch.Tensor, count: int = end - start) -> torch.Tensor:
            split = tensor.view(num_kv_heads, count, group, -1).transpose(0, 1)
            return split.reshape(count, num_kv_heads * group, -1)

        joined = torch.logaddexp(lse[start:end], other := by_token(sums.lse)[..., 0])
        out[start:end].mul_((lse[start:end] - joined).exp_()[..., None])
        out[start:end].add_(by_token(mixed).mul_((other - joined).exp_()[..., None]))
        lse[start:end] = joined


@dataclass(frozen=True, slots=True)
class _Sums:
    """[..., rows, 1] sums of exponentials and [..., rows] logarithms of the true sums."""

    total: torch.Tensor
    lse: torch.Tensor


def _exponentials(scores: torch.Tensor) -> tuple[torch.Tensor, _Sums]:
    """Turn [..., rows, C] scores into exp(score - highest), in place, with their sums."""
    highest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return weights, _Sums(total, (total.log() + highest)[..., 0])


def _cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    if softcap is None:
        return scores
    return scores.div_(softcap).tanh_().mul_(softcap)
