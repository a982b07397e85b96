"""``prompt.field_order`` in the whole command: the gain comes first, the results are the rows'."""

from typing import Any

import pytest

from tests.job.harness import Job

WORDS = ["fox", "dog", "movie", "story", "end"]
ROWS: list[dict[str, Any]] = [
    {"id": n, "n": n, "text": f"{WORDS[n % 5]} and {WORDS[(n + 1) % 5]} " * 6, "kind": n % 2}
    for n in range(40)
]
LISTING = (
    'prompt.template="{% for name, value in fields %}{{ name }} = {{ value }}\\n{% endfor %}yes"'
)
FIELDS = [LISTING, "prompt.fields=[n,text,kind]", "prompt.format=plain"]


def test_a_plan_shows_what_each_order_would_share_before_any_is_chosen(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(ROWS)
    assert job("mode=plan", *FIELDS) == 0
    said, plan = capsys.readouterr().out, job.json("_plan.json")
    costs = {each["field_order"]: each for each in plan["field_orders"]}
    assert list(costs) == ["given", "fixed", "rows"]
    assert costs["given"]["prefill_tokens"] == plan["prefill_tokens_floor"]
    assert costs["given"]["hit_share"] < 0.2
    assert costs["rows"]["hit_share"] > 0.6
    assert "prompt.field_order=rows" in said
    assert job("mode=plan", *FIELDS, "prompt.field_order=rows") == 0
    assert job.json("_plan.json")["prefill_tokens_floor"] == costs["rows"]["prefill_tokens"]


def test_a_preview_shows_the_prompts_that_a_run_over_all_rows_makes(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(ROWS)
    assert job("mode=preview", *FIELDS, "prompt.field_order=rows") == 0
    shown = capsys.readouterr().out
    assert "text = fox and dog" in shown
    assert shown.index("text = fox") < shown.index("n = 0")
    assert job(*FIELDS, "prompt.field_order=rows") == 0
    planned = job.json("_plan.json")
    assert job.summary["ok"] == len(ROWS)
    assert job.summary["prefill_tokens_floor"] == planned["prefill_tokens_floor"]
    # Another order makes other prompts: not to be added to these results.
    assert job(*FIELDS) == 2
    assert "field_order" in capsys.readouterr().err
