"""Paged attention on a CPU by a kernel that is compiled for it."""

import numpy as np
import torch

from batchgen.engine.step import StepPlan
from batchgen.kernels.native.paged_attention import PackedRows, native_paged_attention
from batchgen.kernels.reference import AttentionOptions, store_kv
from batchgen.runtime.attention import LayerAttention
from batchgen.runtime.device.transfers import Put
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.shared_prefixes import SharedPrefix


class NativeAttention:
    """The backend; see :class:`batchgen.runtime.attention.AttentionBackend`.

    Args:
        sharing: whether rows go over the blocks that they share together; results are the
            same to the bit either way.
    """

    name = "native"

    def __init__(self, sharing: SharedPrefix = SharedPrefix.AUTO) -> None:
        self._shares = sharing is not SharedPrefix.OFF

    def begin(self, plan: StepPlan, cache: KVCache, put: Put) -> LayerAttention:
        """Say where the step's keys lie."""
        return _NativeStep(plan, cache, put, self._shares)


class _NativeStep:
    """Attention of one step: stores the new K and V, then attends to the pool."""

    def __init__(self, plan: StepPlan, cache: KVCache, put: Put, shares: bool) -> None:
        self._cache = cache
        self._slots = put(plan.slots)
        rows = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_starts))
        self._packed = PackedRows(
            np.ascontiguousarray(plan.block_tables), rows, plan.positions, shares
        )

    def attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        extra: dict[str, object],
    ) -> torch.Tensor:
        """See :meth:`batchgen.runtime.attention.LayerAttention.attend`."""
        index = layer.layer_idx
        assert isinstance(index, int)
        keys, values = self._cache.keys[index], self._cache.values[index]
        # All rows' K and V first: rows may share blocks that this step writes.
        store_kv(keys, key, self._slots)
        store_kv(values, value, self._slots)
        return native_paged_attention(query, keys, values, self._packed, options)
