"""Paged attention by torch's operators, on any device."""

import numpy as np
import torch

from batchgen.engine.step import StepPlan
from batchgen.kernels.cascade import cascade_attention
from batchgen.kernels.reference import AttentionOptions, paged_attention, store_kv
from batchgen.runtime.attention import LayerAttention
from batchgen.runtime.device.transfers import Put
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.shared_prefixes import SharedPrefix, cascade_layout


class TorchAttention:
    """The backend; see :class:`batchgen.runtime.attention.AttentionBackend`.

    Args:
        sharing: whether a shared prefix is attended to once for all its rows.
    """

    name = "torch"

    def __init__(self, sharing: SharedPrefix = SharedPrefix.AUTO) -> None:
        self._sharing = sharing

    def begin(self, plan: StepPlan, cache: KVCache, put: Put) -> LayerAttention:
        """Find what the step's rows share."""
        return _TorchStep(plan, cache, put, self._sharing)


class _TorchStep:
    """Attention of one step: stores the new K and V, then attends to the pool."""

    def __init__(self, plan: StepPlan, cache: KVCache, put: Put, sharing: SharedPrefix) -> None:
        self._cache = cache
        self._layout = cascade_layout(plan, cache.block_size, put, sharing)
        self._slots = put(plan.slots)
        self._block_tables = put(plan.block_tables.astype(np.int64))
        self._query_starts = plan.query_starts.tolist()
        self._context_lens = plan.context_lens.tolist()

    def attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        extra: dict[str, object],
    ) -> torch.Tensor:
        """See :meth:`LayerAttention.attend`."""
        index = layer.layer_idx
        assert isinstance(index, int)
        keys, values = self._cache.keys[index], self._cache.values[index]
        # All rows' K and V first: rows may share blocks that this step writes.
        store_kv(keys, key, self._slots)
        store_kv(values, value, self._slots)
        if options.window is None and options.sinks is None:
            return cascade_attention(
                query,
                keys,
                values,
                self._layout,
                scale=options.scale,
                softcap=options.softcap,
            )
        return paged_attention(
            query,
            keys,
            values,
            self._query_starts,
            self._context_lens,
            self._block_tables,
            options,
        )
