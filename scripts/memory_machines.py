"""What executes the steps of compare_memory.py: a loaded model, or a clock."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.core import Executor, FinishedOutput
from batchgen.engine.input_batch import InputBatch
from batchgen.engine.preemption import PreemptionCosts
from batchgen.engine.request import FinishReason, Request
from batchgen.engine.step import IntArray, StepOutput, StepPlan
from batchgen.engine.stopping import StopRules
from batchgen.runtime.attention import ModelForward
from batchgen.runtime.backends import AttentionName, AttentionNeeds, choose_attention
from batchgen.runtime.device.cuda import device_of
from batchgen.runtime.device.graphs import CapturableBackend, DecodeGraphs
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache, kv_bytes_per_token
from batchgen.runtime.model import LoadedModel
from batchgen.runtime.shared_prefixes import SharedPrefix


class Machine(Protocol):
    """What steps run on, and the clock they run by (in seconds)."""

    simulated: bool
    bytes_per_token: int

    def clock(self) -> float:
        """Return the time now."""

    def costs(self, block_size: int) -> PreemptionCosts:
        """Return what is known of the link to the CPU pool."""

    def executor(self, manager: BlockManager, num_swap_blocks: int) -> Executor:
        """Make the executor over a pool of its own."""


class ModelMachine:
    """A loaded model.

    Args:
        attention, sharing: ``engine.attention`` and ``engine.shared_prefix_attention``.
        deterministic: ``engine.deterministic``; the model's row counts are fixed already.
        graph_rows: rows of the largest step, where decode steps may run as CUDA graphs; 0 is
            ``engine.cuda_graphs=off``.
    """

    simulated = False

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionName = AttentionName.AUTO,
        sharing: SharedPrefix = SharedPrefix.AUTO,
        *,
        deterministic: bool = False,
        graph_rows: int = 0,
    ) -> None:
        self.bytes_per_token = kv_bytes_per_token(loaded.layers, loaded.model.dtype)
        self._loaded = loaded
        self._attention = attention
        self._sharing = sharing
        self._deterministic = deterministic
        self._graph_rows = graph_rows

    def clock(self) -> float:
        """See :class:`Machine`."""
        return time.perf_counter()

    def costs(self, block_size: int) -> PreemptionCosts:
        """Count copies as free: on a CPU they are, beside computing the same tokens."""
        return PreemptionCosts()

    def executor(self, manager: BlockManager, num_swap_blocks: int) -> ModelExecutor:
        """See :class:`Machine`."""
        layers, model = self._loaded.layers, self._loaded.model
        needs = AttentionNeeds(
            layers, model.device, model.dtype, model.dtype, self._sharing, self._deterministic
        )
        attention = choose_attention(self._attention, needs, say=print)
        cache = KVCache(
            layers,
            manager.pool.num_blocks,
            manager.block_size,
            num_swap_blocks=num_swap_blocks,
            dtype=model.dtype,
            device=model.device,
            uses_triton=attention.name == AttentionName.TRITON,
        )
        device = device_of(model.device)
        graphs = None
        if self._graph_rows and device.has_graphs and isinstance(attention, CapturableBackend):
            graphs = DecodeGraphs(
                device, ModelForward(model), cache, attention,
                max_rows=self._graph_rows, max_keys=self._loaded.max_model_len, say=print,
            )  # fmt: skip
        return ModelExecutor(model, cache, attention, device, graphs)


@dataclass(slots=True)
class SimulatedMachine:
    """No model: a step lasts a fixed time, and a time for each token and each byte swapped.

    The defaults are about an 8B model with grouped-query attention in 16 bits on one A100:
    16 GB of weights at 2 TB/s, 2 x 8e9 operations a token at 200e12 a second, and a link of
    25 GB/s.
    """

    step_s: float = 0.008
    token_s: float = 80e-6
    bytes_per_token: int = 128 * 1024
    link_bytes_per_s: float = 25e9
    now: float = 0.0
    simulated: bool = True

    def clock(self) -> float:
        """See :class:`Machine`."""
        return self.now

    def costs(self, block_size: int) -> PreemptionCosts:
        """See :class:`Machine`."""
        return PreemptionCosts(block_size * self.bytes_per_token / self.link_bytes_per_s)

    def executor(self, manager: BlockManager, num_swap_blocks: int) -> Executor:
        """See :class:`Machine`."""
        return _SimulatedExecutor(self, self.costs(manager.block_size).swap_s_per_block)

    def describe(self) -> str:
        """Say the step's time in a line."""
        return (
            f"seconds, tokens/s and TTFT are simulated: a step takes {1e3 * self.step_s:g} ms and "
            f"{1e6 * self.token_s:g} us a token; KV takes {self.bytes_per_token:,} bytes a token"
        )


@dataclass(frozen=True, slots=True)
class _SimulatedExecutor:
    machine: SimulatedMachine
    swap_s_per_block: float

    def execute(self, plan: StepPlan) -> FinishedOutput:
        """Let the time pass; every sampled token is 0."""
        machine, swapped = self.machine, len(plan.swap_out) + len(plan.swap_in)
        machine.now += machine.step_s + plan.num_tokens * machine.token_s
        machine.now += swapped * self.swap_s_per_block
        return FinishedOutput(StepOutput(np.zeros(len(plan.samples), dtype=np.int64)))


class HasOutput(Protocol):
    """A row of which it is known how many tokens it generates."""

    @property
    def output_tokens(self) -> int:
        """How many."""


class StopAt(StopRules):
    """Ends each row after its own number of tokens."""

    def __init__(self, rows: Sequence[HasOutput]) -> None:
        super().__init__(frozenset())
        self._rows = rows

    def may_end(self, running: InputBatch, indices: IntArray) -> Any:
        """See :class:`StopRules`: any row may."""
        return np.ones(len(indices), dtype=np.bool_)

    def check(self, request: Request) -> tuple[FinishReason, str | None] | None:
        """See :class:`StopRules`."""
        wanted = self._rows[request.request_id].output_tokens
        return (FinishReason.STOP, None) if request.num_output_tokens >= wanted else None
