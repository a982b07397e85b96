"""The largest step, whose memory is measured on a GPU, is a step like any other."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache, KVFormat
from batchgen.runtime.memory import GIB
from batchgen.runtime.model import ModelSource, load_model
from batchgen.runtime.profile import activation_bytes, full_step, graph_bytes
from tests.drive import make_attention
from tests.fake_card import FakeCard
from tests.model_device import ModelDevice, Temper
from tests.tensor_attention import TensorAttention
from tests.tiny_models import save


def test_the_largest_step_fills_the_budget_and_samples_every_row(tmp_path: Path) -> None:
    plan = full_step(num_tokens=40, num_rows=8, block_size=4)
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
    tokens = ModelExecutor(loaded.model, cache, make_attention(loaded)).execute(plan)
    assert len(tokens) == 8
    assert None not in tokens


def test_the_peak_is_of_a_second_step_above_what_was_held_before_it(tmp_path: Path) -> None:
    loaded = load_model(
        ModelSource(str(save("llama", tmp_path))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )
    card = FakeCard(total_gib=80, ours_gib=16, others_gib=0, peak_gib=19)
    executed = []
    with patch.object(ModelExecutor, "execute", lambda self, plan: executed.append(plan)):
        taken = activation_bytes(
            loaded,
            make_attention(loaded),
            card,
            num_tokens=40,
            num_rows=8,
            block_size=4,
            kv_format=KVFormat(torch.float32),
        )
    assert taken == 3 * GIB
    assert [plan.num_tokens for plan in executed] == [40, 40]
    assert card.calls == ["in_use", "begin_peak", "peak_in_use", "trim"]


class _ShrinkingCard(FakeCard):
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
        _ShrinkingCard(free),
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
        _ShrinkingCard([60]),
        ModelDevice(Temper.EARLY),
        max_rows=4,
        block_size=4,
        kv_format=KVFormat(torch.float32),
        say=lines.append,
    )
    assert taken == 0
    assert len(lines) == 1


def test_more_rows_than_tokens_make_one_row_a_token() -> None:
    assert full_step(num_tokens=3, num_rows=8, block_size=4).num_rows == 3
