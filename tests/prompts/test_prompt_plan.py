import json

import numpy as np
import pyarrow as pa
import pytest

from batchgen.prompts.diagnostics import PlanDiagnostics
from batchgen.prompts.limits import Limits
from batchgen.prompts.planner import make_plan
from batchgen.prompts.render import Renderer
from batchgen.prompts.source import PromptSpec
from batchgen.prompts.store import PromptStore, preview
from batchgen.prompts.tokenize import tokenize_batches
from batchgen.sampling import SamplingParams

SCHEMA = pa.schema([("prompt_token_ids", pa.list_(pa.int64())), ("sampling_params", pa.string())])


@pytest.fixture
def store_of(tmp_path, batch_of):
    def build(rows):
        """rows: token ids, or (token ids, sampling JSON)."""
        pairs = [row if isinstance(row, tuple) else (row, None) for row in rows]
        table = [{"prompt_token_ids": ids, "sampling_params": text} for ids, text in pairs]
        renderer = Renderer(PromptSpec(), SCHEMA, None)
        # Two batches, so that store rows cross a border.
        batches = [batch_of(table[:2], SCHEMA), batch_of(table[2:], SCHEMA, first=2)]
        out = tokenize_batches(batches, renderer, None, Limits(1000, 1000), SamplingParams())
        return PromptStore.write(tmp_path / "prompts.arrow", pa.string(), out)

    return build


JOB = SamplingParams(max_tokens=10)


def plan_of(store, sampling=JOB, **options):
    defaults = {"max_model_len": 1000, "block_size": 4, "prefix_caching": True, "order": "prefix"}
    return make_plan(store, sampling, **(defaults | options))


def written_of(plan):
    """What ``mode=plan`` writes of a plan."""
    return plan.to_json() | PlanDiagnostics.of(plan, 0, [], None).to_json()


HEAD = list(range(10, 20))
ROWS = [[*HEAD, 1], [7, 7], [*HEAD, 2, 3], [], [*HEAD, 1], None, [1200]]


def test_a_plan_orders_good_rows_by_prefix_and_counts_the_rest(store_of):
    plan = plan_of(store_of(ROWS))
    assert plan.order.tolist() == [1, 0, 2]
    assert plan.duplicates == {0: [4]}
    assert plan.row_errors == {"empty_prompt": 1, "null_prompt": 1, "invalid_token_ids": 1}
    assert (plan.rows, plan.requests, plan.num_duplicates) == (7, 3, 1)
    assert (plan.prompt_tokens, plan.request_tokens) == (11 + 2 + 12 + 11, 11 + 2 + 12)
    assert plan.prefill_tokens_floor == 2 + 11 + 2
    assert plan.prefill_tokens_floor_block == 2 + 11 + 12 - 8
    assert plan.expected_prefill_tokens == plan.prefill_tokens_floor


def test_a_shared_prefix_that_misses_the_block_border_says_what_it_loses(store_of):
    (group,) = plan_of(store_of(ROWS)).groups
    assert (group.tokens, group.rows, group.remainder) == (10, 2, 2)
    assert (group.tokens_saved, group.tokens_lost) == (10, 2)


def test_other_orders_have_the_same_floor_and_an_expectation_that_says_its_basis(store_of):
    store = store_of(ROWS)
    for order, expected in (("input", [0, 1, 2]), ("length", [2, 0, 1])):
        plan = plan_of(store, order=order)
        assert plan.order.tolist() == expected
        assert plan.prefill_tokens_floor_block == 17
        assert order in plan.expected_basis
        assert plan.expected_prefill_tokens == plan.prefill_tokens_floor


def test_windows_are_sorted_alone_and_the_floors_are_their_sums(store_of):
    store = store_of(ROWS)
    plan = plan_of(store, window_rows=2)
    assert (plan.order.tolist(), plan.windows) == ([1, 0, 2], 2)
    # The rows that share ten tokens stand in two windows.
    assert plan.prefill_tokens_floor == plan.request_tokens == 25
    assert plan_of(store, window_rows=100).windows == 1


def test_the_plans_future_knows_the_next_request_of_a_prefix(store_of):
    store = store_of([[*HEAD, 1], [7, 7], [*HEAD, 2, 3]])
    in_order, in_input_order = plan_of(store), plan_of(store, order="input")
    assert in_order.order.tolist() == [1, 0, 2]
    assert in_order.future.next_use(1, 8, after=1) == 2
    assert in_order.future.next_use(1, 11, after=1) is None
    assert in_input_order.future.next_use(0, 8, after=0) == 2
    # Two samples of a row are two requests.
    random = plan_of(store, JOB.override({"n": 2, "temperature": 1.0}))
    assert random.requests == 6
    assert [random.future.next_use(2, 8, after) for after in (2, 3, 4, 5)] == [3, 4, 5, None]


def test_without_prefix_caching_every_prompt_is_computed_whole(store_of):
    plan = plan_of(store_of(ROWS), prefix_caching=False)
    assert plan.expected_prefill_tokens == plan.request_tokens == 25
    assert "off" in plan.expected_basis


def test_only_deterministic_rows_with_the_same_parameters_are_duplicates(store_of):
    rows = [
        ([5, 6], None),
        ([5, 6], '{"seed": 3, "top_p": 0.5, "n": 2}'),
        ([5, 6], '{"max_tokens": 11}'),
        ([5, 6], '{"temperature": 1}'),
        ([5, 6], '{"temperature": 1}'),
    ]
    plan = plan_of(store_of(rows))
    assert plan.duplicates == {0: [1]}
    assert plan.order.tolist() == [0, 2, 3, 4]


def test_random_samples_are_requests_and_greedy_samples_are_one(store_of):
    store = store_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]])
    greedy = plan_of(store, SamplingParams(n=3))
    assert (greedy.requests, greedy.prefill_tokens_floor) == (2, 6)
    random = plan_of(store, SamplingParams(n=3, temperature=1))
    assert (random.requests, random.request_tokens) == (6, 30)
    assert random.prefill_tokens_floor == 6 + 4
    assert random.prefill_tokens_floor_block == 5 + 5 * 1


def test_request_lengths_count_max_tokens_and_stop_at_the_models_length(store_of):
    rows = [([1] * 10, '{"max_tokens": 5}'), [2] * 20, ([3] * 40, '{"max_tokens": 5000}')]
    plan = plan_of(store_of(rows), max_model_len=100)
    assert plan.longest_request_tokens == 100
    assert plan.request_tokens_p50 == 30
    assert plan.request_tokens_p95 == 100


def test_every_row_has_its_own_parameters_whatever_batch_it_came_in(store_of):
    texts = [json.dumps({"max_tokens": most}) for most in (3, 5, 7, 5, 3)]
    store = store_of([([row], text) for row, text in enumerate(texts, 1)] + [[9]])
    assert store.sampling_params.num_chunks == 2
    for row, most in enumerate((3, 5, 7, 5, 3, 10)):
        done = np.arange(6) != row
        assert plan_of(store, done=done).longest_request_tokens == 1 + most


def test_the_plan_as_json_has_the_contracts_keys_and_plain_values(store_of):
    written = json.loads(json.dumps(written_of(plan_of(store_of(ROWS)))))
    assert written["rows"] == 7
    assert written["duplicates"] == 1
    assert written["row_errors"]["null_prompt"] == 1
    assert {
        "prompt_tokens",
        "prefill_tokens_floor",
        "prefill_tokens_floor_block",
        "expected_prefill_tokens",
        "longest_request_tokens",
    } <= set(written)
    assert written["groups"] == [
        {
            "row_index": 0,
            "tokens": 10,
            "rows": 2,
            "remainder": 2,
            "tokens_saved": 10,
            "tokens_lost": 2,
            "text": None,
            "remedy": {"block_sizes": [5, 10], "shorten_by": 2, "lengthen_by": 2},
        }
    ]


def test_the_description_names_floors_and_errors(store_of):
    text = plan_of(store_of(ROWS)).describe()
    assert "floor 15 by the token, 17 by blocks of 4" in text
    assert "1 null_prompt" in text
    assert "shared prefix of 10 tokens" in text


def test_a_job_without_rows_has_a_plan(store_of):
    plan = plan_of(store_of([]))
    assert len(plan.order) == plan.longest_request_tokens == plan.expected_prefill_tokens == 0
    assert written_of(plan)["groups"] == []
    assert plan.describe()


def test_at_most_twenty_groups_are_kept_largest_saving_first(store_of):
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, 900, 30 + at).tolist() for at in range(30)]
    rows = [[*head, tail] for head in heads for tail in (900, 901)]
    groups = plan_of(store_of(rows)).groups
    assert [group.tokens for group in groups] == list(range(59, 39, -1))


def test_preview_shows_special_tokens_ids_and_errors(tmp_path, bos_tokenizer, batch_of):
    batch = batch_of([{"prompt": "the fox"}, {"prompt": None}, {"prompt": "unseen"}])
    renderer = Renderer(PromptSpec(), batch.table.schema, bos_tokenizer)
    sampling = SamplingParams()
    out = tokenize_batches([batch], renderer, bos_tokenizer, Limits(99, 999), sampling)
    store = PromptStore.write(tmp_path / "prompts.arrow", pa.string(), out)
    text = preview(store, bos_tokenizer, 2)
    assert "<s>the fox" in text
    assert str(bos_tokenizer("the fox")["input_ids"]) in text
    assert "null_prompt" in text
    assert "unseen" not in text
    assert "token ids" in preview(store, None, 99)
