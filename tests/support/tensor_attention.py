"""Attention that reads all it needs from tensors when it runs, as a captured graph must."""

from dataclasses import dataclass
from typing import Any

import torch

from batchgen.kernels.reference import AttentionOptions
from batchgen.runtime.attention_metadata import AttentionMetadata
from batchgen.runtime.torch_attention import TorchAttention


class TensorAttention(TorchAttention):
    """The torch backend, and decode steps by operators whose shapes say nothing of the step."""

    name = "tensors"
    shares = False

    def shared_runs(self, plan: Any, block_size: int) -> list[Any]:
        return []

    def over(self, inputs: AttentionMetadata, array: torch.Tensor, cache: Any) -> "_Decode":
        return _Decode(inputs.find(array), cache)


@dataclass(frozen=True)
class _Decode:
    step: Any
    cache: Any

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        extra: Any,
    ) -> torch.Tensor:
        keys, values = self.cache.keys[layer.layer_idx], self.cache.values[layer.layer_idx]
        for pool, new in ((keys, key), (values, value)):
            self._store(pool.flatten(0, 1), new)
        tables = self.step.block_tables.long()
        group = query.shape[1] // keys.shape[2]
        seen_keys, seen_values = (
            pool[tables].flatten(1, 2).repeat_interleave(group, dim=2) for pool in (keys, values)
        )
        at = torch.arange(seen_keys.shape[1])
        hidden = at[None, :] >= self.step.rows.context_lens[:, None]
        scores = torch.einsum("rhd,rlhd->rhl", query, seen_keys) * options.scale
        # A row that sees nothing is no number: nobody may read what padding gives.
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
        seen_values = seen_values.masked_fill(hidden[:, :, None, None], 0.0)
        return torch.einsum("rhl,rlhd->rhd", weights, seen_values)

    def _store(self, slots: torch.Tensor, new: torch.Tensor) -> None:
        for row in range(len(new)):
            slot = self.step.slots[row : row + 1].long()
            place = slot.clamp_min(0)
            kept = torch.where((slot >= 0)[:, None, None], new[row : row + 1], slots[place])
            slots.index_copy_(0, place, kept)
