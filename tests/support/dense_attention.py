"""Attention of one row, written out in float64."""

import torch

from batchgen.kernels.reference import AttentionOptions


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """One row in float64: [n, Hq, D] queries are the last of C tokens."""
    query, key, value = query.double(), key.double(), value.double()
    n, heads, _ = query.shape
    out = torch.empty(n, heads, value.shape[-1], dtype=torch.float64)
    group = heads // key.shape[1]
    for i in range(n):
        position = key.shape[0] - n + i
        lowest = 0 if options.window is None else max(0, position - options.window + 1)
        for h in range(heads):
            scores = key[lowest : position + 1, h // group] @ query[i, h] * options.scale
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            weights = scores.exp()
            total = weights.sum()
            if options.sinks is not None:
                total = total + options.sinks[h].double().exp()
            out[i, h] = weights / total @ value[lowest : position + 1, h // group]
    return out
