"""Driving the engine in tests: one call from prompts to finished requests."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.block_manager import BlockManager, Window
from batchgen.engine.block_pool import Future
from batchgen.engine.core import EngineCore, Executor, PendingOutput
from batchgen.engine.preemption import PreemptionCosts, PreemptionPolicy, SwapSpace
from batchgen.engine.request import Request
from batchgen.engine.scheduler import (
    Scheduler,
    SchedulerLimits,
)
from batchgen.engine.stopping import StopRules
from batchgen.kernels.triton.batch import KVScales
from batchgen.runtime.attention import AttentionBackend
from batchgen.runtime.backends import AttentionName, AttentionNeeds, choose_attention
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.model import LoadedModel
from batchgen.sampling import SamplingParams
from tests.support.fake_model import FakeExecutor
from tests.support.invariants import check_invariants

NAN = float("nan")


def make_scheduler(
    num_blocks: int,
    block_size: int,
    *,
    swap_blocks: int = 0,
    prefix_caching: bool = True,
    max_num_seqs: int = 64,
    budget: int = 256,
    eos: Iterable[int] = (),
    admission: AdmissionPolicy = AdmissionPolicy.PROMPT,
    preemption: PreemptionPolicy = PreemptionPolicy.SWAP,
    costs: PreemptionCosts | None = None,
    future: Future | None = None,
    window: int | None = None,
) -> Scheduler:
    """A scheduler with small defaults."""
    return Scheduler(
        BlockManager(
            num_blocks,
            block_size,
            prefix_caching=prefix_caching,
            future=future,
            window=None if window is None else Window(window, budget),
        ),
        SwapSpace(swap_blocks),
        StopRules(frozenset(eos)),
        SchedulerLimits(max_num_seqs, budget),
        admission=admission,
        preemption=preemption,
        costs=costs,
    )


def make_requests(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    max_model_len: int = 10_000,
    **given: Any,
) -> list[Request]:
    """Requests numbered from 0."""
    each = params if isinstance(params, Sequence) else [params] * len(prompts)
    return [
        Request.create(i, prompt, p, max_model_len=max_model_len, noise_key=i, **given)
        for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))
    ]


class CheckedExecutor:
    """A model executor that poisons what may not be read and checks the invariants."""

    def __init__(self, executor: ModelExecutor, scheduler: Scheduler) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._poisoned: set[int] = set()

    def execute(self, plan: Any) -> PendingOutput:
        """Check, poison every block that was freed since the last step, run."""
        check_invariants(self._scheduler, plan)
        # Blocks that this step writes or brings back are owned, so they are not free.
        free = set(self._scheduler.blocks.pool.free_blocks())
        # What was free at the last step, too, has not been written since.
        self._poisoned &= free
        if not len(plan.swap_out):
            self._executor.cache.poison(sorted(free - self._poisoned))
            self._poisoned = free
        return self._executor.execute(plan)


def make_attention(
    loaded: LoadedModel, name: AttentionName = AttentionName.AUTO, **given: Any
) -> AttentionBackend:
    """The attention that a job would get; it must not have to do without a compiler."""
    notes: list[str] = []
    model = loaded.model
    needs = AttentionNeeds(
        loaded.layers, model.device, model.dtype, **({"kv_dtype": model.dtype} | given)
    )
    backend = choose_attention(name, needs, say=notes.append)
    assert not notes, notes
    return backend


def make_engine(
    loaded: LoadedModel,
    scheduler: Scheduler,
    attention: AttentionBackend | None = None,
    *,
    kv_dtype: torch.dtype | None = None,
    scales: list[KVScales] | None = None,
) -> EngineCore:
    """An engine over a loaded model whose unwritten and freed slots hold NaN."""
    manager = scheduler.blocks
    attention = attention or make_attention(loaded)
    cache = KVCache(
        loaded.layers,
        manager.pool.num_blocks,
        manager.block_size,
        num_swap_blocks=scheduler.swap_space.num_blocks,
        dtype=kv_dtype or loaded.model.dtype,
        device=torch.device("cpu"),
        uses_triton=attention.name == AttentionName.TRITON,
        scales=scales,
    )
    model_executor = ModelExecutor(loaded.model, cache, attention)
    executor: Executor = CheckedExecutor(model_executor, scheduler)
    return EngineCore(scheduler, executor)


def make_engine_over_fake(scheduler: Scheduler, **given: Any) -> tuple[EngineCore, FakeExecutor]:
    """An engine over the fake model that forgets freed blocks and checks invariants."""

    def before(plan: Any) -> None:
        check_invariants(scheduler, plan)
        if not len(plan.swap_out):
            executor.forget(scheduler.blocks.pool.free_blocks())

    executor = FakeExecutor(scheduler.blocks.block_size, before=before, **given)
    return EngineCore(scheduler, executor), executor


def run_all(engine: EngineCore, requests: Sequence[Request]) -> list[Request]:
    """Run requests to their end and give them back in the order of their numbers."""
    finished = [request for batch in engine.run(requests) for request in batch]
    check_invariants(engine.scheduler)
    pool = engine.scheduler.blocks.pool
    assert pool.num_owned == 0
    assert engine.scheduler.swap_space.num_free == engine.scheduler.swap_space.num_blocks
    assert sorted(r.request_id for r in finished) == sorted(r.request_id for r in requests)
    for request in finished:
        account = request.account
        assert account.hit_blocks + account.new_blocks == account.freed_blocks
    return sorted(finished, key=lambda request: request.request_id)
