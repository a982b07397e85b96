"""The counts of bytes and operations against enumeration and known figures."""

import kernel_roofline as roofline
import pytest
from kernel_roofline import H100, H200, LLAMA_8B, STATED, Cost, Layer

TINY = Layer(heads=4, kv_heads=2, key_size=8, value_size=16, element_bytes=4, kv_bytes=2)


def test_attention_counts_every_visible_pair_once() -> None:
    rows = [(7, 3), (5, 5), (9, 1)]
    pairs = sum(
        position + 1 for context, n in rows for position in range(context - n, context)
    )  # a query sees itself and all before it
    cost = roofline.attention(TINY, rows)
    assert cost.exponentials == pairs * 4
    # A dot product of 8, and 16 weighted values to add, for each of 4 heads.
    assert cost.flops == pairs * 4 * 2 * (8 + 16)
    kv = 21 * 2 * (8 + 16) * 2
    queries_and_results = 9 * 4 * (8 + 16) * 4
    assert cost.bytes == kv + queries_and_results


def test_a_split_writes_float32_parts_that_the_join_reads() -> None:
    whole, split = (roofline.attention(TINY, [(50, 1)], splits) for splits in (1, 5))
    part = 4 * (16 + 1) * 4
    assert split.bytes - whole.bytes == 5 * part - 4 * 16 * 4
    assert roofline.join(TINY, 1, 5).bytes == 5 * part + 4 * 16 * 4


def test_a_shared_prefix_is_read_once_and_computed_for_every_query() -> None:
    one, many = (roofline.shared_prefix(TINY, 100, n) for n in (1, 64))
    assert many.flops == 64 * one.flops
    assert many.bytes - one.bytes == 63 * (4 * 8 * 4 + 4 * 17 * 4)


def test_stores_and_moves_count_reads_and_writes() -> None:
    assert roofline.store_kv(TINY, 3).bytes == 3 * (2 * 24 * 4 + 2 * 24 * 2 + 16)
    assert roofline.move_blocks(TINY, 5, 16, 2).bytes == 2 * 2 * 16 * 5 * (2 * 24 * 2)


def test_llama_8b_decode_reads_131_kib_a_token_over_32_layers() -> None:
    assert 32 * LLAMA_8B.kv_bytes_per_token == 131072
    cost = STATED["decode, 256 rows of 2,048"]
    # 2.15 GB of keys and values at 3.35 TB/s.
    assert cost.seconds(H100) == pytest.approx(642e-6, rel=0.01)
    assert cost.bound(H100) == "memory"


def test_prefill_is_bound_by_tensor_cores_and_decode_gains_with_the_memory() -> None:
    assert STATED["prefill, 4 rows of 2,048"].bound(H100) == "tensor cores"
    for cost in STATED.values():
        assert cost.seconds(H200) <= cost.seconds(H100)


def test_sharing_a_prefix_of_1500_takes_a_tenth_of_the_time() -> None:
    apart, shared = (
        cost.seconds(H100) for name, cost in STATED.items() if "prefix of 1,500" in name
    )
    assert shared < apart / 8


def test_the_slowest_resource_decides() -> None:
    assert Cost(335, 0, 0).seconds(H100) == pytest.approx(1e-10)
    assert Cost(0, 989, 0).bound(H100) == "tensor cores"
    assert Cost(0, 0, 39).bound(H100) == "exponentials"


def test_the_table_names_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    roofline.main()
    shown = capsys.readouterr().out
    assert all(name in shown for name in STATED)
