"""The benchmark's data sets are the ones they say they are, and the same every time."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import bench_workloads
import pyarrow.parquet as pq
import pytest
from bench_workloads import Row, Size, Texts, open_texts, workload_rows, write_workload

from batchgen.errors import UsageError
from tests.support.tiny_tokenizers import make


@pytest.fixture(scope="module")
def texts(smollm2_dir) -> Texts:
    return open_texts(str(smollm2_dir))


@pytest.fixture(scope="module")
def rows_of(texts) -> Callable[[str], list[Row]]:
    """The rows of a workload by its name, each made once."""
    return cache(lambda name: workload_rows(name, Size.CPU, texts))


def _shared(one: list[int], other: list[int]) -> int:
    both = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


def _floor(rows: list[Row]) -> int:
    prompts = sorted(row.token_ids for row in rows)
    saved = [min(_shared(one, other), len(other) - 1) for one, other in pairwise(prompts)]
    return sum(map(len, prompts)) - sum(saved)


# Rows, prompt tokens, E_1 and tokens out with SmolLM2's tokenizer.
SIZES = {
    "few_shot": (64, 58_000, 5_200, 512),
    "sharegpt": (64, 7_400, 5_800, 7_400),
    "multi_turn": (128, 43_000, 17_500, 2_048),
    "documents": (64, 35_300, 9_800, 1_536),
    "batchllm": (64, 35_200, 7_200, 1_536),
    "table": (64, 17_200, 4_600, 256),
    "unshared": (64, 7_360, 7_360, 2_048),
    "decode_heavy": (64, 99_840, 5_340, 4_096),
}


@pytest.mark.parametrize("name", bench_workloads.WORKLOADS)
def test_a_workload_has_about_the_size_it_is_meant_to_have(rows_of, name):
    rows = rows_of(name)
    tokens = sum(len(row.token_ids) for row in rows)
    output = sum(row.max_tokens for row in rows)
    count, prompt, floor, out = SIZES[name]
    assert len(rows) == count
    assert (tokens, _floor(rows), output) == pytest.approx((prompt, floor, out), rel=0.1)
    assert f"E_1 {_floor(rows):11,}" in bench_workloads.describe(name, rows)


@pytest.mark.parametrize("name", ["few_shot", "sharegpt", "batchllm", "table"])
def test_a_workload_is_the_same_every_time_and_whichever_came_before(rows_of, smollm2_dir, name):
    again = open_texts(str(smollm2_dir))
    assert rows_of(name) == workload_rows(name, Size.CPU, again)


def test_outputs_of_chats_have_the_lengths_of_the_real_answers(rows_of):
    assert len({row.max_tokens for row in rows_of("sharegpt")}) > 5


def test_conversations_grow(rows_of):
    prompts = sorted(row.token_ids for row in rows_of("multi_turn"))
    beginnings = [prompt[:-4] for prompt in prompts]
    grown = sum(_shared(one, other) == len(one) for one, other in pairwise(beginnings))
    assert grown >= len(prompts) // 2


def test_groups_share_their_prefix_eight_times_and_stand_shuffled(rows_of):
    heads = [tuple(row.token_ids[:500]) for row in rows_of("batchllm")]
    assert set(Counter(heads).values()) == {8}
    assert sum(one == other for one, other in pairwise(heads)) < 16


def test_unshared_rows_share_nothing(rows_of):
    assert len({row.token_ids[0] for row in rows_of("unshared")}) == 64


def test_rows_and_outputs_can_be_cut(texts, rows_of):
    rows = workload_rows("decode_heavy", Size.CPU, texts, limit=3, cap=2)
    assert [row.max_tokens for row in rows] == [2, 2, 2]
    whole = rows_of("decode_heavy")[:3]
    assert [row.token_ids for row in rows] == [row.token_ids for row in whole]


def test_a_workload_is_a_parquet_file_of_token_ids(tmp_path):
    path = tmp_path / "new" / "rows.parquet"
    write_workload([Row([3, 4], 5), Row([6], 1)], path)
    table = pq.read_table(path)
    assert table.to_pydict() == {"prompt_token_ids": [[3, 4], [6]], "max_tokens": [5, 1]}


def test_a_small_vocabulary_is_said_to_be_too_small():
    with pytest.raises(UsageError, match="fewer --rows"):
        workload_rows("unshared", Size.GPU, Texts(make()))
