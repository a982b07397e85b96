"""From the configuration to an engine: model, memory ledger, pool, scheduler."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.utils.logging import disable_progress_bar

from batchgen.config import Config, CudaGraphs, Overlap
from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.block_manager import BlockManager, Window
from batchgen.engine.block_pool import Future
from batchgen.engine.core import EngineCore, Executor
from batchgen.engine.invariants import InvariantChecker
from batchgen.engine.preemption import PreemptionCosts, PreemptionPolicy, SwapSpace
from batchgen.engine.scheduler import (
    Scheduler,
    SchedulerLimits,
)
from batchgen.engine.stopping import StopRules
from batchgen.errors import UsageError
from batchgen.job.front import model_source
from batchgen.job.pool_size import BesidePool, num_swap_blocks, size_pool
from batchgen.runtime.attention import AttentionBackend, ModelForward
from batchgen.runtime.backends import AttentionName, AttentionNeeds, choose_attention
from batchgen.runtime.cpu.fixed_rows import fix_row_counts
from batchgen.runtime.cpu.threads import use_threads
from batchgen.runtime.debug import CheckingExecutor
from batchgen.runtime.device.api import Device
from batchgen.runtime.device.cuda import device_of
from batchgen.runtime.device.graphs import CapturableBackend, DecodeGraphs
from batchgen.runtime.device.swap import staging_bytes
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache, KVFormat, kv_bytes_per_token, window_of_all
from batchgen.runtime.kv_dtype import KVDtype, drift_warning, measure_format, resolve_kv_dtype
from batchgen.runtime.memory import CudaMemory, DeviceMemory, Ledger, is_out_of_memory
from batchgen.runtime.memory_profile import activation_bytes, graph_bytes
from batchgen.runtime.model import LoadedModel, load_model, resolve_device
from batchgen.runtime.shared_prefixes import SharedPrefix

# Tokens of a step: on a CPU about what keeps a layer's temporaries in the caches, on a
# GPU enough to be bound by arithmetic.
_CPU_STEP_TOKENS = 512
_GPU_STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine ready to run, and the ledger of its memory.

    Attributes:
        engine: scheduler and executor in a loop.
        executor: the one that runs the model, below a debugging one.
        debug: the debugging ledger, where ``engine.debug`` is set.
        ledger: the memory's arithmetic.
        device: where the model runs.
        dtype: of weights and KV.
    """

    engine: EngineCore
    executor: ModelExecutor
    debug: InvariantChecker | None
    ledger: Ledger
    device: torch.device
    dtype: torch.dtype


def load_job_model(config: Config) -> LoadedModel:
    """Load the job's model, with our attention in it.

    Raises:
        UsageError: the model is refused, or there is no memory for it.
    """
    # The phase is named already; a second bar would only break the log into pieces.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    use_threads(config.engine.threads)
    try:
        loaded = load_model(
            model_source(config.model),
            dtype=config.model.dtype,
            device=resolve_device(config.model.device),
            max_model_len=config.model.max_model_len,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(
            f"model.path={config.model.path}: there is no memory to load it; set a model.dtype of "
            f"fewer bytes, or end what else uses the memory: {error}"
        ) from error
    if config.engine.deterministic:
        fix_row_counts(loaded.model)
    return loaded


def build_engine(
    config: Config,
    loaded: LoadedModel,
    *,
    eos_token_ids: frozenset[int],
    future: Future | None = None,
    say: Callable[[str], None] = print,
) -> LoadedEngine:
    """Build everything that runs a loaded model; several engines can share one.

    Args:
        config: the job.
        loaded: its model.
        eos_token_ids: ids that end a sequence.
        future: what the plan knows of the rows to come; None evicts what was used longest
            ago.
        say: takes what ``engine.debug`` prints, and notes for the user.

    Raises:
        UsageError: memory leaves no room for a pool, or ``engine.attention`` or
            ``engine.cuda_graphs`` does not work here.
    """
    device = loaded.model.device
    step_tokens = step_token_budget(config, device.type)
    kv_dtype = resolve_kv_dtype(KVDtype(config.pool.kv_dtype.value), loaded.model.dtype)
    needs = AttentionNeeds(
        loaded.layers,
        device,
        loaded.model.dtype,
        kv_dtype,
        SharedPrefix(config.engine.shared_prefix_attention.value),
        config.engine.deterministic,
    )
    attention = choose_attention(AttentionName(config.engine.attention.value), needs, say=say)
    warning = drift_warning(kv_dtype, loaded.model.dtype)
    if warning is not None:
        say(warning)
    kv_format = measure_format(loaded, kv_dtype)
    model_device = device_of(device)
    capturable = capturable_backend(config.engine.cuda_graphs, model_device, attention)
    card, beside = None, BesidePool()
    if device.type == "cuda":
        card = CudaMemory(device)
        beside = _measure(config, loaded, attention, capturable, kv_format, card, say)
        # Where none could be captured, that has been said.
        capturable = capturable if beside.graphs else None
    ledger = size_pool(config, loaded, kv_format, card, beside)
    cache = KVCache(
        loaded.layers,
        ledger.num_blocks,
        config.pool.block_size,
        num_swap_blocks=ledger.num_swap_blocks,
        dtype=kv_format.dtype,
        device=device,
        scales=kv_format.scales,
        uses_triton=attention.name == AttentionName.TRITON,
    )
    graphs = None
    if capturable is not None:
        graphs = DecodeGraphs(
            model_device,
            ModelForward(loaded.model),
            cache,
            capturable,
            max_rows=config.engine.max_num_seqs,
            max_keys=loaded.max_model_len,
            say=say,
        )
    model_executor = ModelExecutor(loaded.model, cache, attention, model_device, graphs)
    window = window_of_all(loaded.layers)
    scheduler = Scheduler(
        BlockManager(
            ledger.num_blocks,
            config.pool.block_size,
            prefix_caching=config.pool.prefix_caching,
            future=future,
            window=Window(window, step_tokens) if window is not None else None,
        ),
        SwapSpace(ledger.num_swap_blocks),
        StopRules(eos_token_ids),
        SchedulerLimits(config.engine.max_num_seqs, step_tokens),
        admission=AdmissionPolicy(config.engine.admission.value),
        preemption=preemption_policy(config, ledger),
        costs=PreemptionCosts(model_executor.swap.measure_s_per_block()),
        clock=time.perf_counter,
    )
    overlaps = config.engine.overlap is Overlap.on or (
        config.engine.overlap is Overlap.auto and device.type == "cuda"
    )
    executor: Executor = model_executor
    debug = InvariantChecker(scheduler) if config.engine.debug else None
    if debug is not None:
        executor = CheckingExecutor(model_executor, debug, say)
    # Debugging looks at the pool between two steps.
    return LoadedEngine(
        engine=EngineCore(
            scheduler, executor, overlap=overlaps and debug is None, clock=time.perf_counter
        ),
        executor=model_executor,
        debug=debug,
        ledger=ledger,
        device=device,
        dtype=loaded.model.dtype,
    )


def step_token_budget(config: Config, device_type: str) -> int:
    """Give the tokens of a step; a decode step of all rows always fits by default."""
    if config.engine.max_num_batched_tokens is not None:
        return config.engine.max_num_batched_tokens
    default = _CPU_STEP_TOKENS if device_type == "cpu" else _GPU_STEP_TOKENS
    return max(default, config.engine.max_num_seqs)


def preemption_policy(config: Config, ledger: Ledger) -> PreemptionPolicy:
    """Give the preemption policy; without a CPU pool there is nothing to choose."""
    if not ledger.num_swap_blocks:
        return PreemptionPolicy.RECOMPUTE
    return PreemptionPolicy(config.engine.preemption.value)


def capturable_backend(
    wanted: CudaGraphs, device: Device, attention: AttentionBackend
) -> CapturableBackend | None:
    """Give the backend whose decode steps run as graphs; None where all run without.

    Raises:
        UsageError: graphs were asked for and there can be none.
    """
    if wanted is CudaGraphs.off:
        return None
    if device.has_graphs and isinstance(attention, CapturableBackend):
        return attention
    if wanted is CudaGraphs.on:
        problem = (
            f"attention by {attention.name} cannot be captured, engine.attention=triton can"
            if device.has_graphs
            else f"a {device.torch_device.type} has none"
        )
        raise UsageError(f"engine.cuda_graphs=on: {problem}; set engine.cuda_graphs=auto")
    return None


def _measure(
    config: Config,
    loaded: LoadedModel,
    attention: AttentionBackend,
    capturable: CapturableBackend | None,
    kv_format: KVFormat,
    card: DeviceMemory,
    say: Callable[[str], None],
) -> BesidePool:
    """Measure on a GPU what lies beside weights and pool."""
    block_size, max_rows = config.pool.block_size, config.engine.max_num_seqs
    per_token = kv_bytes_per_token(loaded.layers, kv_format.dtype)
    activations = activation_bytes(
        loaded,
        attention,
        card,
        num_tokens=step_token_budget(config, loaded.model.device.type),
        num_rows=max_rows,
        block_size=block_size,
        kv_format=kv_format,
    )
    graphs = 0
    if capturable is not None:
        graphs = graph_bytes(
            loaded,
            capturable,
            card,
            device_of(loaded.model.device),
            max_rows=max_rows,
            block_size=block_size,
            kv_format=kv_format,
            say=say,
        )
    swap_blocks = num_swap_blocks(config, per_token)
    return BesidePool(activations, graphs, staging_bytes(swap_blocks, per_token * block_size))
