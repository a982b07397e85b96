"""Device and host memory: what there is, what each part takes, how many blocks fit."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Looks at one card's memory."""

    def total(self) -> int:
        """All there is."""

    def free(self) -> int:
        """What nobody holds, other processes included, as the driver counts it."""

    def held(self) -> int:
        """What torch holds in this process, in use or in hand for later."""

    def in_use(self) -> int:
        """What tensors of this process take."""

    def peak_in_use(self) -> int:
        """The most that they took since :meth:`begin_peak`."""

    def begin_peak(self) -> None:
        """Begin to watch the peak."""

    def trim(self) -> None:
        """Return back what is only in hand."""


class CudaMemory:
    """See :class:`DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """See :meth:`DeviceMemory.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """See :meth:`DeviceMemory.free`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        """See :meth:`DeviceMemory.held`."""
        return torch.cuda.memory_reserved(self._device)

    def in_use(self) -> int:
        """See :meth:`DeviceMemory.in_use`."""
        return torch.cuda.memory_allocated(self._device)

    def peak_in_use(self) -> int:
        """See :meth:`DeviceMemory.peak_in_use`."""
        return torch.cuda.max_memory_allocated(self._device)

    def begin_peak(self) -> None:
        """See :meth:`DeviceMemory.begin_peak`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def trim(self) -> None:
        """See :meth:`DeviceMemory.trim`."""
        torch.cuda.empty_cache()


GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Ledger:
    """The pool's arithmetic; sizes in bytes.

    Attributes:
        weights_bytes: the model's parameters.
        activations_bytes: measured peak of a full step; 0 on a CPU, where it is not taken
            from the pool's budget.
        bytes_per_token: K and V of one token over all layers.
        block_size: tokens in a block.
        num_blocks: blocks of the pool.
        num_swap_blocks: blocks of the CPU pool.
        others_bytes: what other processes hold of a GPU, and this one beside its tensors.
        staging_bytes: buffers on a GPU that swapped blocks pass through; 0 on a CPU.
        graphs_bytes: CUDA graphs of decode steps, at most; 0 where there are none.
    """

    weights_bytes: int
    activations_bytes: int
    bytes_per_token: int
    block_size: int
    num_blocks: int
    num_swap_blocks: int
    others_bytes: int = 0
    staging_bytes: int = 0
    graphs_bytes: int = 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block over all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.bytes_per_block * self.num_blocks

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.block_size * self.num_blocks

    def concurrency(self, num_tokens: int) -> int:
        """Count the rows of this length that fit at once with nothing shared."""
        return self.num_blocks // -(-num_tokens // self.block_size)

    def describe(self, lengths: dict[str, int]) -> str:
        """Write the ledger as lines of text.

        Args:
            lengths: names ("p50") to row lengths in tokens, for the concurrency.
        """
        rows = ", ".join(
            f"{self.concurrency(tokens)} at {name} ({tokens} tokens)"
            for name, tokens in lengths.items()
        )
        swap = self.bytes_per_block * self.num_swap_blocks
        graphs = f"graphs {_gib(self.graphs_bytes)}, " if self.graphs_bytes else ""
        staging = f" and {_gib(self.staging_bytes)} to pass through" if self.staging_bytes else ""
        others = f", held by others {_gib(self.others_bytes)}" if self.others_bytes else ""
        return (
            f"memory: weights {_gib(self.weights_bytes)}, activations "
            f"{_gib(self.activations_bytes)}, {graphs}pool {_gib(self.pool_bytes)}, "
            f"swap {_gib(swap)}{staging}{others}\n"
            f"pool: {self.bytes_per_token:,} bytes a token, {self.bytes_per_block:,} a block of "
            f"{self.block_size}; {self.num_blocks:,} blocks = {self.pool_tokens:,} tokens\n"
            f"rows at once with nothing shared: {rows}"
        )


def blocks_in(num_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """Count the whole blocks that fit in some bytes."""
    return max(0, num_bytes) // (bytes_per_token * block_size)


def available_host_bytes() -> int:
    """Memory this process could still take, within its cgroup's limit."""
    available = _meminfo_available()
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes",
         "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):  # fmt: skip
        limit, used = _read_int(limit_file), _read_int(used_file)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory for a tensor; torch's CPU allocator has no class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "DefaultCPUAllocator" in str(error)


def default_cpu_pool_bytes(available: int) -> int:
    """Bytes of the pool on a CPU: a quarter of the free memory, at most 4 GiB."""
    return min(4 * GIB, available // 4)


def default_swap_bytes(available: int) -> int:
    """Bytes of the CPU pool for swapped rows: 4 GiB, at most a quarter of free memory."""
    return min(4 * GIB, available // 4)


def gpu_pool_bytes(card: DeviceMemory, beside_pool: int, utilization: float) -> int:
    """Bytes left for the pool on a GPU.

    What others hold counts as ours does: ``utilization`` is of the whole card, so that a
    second process finds its share free.

    Args:
        card: holds the weights.
        beside_pool: bytes that steps and buffers take above that.
        utilization: share of the card that may be full.
    """
    used = card.total() - card.free()
    return int(card.total() * utilization) - used - beside_pool


def others_bytes(card: DeviceMemory) -> int:
    """Bytes of a card that torch does not hold in this process."""
    return card.total() - card.free() - card.held()


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
