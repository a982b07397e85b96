"""Log-probabilities of sampled and of given tokens, beside the likeliest ones in their place.

They are the model's own: of its logits before bias, penalties, temperature and whatever rules
tokens out (vLLM's ``raw_logprobs``). So they say how likely the model found a token that a
constraint forced on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from batchgen.engine.step import LoggedTokens, LogprobRows

# Rows at a time: bounds the float64 and int64 temporaries to some tens of MiB.
_ROWS = 32


@dataclass(frozen=True, slots=True)
class LoggedLogits:
    """What is left of a step's logits for its logs while the sampler changes them.

    Attributes:
        logged: the tokens that are wanted.
        sampled: [L, V] logits that sampled ones of them follow, in their order.
        given: [P, V] logits that the known ones follow.
    """

    logged: Sequence[LoggedTokens]
    sampled: torch.Tensor
    given: torch.Tensor

    @classmethod
    def take(
        cls, logits: torch.Tensor, given: torch.Tensor, logged: Sequence[LoggedTokens]
    ) -> "LoggedLogits":
        """Keep what is needed of [S, V] logits that are about to be changed."""
        samples = [entry.sample for entry in logged if entry.sample >= 0]
        return cls(logged, logits[samples] if samples else logits[:0], given)

    def entries(self, tokens: torch.Tensor) -> tuple[LogprobRows, ...]:
        """Return the entries of each log, once the [S] tokens are chosen.

        All list as many likeliest tokens as the log that wants most of them.
        """
        if not self.logged:
            return ()
        num_best = max(entry.num_best for entry in self.logged)
        samples = [entry.sample for entry in self.logged if entry.sample >= 0]
        # A row without a token has ended: its entry is read by nobody.
        chosen = tokens[samples].clamp_min(0)
        known = np.concatenate([entry.token_ids for entry in self.logged])
        sampled = logprob_rows(self.sampled, chosen, num_best)
        given = logprob_rows(self.given, torch.from_numpy(known), num_best)
        found, place = [], 0
        for entry in self.logged:
            parts = [given[entry.first : entry.first + len(entry.token_ids)]]
            if entry.sample >= 0:
                parts.append(sampled[place : place + 1])
                place += 1
            found.append(LogprobRows.joined(parts, num_best))
        return tuple(found)


def logprob_rows(logits: torch.Tensor, tokens: torch.Tensor, num_best: int) -> LogprobRows:
    """Return the entries of N tokens.

    Args:
        logits: [N, V] float32.
        tokens: [N] the token that follows each.
        num_best: likeliest tokens in an entry; the vocabulary may have fewer.
    """
    num_best = min(num_best, logits.shape[-1])
    parts = [
        _entries(logits[at : at + _ROWS], tokens[at : at + _ROWS].to(logits.device), num_best)
        for at in range(0, len(logits), _ROWS)
    ]
    if not parts:
        return LogprobRows(
            np.empty((0, 1 + num_best), np.int32),
            np.empty((0, 1 + num_best), np.float32),
            np.empty(0, np.int32),
        )
    ids, logprobs, ranks = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    return LogprobRows(ids.astype(np.int32), logprobs, ranks.astype(np.int32))


def _entries(
    logits: torch.Tensor, tokens: torch.Tensor, num_best: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids and log-probabilities [R, 1 + K], and ranks [R]."""
    keys = _order_keys(logits)
    best = keys.topk(num_best, dim=-1).indices if num_best else tokens[:, None][:, :0]
    ids = torch.cat([tokens[:, None], best], dim=-1)
    total = logits.double().logsumexp(dim=-1, keepdim=True)
    logprobs = (logits.gather(-1, ids).double() - total).float()
    ranks = (keys >= keys.gather(-1, tokens[:, None])).sum(dim=-1)
    return ids, logprobs, ranks


def _order_keys(logits: torch.Tensor) -> torch.Tensor:
    """Return [R, V] int64 keys that differ and stand in the order of logits, then of lower ids."""
    # Adding 0 makes one zero of two; the bits of negative numbers stand the other way round.
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (ordered.long() << 32) | (0x7FFFFFFF - ids)
