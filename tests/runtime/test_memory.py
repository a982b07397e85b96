"""The pool's arithmetic, with the figures users know from published models."""

import pytest
import torch

from batchgen.errors import UsageError
from batchgen.runtime.kv_cache import KVCache, LayerGeometry, kv_bytes_per_token
from batchgen.runtime.memory import (
    GIB,
    Ledger,
    blocks_in,
    default_cpu_pool_bytes,
    default_swap_bytes,
    gpu_pool_bytes,
    others_bytes,
)
from tests.support.fake_card import FakeDeviceMemory


def _layers(count: int, heads: int, size: int) -> list[LayerGeometry]:
    return [LayerGeometry(heads, size, size)] * count


def test_bytes_per_token_of_known_models() -> None:
    assert kv_bytes_per_token(_layers(32, 32, 128), torch.float16) == 524_288
    assert kv_bytes_per_token(_layers(40, 40, 128), torch.float16) == 819_200
    assert kv_bytes_per_token(_layers(36, 8, 128), torch.bfloat16) == 147_456
    assert kv_bytes_per_token(_layers(30, 3, 64), torch.float32) == 46_080


@pytest.mark.parametrize(
    ("blocks", "swap_blocks", "named"),
    [(1 << 40, 0, "pool.num_blocks"), (1, 1 << 40, "pool.swap_gib")],
)
def test_a_pool_that_no_memory_holds_is_a_usage_error(
    blocks: int, swap_blocks: int, named: str
) -> None:
    with pytest.raises(UsageError, match=f"{1 << 40:,}.*lower {named}"):
        KVCache(
            _layers(1, 8, 128),
            blocks,
            16,
            num_swap_blocks=swap_blocks,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


def test_a_fault_that_shows_when_memory_is_asked_for_is_no_lack_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fault(*size: object, **given: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "empty", fault)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        KVCache(
            _layers(1, 8, 128),
            1,
            16,
            num_swap_blocks=0,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


def test_sixty_gib_of_a_7b_hold_sixty_rows_of_2048() -> None:
    blocks = blocks_in(60 * GIB, 524_288, 16)
    ledger = Ledger(0, 0, 524_288, 16, blocks, 0)
    assert blocks == 7_680
    assert ledger.pool_tokens == 122_880
    assert ledger.pool_bytes == 60 * GIB
    assert ledger.concurrency(2_048) == 60


def test_a_row_takes_whole_blocks() -> None:
    assert Ledger(0, 0, 8, 16, 10, 0).concurrency(17) == 5


def test_defaults_are_a_quarter_of_the_free_memory_and_at_most_four_gib() -> None:
    for default in (default_cpu_pool_bytes, default_swap_bytes):
        assert default(8 * GIB) == 2 * GIB
        assert default(100 * GIB) == 4 * GIB


def test_a_gpu_gives_the_pool_what_weights_others_and_activations_leave() -> None:
    card = FakeDeviceMemory(total_gib=80, ours_gib=13, others_gib=3)
    assert gpu_pool_bytes(card, 2 * GIB, 0.9) == (72 - 16 - 2) * GIB
    assert others_bytes(card) == 3 * GIB


def test_the_ledger_names_all_that_a_card_holds() -> None:
    ledger = Ledger(16 * GIB, 2 * GIB, GIB // 16, 16, 10, 4, 3 * GIB, GIB // 8, GIB)
    line = ledger.describe({"p50": 100}).splitlines()[0]
    assert line == (
        "memory: weights 16.00 GiB, activations 2.00 GiB, graphs 1.00 GiB, pool 10.00 GiB, "
        "swap 4.00 GiB and 0.12 GiB to pass through, held by others 3.00 GiB"
    )


def test_the_cache_takes_the_bytes_that_the_ledger_says() -> None:
    layers = [LayerGeometry(2, 8, 8), LayerGeometry(1, 4, 6)]
    cache = KVCache(
        layers, 5, 3, num_swap_blocks=0, dtype=torch.float32, device=torch.device("cpu")
    )
    held = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert held == Ledger(0, 0, kv_bytes_per_token(layers, torch.float32), 3, 5, 0).pool_bytes
