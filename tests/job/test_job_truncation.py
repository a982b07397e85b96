"""Truncation through the whole command: plan, preview, columns, summary."""

from typing import Any

import pytest

from tests.job.harness import Job

LONG = "The quick brown fox jumps over the lazy dog. " * 12
ROWS = [{"prompt": "The end"}, {"prompt": LONG}, {"prompt": "A dog " + LONG}]
LIMIT = "model.max_model_len=64"


@pytest.mark.parametrize("policy", ["truncate_left", "truncate_right", "truncate_middle"])
def test_long_prompts_are_cut_to_leave_room_and_that_is_told_everywhere(
    job: Job, tokenizer: Any, policy: str, capsys: Any
) -> None:
    job.write(ROWS)
    arguments = (LIMIT, "sampling.max_tokens=20", f"prompt.truncation={policy}")
    lengths = [len(tokenizer(row["prompt"])["input_ids"]) for row in ROWS]
    cut = [max(0, length - 44) for length in lengths]
    assert job("mode=preview", *arguments) == 0
    assert f"44 tokens, {cut[1]} cut off" in capsys.readouterr().out
    assert job("mode=plan", *arguments) == 0
    assert f"{sum(cut):,} prompt tokens are cut from 2 rows" in capsys.readouterr().out
    assert job(*arguments) == 0
    rows = job.rows()
    assert [row["prompt_tokens"] for row in rows] == [lengths[0], 44, 44]
    assert [row["prompt_tokens_cut"] for row in rows] == cut
    assert {row["max_tokens_cut"] for row in rows} == {0}
    assert job.json("_plan.json")["truncation"] == {
        "policy": policy, "cut_rows": 2, "cut_tokens": sum(cut), "short_rows": 0, "short_tokens": 0,
    }  # fmt: skip
    assert job.summary["truncation"] == {
        "prompt_tokens_cut": sum(cut), "prompt_tokens_cut_rows": 2,
        "max_tokens_cut": 0, "max_tokens_cut_rows": 0,
    }  # fmt: skip


def test_shrinking_gives_the_output_what_is_left_and_records_it(
    job: Job, tokenizer: Any, capsys: Any
) -> None:
    text = "The lazy dog jumps over the fox again and again"
    length = len(tokenizer(text)["input_ids"])
    job.write([{"prompt": "The"}, {"prompt": text}, {"prompt": LONG}])
    common = (f"model.max_model_len={length + 5}", "sampling.max_tokens=15",
              "sampling.ignore_eos=true")  # fmt: skip
    assert job(*common) == 0
    assert "warning: 1 rows have less room" in capsys.readouterr().err
    plain = job.results()
    given = (*common, "prompt.truncation=shrink_max_tokens", "output.overwrite=true")
    assert job(*given) == 0
    assert "1 rows get fewer tokens" in capsys.readouterr().err
    assert job.results() == plain
    first, second, third = job.rows()
    assert (first["completion_tokens"], first["max_tokens_cut"]) == (15, 0)
    assert (second["completion_tokens"], second["max_tokens_cut"]) == (5, 10)
    assert second["finish_reason"] == "length"
    assert third["error_type"] == "prompt_too_long"
    assert third["prompt_tokens_cut"] is None


def test_a_change_of_the_policy_is_another_job(job: Job, capsys: Any) -> None:
    job.write(ROWS)
    assert job(LIMIT, "prompt.truncation=truncate_left") == 0
    (job.out / "_SUCCESS").unlink()
    assert job(LIMIT, "prompt.truncation=truncate_right") == 2
    assert "prompt.truncation" in capsys.readouterr().err
