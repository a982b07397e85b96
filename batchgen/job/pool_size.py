"""How many blocks a job's pool has: what was asked for, or what the memory holds."""

from dataclasses import dataclass

import torch

from batchgen.config import Config
from batchgen.errors import UsageError
from batchgen.runtime.kv_cache import KVFormat, LayerGeometry, kv_bytes_per_token
from batchgen.runtime.kv_dtype import KVDtype, resolve_kv_dtype
from batchgen.runtime.memory import (
    GIB,
    DeviceMemory,
    Ledger,
    available_host_bytes,
    blocks_in,
    default_cpu_pool_bytes,
    default_swap_bytes,
    gpu_pool_bytes,
    others_bytes,
)
from batchgen.runtime.model import LoadedModel, resolve_device


@dataclass(frozen=True, slots=True)
class BesidePool:
    """What lies beside weights and pool on a GPU, in bytes.

    Attributes:
        activations: the peak of the largest step.
        graphs: CUDA graphs, at most.
        staging: buffers that swapped blocks pass through.
    """

    activations: int = 0
    graphs: int = 0
    staging: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.graphs + self.staging


def size_pool(
    config: Config,
    loaded: LoadedModel,
    kv_format: KVFormat,
    card: DeviceMemory | None,
    beside: BesidePool,
) -> Ledger:
    """Count the blocks that memory holds.

    Args:
        config: the job.
        loaded: its model.
        kv_format: of the pool.
        card: the GPU's memory; None on a CPU.
        beside: what lies beside the pool there.

    Raises:
        UsageError: there is no room for a single block.
    """
    pool = config.pool
    per_token = kv_bytes_per_token(loaded.layers, kv_format.dtype)
    num_blocks = pool.num_blocks
    if num_blocks is None:
        budget = _pool_budget(config, card, beside.total)
        num_blocks = blocks_in(budget, per_token, pool.block_size)
    if num_blocks < 1:
        raise UsageError(
            f"no memory is left for the KV pool: a block takes {per_token * pool.block_size:,} "
            f"bytes; raise pool.gpu_memory_utilization or pool.cpu_memory_gib, or lower "
            f"engine.max_num_batched_tokens"
        )
    return Ledger(
        weights_bytes=loaded.weight_bytes,
        activations_bytes=beside.activations,
        bytes_per_token=per_token,
        block_size=pool.block_size,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks(config, per_token),
        staging_bytes=beside.staging,
        graphs_bytes=beside.graphs,
        others_bytes=others_bytes(card) if card is not None else 0,
    )


def plan_ledger(config: Config, layers: list[LayerGeometry], dtype: torch.dtype) -> Ledger | None:
    """Make the ledger for ``mode=plan``, which loads no weights.

    Args:
        config: the job.
        layers: shapes of the model's keys and values.
        dtype: of the model.

    Returns:
        The ledger; None on a GPU without ``pool.num_blocks``, where only the loaded model
        can say what is left.

    Raises:
        UsageError: ``pool.kv_dtype`` saves nothing.
    """
    device = resolve_device(config.model.device)
    kv_dtype = resolve_kv_dtype(KVDtype(config.pool.kv_dtype.value), dtype)
    per_token = kv_bytes_per_token(layers, kv_dtype)
    num_blocks = config.pool.num_blocks
    if num_blocks is None:
        if device.type == "cuda":
            return None
        budget = _pool_budget(config, None, 0)
        num_blocks = blocks_in(budget, per_token, config.pool.block_size)
    swap = num_swap_blocks(config, per_token)
    return Ledger(0, 0, per_token, config.pool.block_size, num_blocks, swap)


def _pool_budget(config: Config, card: DeviceMemory | None, beside_pool: int) -> int:
    if card is not None:
        return gpu_pool_bytes(card, beside_pool, config.pool.gpu_memory_utilization)
    if config.pool.cpu_memory_gib is not None:
        return int(config.pool.cpu_memory_gib * GIB)
    return default_cpu_pool_bytes(available_host_bytes())


def num_swap_blocks(config: Config, bytes_per_token: int) -> int:
    """Count the blocks of the CPU pool."""
    pool = config.pool
    if pool.swap_blocks is not None:
        return pool.swap_blocks
    wanted = default_swap_bytes(available_host_bytes())
    if pool.swap_gib is not None:
        wanted = min(int(pool.swap_gib * GIB), available_host_bytes() // 4)
    return blocks_in(wanted, bytes_per_token, pool.block_size)
