"""Paged attention by Triton's kernels: on a GPU, or on CPU tensors in Triton's interpreter."""

from dataclasses import replace
from math import lcm

import numpy as np
import torch

from batchgen.engine.step import StepPlan
from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.attention import Cut, choose_cut
from batchgen.kernels.triton.batch import KVScales, PagedRows, SharedSegments
from batchgen.kernels.triton.launch import (
    LEAST_CAPABILITY,
    Target,
    device_capability,
    is_interpreted,
    problem_with_launching,
    supports_fp8,
    target_of,
)
from batchgen.kernels.triton.paged_attention import paged_attention
from batchgen.kernels.triton.prefix_attention import cascade_attention, fixed_order_attention
from batchgen.kernels.triton.store_kv import store_kv
from batchgen.kernels.triton.tiles import LARGEST_HEAD, MOST_KEYS, fixed_order_tile
from batchgen.runtime.attention import LayerAttention
from batchgen.runtime.attention_metadata import AttentionMetadata, exact_inputs
from batchgen.runtime.device.transfers import Put
from batchgen.runtime.kv_cache import KVCache, LayerGeometry, is_fp8
from batchgen.runtime.shared_prefixes import SharedPrefix, SharedRun, shared_runs


def problem_with_triton(
    layers: list[LayerGeometry], device: torch.device, kv_dtype: torch.dtype
) -> str | None:
    """Return why the kernels cannot run a model on a device; None if they can."""
    if device.type == "cpu" and not is_interpreted():
        return (
            "Triton's kernels need a GPU; on a CPU they run only in Triton's interpreter, for "
            "tests, with the environment variable TRITON_INTERPRET=1"
        )
    if device.type not in ("cpu", "cuda"):
        return f"Triton's kernels do not run on {device.type}"
    if device.type == "cuda" and device_capability(device) < LEAST_CAPABILITY:
        return f"Triton's kernels need a GPU of capability {LEAST_CAPABILITY / 10} or above"
    if is_fp8(kv_dtype) and not supports_fp8(device):
        return "an fp8 pool needs a GPU of capability 8.9 or above; set pool.kv_dtype=auto"
    largest = max(max(layer.key_size, layer.value_size) for layer in layers)
    if largest > LARGEST_HEAD:
        return f"Triton's kernels take heads of up to {LARGEST_HEAD}, the model has {largest}"
    return problem_with_launching() if device.type == "cuda" else None


class TritonAttention:
    """The backend; see :class:`batchgen.runtime.attention.AttentionBackend`.

    Args:
        layers: shapes of the model's keys and values.
        sharing: whether a shared prefix is attended to once for all its rows.
        deterministic: whether a row's result may depend on no other row.
        target: what launches are cut for; None is the pool's device.

    Attributes:
        shares: whether rows may attend together to what they share.
    """

    name = "triton"

    def __init__(
        self,
        layers: list[LayerGeometry],
        sharing: SharedPrefix = SharedPrefix.AUTO,
        *,
        deterministic: bool = False,
        target: Target | None = None,
    ) -> None:
        # Layers with a window do not see the whole of a prefix.
        sees_all = any(layer.window is None for layer in layers)
        self._sharing = sharing if sees_all else SharedPrefix.OFF
        self.shares = self._sharing is not SharedPrefix.OFF
        self._deterministic = deterministic
        self._target = target

    def begin(self, plan: StepPlan, cache: KVCache, put: Put) -> LayerAttention:
        """Lay the step out in one array."""
        runs = self.shared_runs(plan, cache.block_size)
        inputs = exact_inputs(plan, cache.block_size, runs)
        array = np.empty(inputs.size, dtype=np.int32)
        inputs.fill(array, plan, runs)
        return self.over(inputs, put(array), cache)

    def shared_runs(self, plan: StepPlan, block_size: int) -> list[SharedRun]:
        """Find what rows attend to together."""
        runs = shared_runs(plan, block_size, self._sharing)
        return _aligned(runs, block_size) if self._deterministic else runs

    def over(
        self, inputs: AttentionMetadata, array: torch.Tensor, cache: KVCache
    ) -> LayerAttention:
        """Attend to what an array on the device says when the kernels run.

        The host reads nothing of it, and launches depend on ``inputs.shape`` alone: a graph
        captured over it replays any step that :meth:`AttentionMetadata.fill` writes there.

        Args:
            inputs: the array's layout.
            array: [inputs.size] int32 on the device.
            cache: the pool.
        """
        # Slots are numbered in int32.
        assert cache.keys[0].shape[0] * cache.block_size < 1 << 31
        target = self._target or target_of(cache.keys[0].device)
        return _TritonStep(inputs, array, cache, self._deterministic, target)


def _aligned(runs: list[SharedRun], block_size: int) -> list[SharedRun]:
    """Cut runs where any tile of keys ends, and leave out what lies within others."""
    unit = lcm(MOST_KEYS, block_size) // block_size
    cut = [replace(run, stop=run.stop // unit * unit) for run in runs if not run.start]
    return [run for run in cut if run.stop]


class _TritonStep:
    """Attention of one step: stores the new K and V, then attends to the pool."""

    def __init__(
        self,
        inputs: AttentionMetadata,
        array: torch.Tensor,
        cache: KVCache,
        deterministic: bool,
        target: Target,
    ) -> None:
        self._cache = cache
        self._deterministic = deterministic
        self._target = target
        self._shape = inputs.shape
        self._step = inputs.find(array)

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
        scales = None if self._cache.scales is None else self._cache.scales[index]
        # All rows' K and V first: rows may share blocks that this step writes.
        store_kv(key, value, keys, values, self._step.slots, scales)
        attend = self._in_fixed_order if self._deterministic else self._fast
        return attend(query, keys, values, options, scales)

    def _fast(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: AttentionOptions,
        scales: KVScales | None,
    ) -> torch.Tensor:
        """Split keys over as many programs as fill the device."""
        step = self._step

        def cut(ranges: PagedRows | SharedSegments) -> Cut:
            return choose_cut(query, keys, values, ranges, self._shape.max_keys, self._target)

        if options.window is not None or step.segments is None:
            own = cut(step.rows)
            return paged_attention(
                query, keys, values, step.block_tables, step.rows, options,
                num_splits=own.num_splits, scales=scales, tile=own.tile,
            )  # fmt: skip
        own, shared = cut(step.own_rows), cut(step.segments)
        return cascade_attention(
            query, keys, values, step.block_tables, step.own_rows, step.segments, options,
            num_splits=own.num_splits, num_shared_splits=shared.num_splits, scales=scales,
            tile=own.tile, shared_tile=shared.tile,
        )  # fmt: skip

    def _in_fixed_order(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: AttentionOptions,
        scales: KVScales | None,
    ) -> torch.Tensor:
        """Go over each row's tiles of keys in order, in tiles of one shape."""
        step = self._step
        is_shared = options.window is None and step.segments is not None
        tile = fixed_order_tile(
            self._target.capability,
            query.dtype,
            max(keys.shape[3], values.shape[3]),
            query.shape[1] // keys.shape[2],
        )
        return fixed_order_attention(
            query,
            keys,
            values,
            step.block_tables,
            step.own_rows if is_shared else step.rows,
            step.segments if is_shared else None,
            options,
            tile,
            scales=scales,
        )
