"""Paged attention in plain torch: the reference for every kernel, and the CPU's path.

Shapes: T packed tokens, Hq query heads, Hkv key/value heads, D head size, N pool blocks
of B tokens. Query head ``h`` reads key/value head ``h // (Hq // Hkv)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Scores of one piece of a long prefill, in elements: bounds the temporary to 256 MiB.
_MAX_SCORES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer's attention adds to softmax(q k) v.

    Attributes:
        scale: factor on the scores.
        window: a query at position p sees keys above ``p - window`` only; None sees all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        sinks: [Hq] a logit per head that joins the softmax and has no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def store_kv(cache: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> None:
    """Write new keys or values to their slots.

    Args:
        cache: [N, B, Hkv, D] contiguous pool of one layer, changed in place.
        new: [T, Hkv, D].
        slots: [T] int64 ``block * B + offset``.
    """
    cache.flatten(0, 1).index_copy_(0, slots, new.to(cache.dtype))


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    block_tables: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend causally to each row's own blocks, in float32.

    Args:
        query: [T, Hq, D], rows one after another; a row's queries are its last tokens.
        key_cache: [N, B, Hkv, D].
        value_cache: [N, B, Hkv, Dv].
        query_starts: R + 1 places where rows begin in T.
        context_lens: R tokens a row has in the pool, its queries included.
        block_tables: [R, W] blocks of each row.
        options: scale, window, soft cap, sinks.

    Returns:
        [T, Hq, Dv] in the query's dtype.
    """
    block_size = key_cache.shape[1]
    out = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    for row, context_len in enumerate(context_lens):
        start, end = query_starts[row], query_starts[row + 1]
        first = _first_visible_block(context_len - (end - start), options.window, block_size)
        blocks = block_tables[row, first : -(-context_len // block_size)]
        num_keys = context_len - first * block_size
        key = key_cache.index_select(0, blocks).flatten(0, 1)[:num_keys]
        value = value_cache.index_select(0, blocks).flatten(0, 1)[:num_keys]
        piece = max(1, _MAX_SCORES // (query.shape[1] * num_keys))
        for at in range(start, end, piece):
            stop = min(at + piece, end)
            first_position = num_keys - (end - at)
            out[at:stop] = _attend(query[at:stop], key, value, first_position, options)
    return out


def _first_visible_block(first_query: int, window: int | None, block_size: int) -> int:
    if window is None:
        return 0
    return max(0, first_query - window + 1) // block_size


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_position: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend n queries, at positions from ``first_position`` on, to keys 0 to C - 1."""
    n, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    # [Hkv, n * G, D] x [Hkv, D, C]: the heads of a group share one product.
    grouped = query.float().reshape(n, num_kv_heads, group, head_size).permute(1, 0, 2, 3)
    keys = key.float().permute(1, 2, 0)
    scores = torch.bmm(grouped.reshape(num_kv_heads, n * group, head_size), keys)
    scores = scores.mul_(options.scale).view(num_kv_heads, n, group, -1)
    if options.softcap is not None:
        scores = torch.tanh(scores.div_(options.softcap)).mul_(options.softcap)
    if n > 1 or options.window is not None:
        scores.masked_fill_(_hidden(n, first_position, key, options.window), float("-inf"))
    weights = _softmax(scores, options.sinks)
    mixed = torch.bmm(weights.reshape(num_kv_heads, n * group, -1), value.float().permute(1, 0, 2))
    mixed = mixed.view(num_kv_heads, n, group, -1).permute(1, 0, 2, 3)
    return mixed.reshape(n, num_heads, -1).to(query.dtype)


def _hidden(n: int, first_position: int, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """Mark what a query may not see: [n, 1, C], true beyond itself or before its window."""
    queries = torch.arange(first_position, first_position + n, device=key.device)[:, None]
    keys = torch.arange(key.shape[0], device=key.device)[None, :]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hidden[:, None, :]


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension of [Hkv, n, G, C], a sink's share left out."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    num_kv_heads, n, group, _ = scores.shape
    column = sinks.float().view(num_kv_heads, 1, group, 1).expand(-1, n, -1, 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
