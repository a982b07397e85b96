"""Advice on a template column that varies early, against plans of templates moved by hand."""

import random
from typing import Any

import pyarrow as pa
import pytest

from batchgen.prompts.advice.columns import advise
from batchgen.prompts.advice.sample import RowSample
from batchgen.prompts.limits import Limits
from batchgen.prompts.planner import make_plan
from batchgen.prompts.render import Renderer
from batchgen.prompts.source import PromptSpec
from batchgen.prompts.store import PromptStore
from batchgen.prompts.tokenize import tokenize_batches
from batchgen.sampling import SamplingParams

GREEDY = SamplingParams()
LIMITS = Limits(100_000, 100_000)
EXAMPLES = "A review of the movie: good acting, bad story. Answer: yes\n\n" * 8
WORDS = ["fox", "dog", "movie", "story", "end", "user", "lazy", "brown"]


def rows_of(count: int, **columns: Any) -> list[dict[str, Any]]:
    """Rows with a time and a text of their own, and other columns made from the number."""
    rng = random.Random(7)
    return [
        {"ts": f"{rng.randrange(10**8):08}", "text": " ".join(rng.choices(WORDS, k=6)) + f" {n}"}
        | {name: make(n) for name, make in columns.items()}
        for n in range(count)
    ]


@pytest.fixture
def planned(tmp_path, batch_of, tokenizer):
    """Plan a template over rows; give the plan and the advice."""

    def build(spec, rows, sampling=GREEDY, **options):
        schema = pa.Table.from_pylist(rows).schema
        size = 100
        batches = [
            batch_of(rows[start : start + size], schema, first=start)
            for start in range(0, len(rows), size)
        ]
        renderer, sample = Renderer(spec, schema, tokenizer), RowSample(len(rows))
        for batch in batches:
            sample.see(batch.table)
        out = tokenize_batches(batches, renderer, tokenizer, LIMITS, sampling)
        store = PromptStore.write(tmp_path / "prompts.arrow", pa.string(), out)
        defaults = {"block_size": 16, "prefix_caching": True, "order": "prefix"}
        plan = make_plan(store, sampling, max_model_len=100_000, **(defaults | options))
        shared = plan.requests_by_prefix.shared_by_store_row(store.num_rows)
        advice = advise(sample, spec, schema, tokenizer, LIMITS, ids=store.ids, shared=shared)
        return plan, advice, [store.ids(row).tolist() for row in range(store.num_rows)]

    return build


def saving(before, after) -> float:
    """What a plan saves over another, in tokens a row."""
    return (before.prefill_tokens_floor - after.prefill_tokens_floor) / len(before.order)


EARLY = "[{{ ts }}] Judge.\n" + EXAMPLES + "{{ text }}"
LATE = "[] Judge.\n" + EXAMPLES + "{{ text }}\n{{ ts }}"
SHOTS = [
    {"ts": "00000001", "text": "the fox", "answer": "yes"},
    {"ts": "00000002", "text": "the dog", "answer": "no"},
]
KINDS = [
    {"format": "chat", "system": "The user asks."},
    {"format": "plain", "system": "The user asks.", "shots": SHOTS},
    {"format": "chat", "shots": SHOTS},
    {"format": "plain"},
]


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_saving_is_that_of_the_plan_with_the_column_moved_by_hand(planned, kind):
    rows = rows_of(60)
    before, advice, ids = planned(PromptSpec(template=EARLY, **kind), rows)
    after, _, _ = planned(PromptSpec(template=LATE, **kind), rows)
    assert advice.columns == ("ts",)
    assert advice.saved_tokens_per_row == int(saving(before, after)) > 100
    # Every prompt is the same up to there, and not beyond.
    at = advice.first_token
    assert len({tuple(each[:at]) for each in ids}) == 1
    assert len({each[at] for each in ids}) > 1


def test_for_more_rows_than_the_sample_it_is_what_the_move_saves_at_least(planned):
    rows = rows_of(1500)
    before, advice, _ = planned(PromptSpec(template=EARLY), rows)
    after, _, _ = planned(PromptSpec(template=LATE), rows)
    assert 0.95 * saving(before, after) <= advice.saved_tokens_per_row <= saving(before, after)


def test_random_samples_of_a_row_do_not_change_what_a_row_saves(planned):
    rows, spec = rows_of(40), PromptSpec(template=EARLY)
    _, once, _ = planned(spec, rows)
    _, thrice, _ = planned(spec, rows, SamplingParams(n=3, temperature=1.0))
    assert once == thrice


@pytest.mark.parametrize("order", ["input", "length"])
def test_the_order_in_which_rows_run_does_not_change_it(planned, order):
    rows, spec = rows_of(40), PromptSpec(template=EARLY)
    assert planned(spec, rows)[1] == planned(spec, rows, order=order)[1]


def test_of_two_early_columns_the_one_whose_move_saves_most_is_named(planned):
    rows = rows_of(80, few=lambda n: f"set {n % 2}")
    template = "{{ few }} [{{ ts }}]\n" + EXAMPLES + "{{ text }}"
    assert planned(PromptSpec(template=template), rows)[1].columns == ("ts",)
    template = "[{{ ts }}] {{ few }}\n" + EXAMPLES + "{{ text }}"
    assert planned(PromptSpec(template=template), rows)[1].columns == ("ts",)


def test_columns_that_hide_one_another_are_named_together(planned):
    rows = rows_of(80, user=lambda n: f"user {n * 7919 % 1000}")
    template = "[{{ ts }}] {{ user }}\n" + EXAMPLES + "{{ text }}"
    before, advice, _ = planned(PromptSpec(template=template), rows)
    moved = "[] \n" + EXAMPLES + "{{ text }}\n{{ ts }}\n{{ user }}"
    after, _, _ = planned(PromptSpec(template=moved), rows)
    assert advice.columns == ("ts", "user")
    assert advice.saved_tokens_per_row == int(saving(before, after))
    assert "columns `ts` and `user` differ at token" in advice.describe()


QUIET = {
    "text last": "Judge.\n" + EXAMPLES + "{{ text }} {{ ts }}",
    "little behind it": "{{ text }} Answer:",
    "few values": "{{ day }}\n" + EXAMPLES + "{{ text }}",
    "a choice of instructions": "{% if day == 'day 0' %}" + EXAMPLES + "{% else %}the fox "
    "{% endif %}{{ text }}",
    "no column": EXAMPLES,
}


@pytest.mark.parametrize("name", QUIET)
def test_a_template_with_no_costly_early_column_gets_no_advice(planned, name):
    rows = rows_of(600, day=lambda n: f"day {n // 100}")
    assert planned(PromptSpec(template=QUIET[name]), rows)[1] is None


def test_prompts_that_no_template_makes_get_no_advice(planned):
    rows = [{"prompt": f"{n} {EXAMPLES}"} for n in range(30)]
    assert planned(PromptSpec(), rows)[1] is None


@pytest.mark.parametrize(
    ("early", "late"),
    [
        ("{%- if ts -%} at {{ ts }} {%- endif -%}\n\n ", "{% if ts %}at {{ ts }}{% endif %}"),
        ("{% set day = ts[:5] %}{{ day }}\n", "{{ ts[:5] }}"),
        ("{# when #}{% raw %}{{ at }}{% endraw %}{{- ts|upper }}\n", "{{ ts|upper }}"),
        ("{% set day %}on {{ ts }}{% endset %}{{ day }}\n", "on {{ ts }}"),
        ("{% for sign in ts %}{{ sign }}-{% endfor %}\n", "{% for s in ts %}{{ s }}-{% endfor %}"),
        ("{% macro at(x) %}at {{ x }}{% endmacro %}{{ at(ts) }}\n", "at {{ ts }}"),
    ],
)
def test_whatever_writes_the_column_moves_as_a_whole(planned, early, late):
    rows = rows_of(50)
    before, advice, _ = planned(PromptSpec(template=early + EXAMPLES + "{{ text }}"), rows)
    after, _, _ = planned(PromptSpec(template=EXAMPLES + "{{ text }}\n" + late), rows)
    assert advice.columns == ("ts",)
    # What stays in front may be a few tokens more or less than by hand.
    assert abs(advice.saved_tokens_per_row - saving(before, after)) < 8


def test_a_block_that_sets_names_for_what_follows_is_left_where_it_is(planned):
    template = "{% set seen = namespace(it=0) %}{% if ts %}{{ ts }}{% set seen.it = 1 %}{% endif %}"
    template += EXAMPLES + "{{ seen.it }} {{ text }}"
    assert planned(PromptSpec(template=template), rows_of(30))[1] is None


def test_rows_with_errors_count_for_nothing(planned):
    rows = rows_of(60)
    bad = [row | {"text": None} if n % 3 == 0 else row for n, row in enumerate(rows)]
    good = [row for n, row in enumerate(rows) if n % 3]
    spec = PromptSpec(template=EARLY)
    assert planned(spec, bad)[1] == planned(spec, good)[1]


def test_a_single_row_gets_no_advice(planned):
    assert planned(PromptSpec(template=EARLY), rows_of(1))[1] is None
