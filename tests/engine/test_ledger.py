"""`engine.debug`: planted faults are caught and named."""

from pathlib import Path

import pytest
import torch

from batchgen.engine.core import EngineCore
from batchgen.engine.invariants import InvariantChecker
from batchgen.errors import EngineError
from batchgen.runtime.debug import CheckingExecutor
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.model import ModelSource, load_model
from batchgen.sampling import SamplingParams
from tests.support.drive import (
    make_attention,
    make_engine_over_fake,
    make_requests,
    make_scheduler,
    run_all,
)
from tests.support.fake_model import FakeExecutor
from tests.support.tiny_models import save

_PROMPTS = [[*range(3, 13), 20 + i, 30 + i] for i in range(4)]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory):
    loaded = load_model(
        ModelSource(str(save("llama", Path(tmp_path_factory.mktemp("llama"))))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )

    def make(executor_class=ModelExecutor):
        scheduler = make_scheduler(40, 4)
        cache = KVCache(
            loaded.layers, 40, 4, num_swap_blocks=0, dtype=torch.float32, device=torch.device("cpu")
        )
        lines: list[str] = []
        executor = executor_class(loaded.model, cache, make_attention(loaded))
        debug = CheckingExecutor(executor, InvariantChecker(scheduler), lines.append)
        return EngineCore(scheduler, debug), lines

    return make


def test_a_sound_run_passes_and_prints_every_table(parts) -> None:
    engine, lines = parts()
    run_all(engine, make_requests(_PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True)))
    assert len(lines) == engine.stats.steps
    # Two blocks that four rows share, and one of its own.
    assert "request 0: 12 of 12 tokens computed, blocks 0x4 1x4 2x1" in lines[0]
    assert any("x4" in line for line in lines)


def test_a_store_into_shared_blocks_is_caught_by_the_checksum(parts) -> None:
    class Overwriting(ModelExecutor):
        def execute(self, plan):
            tokens = super().execute(plan)
            if plan.step == 2:
                self.cache.keys[1][0, 1] += 1
            return tokens

    engine, _ = parts(Overwriting)
    with pytest.raises(EngineError, match="step 2 changed block 0"):
        run_all(engine, make_requests(_PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True)))


def test_a_plan_that_writes_into_a_shared_block_is_refused() -> None:
    scheduler = make_scheduler(20, 4)
    ledger = InvariantChecker(scheduler)
    engine, executor = make_engine_over_fake(scheduler)
    run_all(engine, make_requests(_PROMPTS[:1], SamplingParams(max_tokens=3)))
    plan = executor.plans[-1]
    plan.slots[:] = 1
    with pytest.raises(EngineError, match="writes slot 1 of block 0"):
        ledger.check_plan(plan)


def test_a_leak_names_the_request_and_the_step() -> None:
    scheduler = make_scheduler(20, 4)
    ledger = InvariantChecker(scheduler)
    executor = FakeExecutor(4)
    engine = EngineCore(scheduler, executor)
    for request in make_requests(_PROMPTS[:2], SamplingParams(max_tokens=3)):
        scheduler.add(request)
    engine.step()
    engine.step()
    ledger.check_plan(executor.plans[-1])
    held = list(scheduler.running)[1].block_table[-1]
    scheduler.blocks.pool.pin([held])
    while scheduler.num_unfinished:
        engine.step()
    with pytest.raises(EngineError, match=f"block {held} was last in the table of request 1, in"):
        ledger.check_end()
