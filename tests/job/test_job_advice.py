"""The line on a template column that varies early: in the plan, its file and the end report."""

import pytest

from tests.job.harness import Job

EXAMPLES = "A review of the movie: good acting, bad story. Answer: yes. " * 4
WORDS = ["fox", "dog", "movie", "story"]
ROWS = [{"id": n, "ts": n * 7919 % 10_000, "text": WORDS[n % 4]} for n in range(12)]
EARLY = f'prompt.template="[{{{{ ts }}}}] {EXAMPLES}{{{{ text }}}}"'


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_the_plan_and_the_end_report_name_the_column_that_varies_early(
    job: Job, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    job.write(ROWS)
    arguments = [EARLY, f"prompt.format={kind}", "sampling.max_tokens=2"]
    assert job("mode=plan", *arguments) == 0
    advice = job.json("_plan.json")["advice"]
    assert advice["columns"] == ["ts"]
    assert advice["saved_tokens_per_row"] > 50
    line = (
        f"column `ts` differs at token {advice['first_token']}; moved to the template's end it "
        f"would save {advice['saved_tokens_per_row']} tokens a row"
    )
    assert line in capsys.readouterr().out
    assert job(*arguments) == 0
    assert job.summary["sharing"][-1] == line
    assert capsys.readouterr().err.rstrip().endswith(line)


@pytest.mark.parametrize(
    "arguments",
    [
        [f'prompt.template="{EXAMPLES}{{{{ text }}}} {{{{ ts }}}}"'],
        [EARLY, "pool.prefix_caching=false"],
        ["prompt.column=text"],
    ],
)
def test_without_an_early_column_a_cache_or_a_template_there_is_no_line(
    job: Job, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    job.write(ROWS)
    assert job("mode=plan", *arguments) == 0
    assert job.json("_plan.json")["advice"] is None
    assert "differs at token" not in capsys.readouterr().out


def test_the_plan_counts_what_normalisation_changed_and_a_changed_rule_is_another_job(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = "Answer: yes \t" * 9 + "\n"
    job.write([{"id": n, "frame": frame, "text": f"a {n} "} for n in range(4)])
    template = 'prompt.template="{{ frame }} \\n{{ text }}"'
    rule = "prompt.normalize.trailing_space=true"
    arguments = [template, rule, "prompt.normalize.columns=[frame]", "prompt.format=plain"]
    assert job("mode=plan", *arguments) == 0
    assert job.json("_plan.json")["normalized"] == {"trailing_space": {"parts": 1, "rows": 4}}
    assert "trailing_space 1 texts of the job, 4 rows" in capsys.readouterr().out
    assert job(*arguments) == 0
    assert job(*arguments[:1], *arguments[3:]) == 2
    assert "normalize.trailing_space" in capsys.readouterr().err


def test_a_run_leaves_to_mode_plan_what_running_does_not_need(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(ROWS)
    assert job(EARLY, "prompt.format=plain", "sampling.max_tokens=2") == 0
    run = job.json("_plan.json")
    said_before_loading = capsys.readouterr().err.split("[load]")[0]
    assert "differs at token" not in said_before_loading
    assert job("mode=plan", EARLY, "prompt.format=plain", "sampling.max_tokens=2") == 0
    plan = job.json("_plan.json")
    added = plan.keys() - run.keys()
    assert added >= {"advice", "lengths", "block_sizes", "memory", "alternatives"}
    ignored = {"phases", "groups"}
    assert {name: run[name] for name in run.keys() - ignored} == {
        name: plan[name] for name in run.keys() - ignored
    }
    assert [each["tokens_saved"] for each in run["groups"]] == [
        each["tokens_saved"] for each in plan["groups"]
    ]


def test_a_row_that_is_cut_and_rendered_again_counts_once_as_normalised(job: Job) -> None:
    job.write(
        [{"id": n, "frame": "Answer: yes \t\n", "text": "good acting " * 90} for n in range(3)]
    )
    arguments = [
        'prompt.template="{{ frame }}{{ text }}"',
        "prompt.format=plain",
        "prompt.normalize.trailing_space=true",
        "prompt.normalize.columns=[frame]",
        "prompt.truncation=truncate_left",
        "model.max_model_len=64",
    ]
    assert job("mode=plan", *arguments) == 0
    plan = job.json("_plan.json")
    assert plan["truncation"]["cut_rows"] == 3
    assert plan["normalized"]["trailing_space"]["rows"] == 3
