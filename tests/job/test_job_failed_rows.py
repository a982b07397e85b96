"""Rows that fail before they run: no figure counts them, and a run says why they failed."""

from pathlib import Path
from typing import Any

import pytest

from tests.job.harness import Job
from tests.support import tiny_models

HEAD = [7] * 20
# With blocks of 16 tokens: two rows of 2 blocks, one of 3 and one of 7.
SIZES = (24, 25, 40, 96)


@pytest.fixture
def tight(job: Job) -> Job:
    ids = [HEAD + [9 + n] * (size - len(HEAD)) for n, size in enumerate(SIZES)]
    job.write([{"id": f"r{n}", "prompt_token_ids": each} for n, each in enumerate(ids)])
    job.given |= {"pool.block_size": "16", "sampling.max_tokens": "2"}
    return job


def page(job: Job) -> str:
    return (job.out / "_report.html").read_text("utf-8")


def test_only_rows_that_were_started_count_as_hits(
    tight: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tight("pool.num_blocks=2", "engine.max_num_seqs=1") == 0
    summary, said = tight.summary, capsys.readouterr().err
    assert summary["errors"] == {"exceeds_kv_capacity": 2}
    ok = [row for row in tight.rows() if row["status"] == "ok"]
    prompts = sum(row["prompt_tokens"] for row in ok)
    cached = sum(row["cached_tokens"] for row in ok)
    assert prompts == 49
    assert summary["prefill_tokens_computed"] == prompts - cached
    assert summary["hit_rate"] == pytest.approx(cached / prompts)
    assert summary["lost_tokens"] is None
    line = f"shared {cached} of the 49 prompt tokens ({cached / prompts:.1%}) of the requests that"
    assert line in said
    assert line[1:] in page(tight)
    assert "shareable" not in said
    # The floor is of all four.
    assert f"prefill: {prompts - cached} tokens computed\n" in said
    # Where all run, all count again.
    assert tight("pool.num_blocks=64", "output.overwrite=true") == 0
    summary, prompts = tight.summary, sum(SIZES)
    computed = summary["prefill_tokens_computed"]
    assert summary["hit_rate"] == pytest.approx(1 - computed / prompts)
    assert summary["lost_tokens"] is not None
    assert "; floor " in capsys.readouterr().err


def test_where_every_row_failed_nothing_was_shared(
    tight: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tight("pool.num_blocks=1") == 0
    summary, html = tight.summary, page(tight)
    assert (summary["ok"], summary["hit_rate"]) == (0, None)
    assert "shared " not in capsys.readouterr().err.split("done: ")[1]
    assert "This run began no request" in html
    assert "without any sharing" not in html
    assert '<span class="badge bad">done, 4 failed</span>' in html


def test_a_run_ends_with_why_rows_failed_the_blocks_for_all_and_what_to_do(
    tight: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tight("pool.num_blocks=2") == 0
    said = capsys.readouterr().err.split("done: ")[1].splitlines()
    assert said[0].endswith("2 ok, 2 failed")
    assert said[1].startswith("failed: 2 exceeds_kv_capacity, for example id r2: the prompt of 40")
    assert said[1].endswith("; pool.num_blocks=7 holds them all")
    assert f"{tight.out / '_errors'}, examples in {tight.out / '_report.html'}" in said[2]
    assert said[2].endswith("output.retry_errors=true runs them again")
    assert tight("pool.num_blocks=2") == 0
    assert "2 of them failed; output.retry_errors=true runs them again" in capsys.readouterr().err
    # One block less does not do for all, the number named does.
    assert tight("pool.num_blocks=6", "output.retry_errors=true") == 0
    assert tight.summary["errors"] == {"exceeds_kv_capacity": 1}
    assert tight("pool.num_blocks=7", "output.retry_errors=true") == 0
    assert tight.summary["errors"] == {}
    assert "failed:" not in capsys.readouterr().err.split("done: ")[-1]


def test_each_kind_of_error_has_its_line_with_a_message_of_bounded_length(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"id": n, "prompt": None, "sampling_params": None} for n in range(3)
    ]
    huge = '{"n": "many\\nlines' + "x" * 400 + '"}'
    rows += [{"id": 3, "prompt": "a", "sampling_params": huge}, {"id": 4, "prompt": "fine"}]
    job.write(rows)
    assert job() == 0
    said = capsys.readouterr().err.split("done: ")[1].splitlines()
    assert said[1].startswith("failed: 3 null_prompt, for example id 0: ")
    assert said[2].startswith("failed: 1 invalid_sampling_params, for example id 3: ")
    assert max(len(line) for line in said[1:3]) < 300
    assert said[3].startswith("the input rows that failed are in")


def test_a_plan_counts_the_rows_that_the_pool_cannot_hold(
    tight: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tight("mode=plan", "pool.num_blocks=2") == 0
    said = capsys.readouterr().out
    assert "errors: 2 exceeds_kv_capacity" in said
    assert tight.json("_plan.json")["row_errors"] == {"exceeds_kv_capacity": 2}
    assert "2 with errors" in (tight.out / "_plan.svg").read_text()
    assert tight("mode=plan", "pool.num_blocks=7") == 0
    assert "errors: none" in capsys.readouterr().out


@pytest.mark.parametrize("step_tokens", [16, 64])
def test_a_plan_refuses_what_a_run_does_where_every_layer_has_a_window(
    tight: Job, tmp_path: Path, step_tokens: int
) -> None:
    tight.given["model.path"] = str(tiny_models.save("mistral", tmp_path / "windowed"))
    keys = ("pool.num_blocks=4", f"engine.max_num_batched_tokens={step_tokens}")
    assert tight("mode=plan", *keys) == 0
    planned = tight.json("_plan.json")["row_errors"]
    # Steps of 64 tokens behind a window of 9 may touch 6 blocks, steps of 16 only 3.
    assert planned == ({"exceeds_kv_capacity": 1} if step_tokens == 64 else {})
    assert tight(*keys, "output.overwrite=true") == 0
    assert tight.summary["errors"] == planned


def test_several_samples_at_temperature_0_are_warned_of(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write([{"id": 1, "prompt": "a"}])
    assert job("sampling.n=3") == 0
    assert "the 3 samples of a row are all the same" in capsys.readouterr().err
    assert len({row["generated_text"] for row in job.rows()}) == 1
    assert job("sampling.n=3", "sampling.temperature=1", "output.overwrite=true") == 0
    assert job("output.overwrite=true") == 0
    assert "all the same" not in capsys.readouterr().err
