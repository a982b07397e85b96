"""The largest step, whose memory is measured on a GPU, is a step like any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.core import FinishedOutput
from batchgen.engine.step import StepOutput, StepPlan
from batchgen.errors import OutOfDeviceMemoryError, UsageError
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache, KVFormat
from batchgen.runtime.memory import GIB
from batchgen.runtime.memory_profile import activation_bytes, full_step, graph_bytes
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.runtime.shared_prefixes import SharedPrefix, shared_runs
from tests.support.drive import make_attention
from tests.support.fake_card import FakeDeviceMemory
from tests.support.model_device import ModelDevice, Temper
from tests.support.tensor_attention import TensorAttention
from tests.support.tiny_models import save


def test_the_largest_step_fills_the_budget_and_samples_every_row(tmp_path: Path) -> None:
    plan = full_step(num_tokens=40, num_rows=8, block_size=4, max_row_tokens=40)
    assert (plan.num_tokens, plan.num_rows, len(plan.samples)) == (40, 8, 8)
    loaded = load_model(
        ModelSource(str(save("llama", tmp_path))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )
    cache = KVCache(
        loaded.layers, 10, 4, num_swap_blocks=0, dtype=torch.float32, device=torch.device("cpu")
    )
    executor = ModelExecutor(loaded.model, cache, make_attention(loaded))
    tokens = executor.execute(plan).result().token_ids
    assert len(tokens) == 8
    assert (tokens >= 0).all()


def _noting(executed: list[StepPlan]) -> Callable[[Any, StepPlan], FinishedOutput]:
    """An executor's ``execute`` that only notes the plan."""

    def execute(self: Any, plan: StepPlan) -> FinishedOutput:
        executed.append(plan)
        return FinishedOutput(StepOutput(np.zeros(0, np.int64)))

    return execute


def _measure(loaded: LoadedModel, card: FakeDeviceMemory | None = None) -> int:
    return activation_bytes(
        loaded,
        make_attention(loaded),
        card or FakeDeviceMemory(total_gib=80, ours_gib=16, others_gib=0),
        num_tokens=40,
        num_rows=8,
        block_size=4,
        kv_format=KVFormat(torch.float32),
    )


def test_the_peak_is_of_a_second_step_above_what_was_held_before_it(tmp_path: Path) -> None:
    loaded = load_model(
        ModelSource(str(save("llama", tmp_path))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )
    card = FakeDeviceMemory(total_gib=80, ours_gib=16, others_gib=0, peak_gib=19)
    executed = []
    with patch.object(ModelExecutor, "execute", _noting(executed)):
        taken = _measure(loaded, card)
    assert taken == 3 * GIB
    assert [plan.num_tokens for plan in executed] == [40, 40]
    assert card.calls == ["in_use", "begin_peak", "peak_in_use", "trim"]


class _ShrinkingMemory(FakeDeviceMemory):
    """A card of which every look finds less free."""

    def __init__(self, free_gib: list[int]) -> None:
        super().__init__(total_gib=80, ours_gib=16, others_gib=0)
        self._free_gib = iter(free_gib)

    def free(self) -> int:
        return next(self._free_gib) * GIB


@pytest.mark.parametrize(
    ("max_rows", "free", "expected"),
    [
        # Graphs for 1, 2, 4 and 6 rows. The second takes more as well.
        (6, [60, 53, 52], 7 + 3 * 1),
        # It finds all its room in the first.
        (6, [60, 53, 54], 7),
        (1, [60, 53], 7),
    ],
)
def test_memory_of_graphs_is_counted_from_the_two_largest(
    tmp_path: Path, max_rows: int, free: list[int], expected: int
) -> None:
    loaded = load_model(
        ModelSource(str(save("llama", tmp_path))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=40,
    )
    device = ModelDevice(Temper.EARLY)
    taken = graph_bytes(
        loaded,
        TensorAttention(),
        _ShrinkingMemory(free),
        device,
        max_rows=max_rows,
        block_size=4,
        kv_format=KVFormat(torch.float32),
        say=pytest.fail,
    )
    assert taken == expected * GIB
    assert len(device.graph_pools[0].graphs) == min(2, max_rows)


def test_a_model_that_cannot_be_captured_takes_no_memory_for_graphs(tmp_path: Path) -> None:
    loaded = load_model(
        ModelSource(str(save("qwen3_moe", tmp_path))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=40,
    )
    # Transformers' plain way through the experts looks at which of them have rows.
    loaded.model.config._experts_implementation = "eager"
    lines: list[str] = []
    taken = graph_bytes(
        loaded,
        TensorAttention(),
        _ShrinkingMemory([60]),
        ModelDevice(Temper.EARLY),
        max_rows=4,
        block_size=4,
        kv_format=KVFormat(torch.float32),
        say=lines.append,
    )
    assert taken == 0
    assert len(lines) == 1


def test_more_rows_than_tokens_make_one_row_a_token() -> None:
    assert full_step(num_tokens=3, num_rows=8, block_size=4, max_row_tokens=40).num_rows == 3


@settings(deadline=None, max_examples=60)
@given(
    num_tokens=st.integers(1, 9000),
    num_rows=st.integers(1, 300),
    block_size=st.sampled_from((4, 16, 48, 256)),
    max_row_tokens=st.integers(1, 5000),
)
def test_the_largest_step_has_as_many_tokens_as_rows_may_have(
    num_tokens: int, num_rows: int, block_size: int, max_row_tokens: int
) -> None:
    plan = full_step(num_tokens, num_rows, block_size, max_row_tokens)
    lengths = np.diff(plan.query_starts)
    # With a prefix, which no more than half of a row is.
    assert plan.num_tokens >= min(num_tokens, num_rows * max_row_tokens // 2)
    assert plan.num_tokens <= num_tokens
    assert plan.num_rows == min(num_rows, num_tokens)
    assert lengths.min() >= 1
    assert plan.context_lens.max() <= max_row_tokens
    assert int(plan.positions.max()) < plan.block_tables.shape[1] * block_size
    runs = shared_runs(plan, block_size, SharedPrefix.AUTO)
    if plan.num_rows > 1 and max_row_tokens > 4200:
        # What rows attend to once for all of them takes memory as well.
        assert [(run.first, run.end) for run in runs] == [(0, plan.num_rows)]
        assert runs[0].stop * block_size % 128 == 0


def test_a_step_larger_than_the_longest_row_is_measured_as_a_whole(tmp_path: Path) -> None:
    loaded = load_model(
        ModelSource(str(save("llama", tmp_path))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=16,
    )
    executed: list[StepPlan] = []
    with patch.object(ModelExecutor, "execute", _noting(executed)):
        _measure(loaded)
    assert [plan.num_tokens for plan in executed] == [40, 40]
    assert executed[0].context_lens.tolist() == [16, 16, 3, 1, 1, 1, 1, 1]


def test_a_card_without_room_for_a_step_is_a_usage_error(tmp_path: Path) -> None:
    loaded = load_model(
        ModelSource(str(save("llama", tmp_path))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )

    def fail(self: ModelExecutor, plan: StepPlan) -> None:
        raise OutOfDeviceMemoryError("CUDA out of memory")

    with (
        patch.object(ModelExecutor, "execute", fail),
        pytest.raises(UsageError, match=r"step of 40 tokens; lower engine.max_num_batched_tokens"),
    ):
        _measure(loaded)
