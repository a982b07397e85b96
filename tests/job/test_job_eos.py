"""Which tokens end a row, wherever the model's files name them."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen import Engine
from tests.job.harness import Job
from tests.support import tiny_models


@pytest.fixture
def ended_by_the_tokenizer(copied_model: Path, tokenizer: Any) -> int:
    """The model says <|im_end|> again and again, and only the tokenizer calls that an end."""
    for name in ("config.json", "generation_config.json"):
        path = copied_model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 0}))
    return int(tokenizer.convert_tokens_to_ids("<|im_end|>"))


def test_n05_a_row_ends_at_the_tokenizers_end_of_sequence_in_a_job_and_from_python(
    job: Job, ended_by_the_tokenizer: int
) -> None:
    end = ended_by_the_tokenizer
    job.write([{"prompt": "The quick brown fox"}])
    assert job(f"sampling.logit_bias={{{end}: 100}}") == 0
    (row,) = job.rows()
    assert (row["output_token_ids"], row["finish_reason"]) == ([end], "stop")
    assert row["generated_text"] == ""
    with_python = Engine(job.given["model.path"], num_blocks=64, swap_blocks=0)
    (answer,) = with_python.generate(
        ["The quick brown fox"], {"logit_bias": {end: 100}, "max_tokens": 8}
    )
    assert (answer.token_ids, answer.finish_reason) == ([end], "stop")


def test_n05_min_tokens_and_ignore_eos_see_the_same_end(
    job: Job, ended_by_the_tokenizer: int
) -> None:
    end = ended_by_the_tokenizer
    job.write([{"prompt": "a", "sampling_params": text} for text in (
        '{"min_tokens": 3}', '{"ignore_eos": true}', '{"structured": {"regex": "a?"}}',
    )])  # fmt: skip
    assert job(f"sampling.logit_bias={{{end}: 100}}") == 0
    held, ignored, constrained = (row["output_token_ids"] for row in job.rows())
    assert end not in held[:3]
    assert held[3:] == [end]
    assert ignored == [end] * 8
    assert constrained == [end]


def test_n05_a_template_that_ends_turns_with_another_special_token_is_warned_about(
    job: Job, copied_model: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    path = copied_model / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_start|>"))
    other = tokenizer.convert_tokens_to_ids("<|im_start|>")
    job.write([{"messages": [{"role": "user", "content": "a"}]}])
    assert job("mode=plan") == 0
    assert f"set sampling.stop_token_ids=[{other}]" in capfd.readouterr().err
    assert job("mode=plan", f"sampling.stop_token_ids=[{other}]") == 0
    assert "chat template ends" not in capfd.readouterr().err


def test_n21_a_row_goes_on_behind_an_id_that_the_tokenizer_does_not_know(
    job: Job, tmp_path: Path, tokenizer: Any
) -> None:
    config = tiny_models.FAMILIES["llama"]()
    config.vocab_size, config.eos_token_id = len(tokenizer) + 60, tokenizer.eos_token_id
    tiny_models.build(config).save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    unknown = len(tokenizer) + 7
    job.write([{"prompt": "The quick brown fox"}])
    keys = (
        f"model.path={tmp_path / 'wide'}", "sampling.stop=[zzz]", "sampling.logprobs=2",
        f"sampling.logit_bias={{{unknown}: 100}}", "sampling.max_tokens=3",
    )  # fmt: skip
    assert job(*keys) == 0
    (row,) = job.rows()
    assert row["output_token_ids"] == [unknown] * 3
    assert (row["generated_text"], row["finish_reason"]) == ("", "length")
