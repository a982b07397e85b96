"""The largest step, whose memory is measured on a GPU, is a step like any other."""

from pathlib import Path
from unittest.mock import patch

import torch

from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache, KVFormat
from batchgen.runtime.memory import GIB
from batchgen.runtime.model import ModelSource, load_model
from batchgen.runtime.profile import activation_bytes, full_step
from tests.drive import make_attention
from tests.fake_card import FakeCard
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


def test_more_rows_than_tokens_make_one_row_a_token() -> None:
    assert full_step(num_tokens=3, num_rows=8, block_size=4).num_rows == 3
