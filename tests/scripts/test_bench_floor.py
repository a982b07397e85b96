"""The floor counts every token's keys, and times the model's own products."""

import pytest
from bench_parts.floor import TIMINGS, Products, count_work, job_work, load_products
from hypothesis import given
from hypothesis import strategies as st
from job_rows import compose_job, open_rows
from torch.utils.flop_counter import FlopCounterMode

from batchgen.errors import UsageError
from tests.scripts.bench_job import OUTPUTS, make_job

# Of the tiny models: layers, query heads, head size, hidden size, vocabulary.
LAYERS, HEADS, HEAD, HIDDEN, VOCABULARY = 3, 6, 8, 48, 199
KV_HEADS, INNER = 2, 96
# q and o, k and v, gate, up and down.
LAYER_WEIGHTS = 2 * HIDDEN * HEADS * HEAD + 2 * HIDDEN * KV_HEADS * HEAD + 3 * HIDDEN * INNER


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[str]:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def products(job) -> Products:
    return load_products(job)


def _prompts():
    row = st.lists(st.integers(0, 1), min_size=1, max_size=6)
    return st.lists(st.tuples(row, st.integers(1, 5)), min_size=1, max_size=6)


def _common(one: list[int], other: list[int]) -> int:
    both = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


@given(_prompts())
def test_work_is_what_counting_token_by_token_gives(rows):
    rows = sorted(rows, key=lambda row: row[0])
    prompts = [ids for ids, _ in rows]
    outputs = [output for _, output in rows]
    shared = [0] * len(rows)
    for at in range(1, len(rows)):
        shared[at] = min(_common(prompts[at - 1], prompts[at]), len(prompts[at]) - 1)
    work = count_work([len(ids) for ids in prompts], shared, outputs)
    prefill = [
        p + 1 for ids, lcp in zip(prompts, shared, strict=True) for p in range(lcp, len(ids))
    ]
    assert (work.prefill_tokens, work.prefill_context) == (len(prefill), sum(prefill))
    decoded = [
        (len(ids) + step + 1, max(shared[at], *shared[at + 1 : at + 2], 0))
        for at, (ids, output) in enumerate(rows)
        for step in range(output - 1)
    ]
    assert work.decode_tokens == len(decoded)
    assert work.decode_shared + work.decode_own == sum(context for context, _ in decoded)
    assert work.decode_shared == sum(in_common for _, in_common in decoded)
    assert (work.samples, work.rows) == (sum(outputs), len(rows))


def test_work_of_a_job_is_that_of_its_plan_whatever_its_order(job):
    config = compose_job([*job, "schedule.order=input"])
    with open_rows(config) as rows:
        work = job_work(rows, config)
        plan, _ = rows.stream(config)
    assert work.prefill_tokens == plan.prefill_tokens_floor
    assert work.samples == sum(OUTPUTS)


def _flops(call) -> float:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / (1 + TIMINGS)


def test_linear_products_are_those_of_all_layers(products):
    assert _flops(lambda: products._linear_s(7)) == 2 * 7 * LAYERS * LAYER_WEIGHTS
    assert _flops(lambda: products._vocabulary_s(7)) == 2 * 7 * HIDDEN * VOCABULARY


def test_attention_products_are_those_of_all_heads(products):
    expected = 2 * 2 * 5 * 11 * HEADS * HEAD * LAYERS
    assert _flops(lambda: products._shared_s(5, 11)) == expected
    assert _flops(lambda: products._own_s(5, 11)) == expected
    assert products._own_s(5, 0) == 0


def test_the_floor_multiplies_a_step_by_the_number_of_steps(products, job, monkeypatch):
    monkeypatch.setattr(products, "_time", lambda call: 1.0)
    with open_rows(compose_job(job)) as rows:
        work = job_work(rows, compose_job(job))
        floor = products.run(rows)
    assert floor.parts["prefill linear"] == 1
    assert floor.parts["vocabulary"] == pytest.approx(work.samples / work.rows)
    assert floor.parts["decode linear"] == pytest.approx(work.decode_tokens / work.rows)
    assert floor.seconds == pytest.approx(sum(floor.parts.values()))


def test_a_window_bounds_the_keys(tmp_path):
    windowed = load_products(make_job(tmp_path, "phi3"))
    assert _flops(lambda: windowed._own_s(5, 30)) == 2 * 2 * 5 * 9 * HEADS * HEAD * LAYERS


def test_a_model_of_experts_has_no_floor(tmp_path):
    with pytest.raises(UsageError, match="--no-floor"):
        load_products(make_job(tmp_path, "qwen3_moe"))
