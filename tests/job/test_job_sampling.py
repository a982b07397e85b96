"""What shapes and ends outputs, through the whole command, against transformers' generate."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job.harness import Job

PROMPTS = [
    "The quick brown fox",
    "A review of the movie",
    "The answer is",
    "good acting, bad story",
    "user asks",
]
ROWS = [{"prompt": prompt} for prompt in PROMPTS]


def _texts(job: Job) -> list[list[int]]:
    return [row["output_token_ids"] for row in job.rows()]


def test_bad_words_give_what_transformers_gives_and_stay_out_of_the_text(
    job: Job, tokenizer: Any, generate: Any
) -> None:
    job.write(ROWS)
    assert job("sampling.max_tokens=24") == 0
    # Words that the model would say: pieces of its own outputs.
    said = [tokenizer.decode(ids[3:5]).strip() for ids in _texts(job)]
    words = sorted({word for word in said if len(word) > 1 and "\ufffd" not in word})
    assert words
    given = f"sampling.bad_words={json.dumps(words)}"
    assert job("sampling.max_tokens=24", given, "output.overwrite=true") == 0
    banned = []
    for word in words:
        banned += [tokenizer(text)["input_ids"] for text in (word, " " + word)]
    for row, prompt in zip(job.rows(), PROMPTS, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        # Only generated tokens count here, transformers looks at the prompt too.
        assert row["output_token_ids"] == generate(ids, 24, bad_words_ids=banned)


def test_a_bias_gives_what_transformers_gives_and_a_row_may_have_its_own(
    job: Job, tokenizer: Any, generate: Any
) -> None:
    free = [generate(tokenizer(prompt)["input_ids"], 1)[0] for prompt in PROMPTS]
    bias = {free[0]: -100.0, 7: 1.5, 11: 0.25}
    own = {free[1]: -100.0, 9: 2.0}
    rows = [row | {"sampling_params": None} for row in ROWS]
    rows[1]["sampling_params"] = json.dumps({"logit_bias": {str(k): v for k, v in own.items()}})
    job.write(rows)
    text = ",".join(f"{token}: {number}" for token, number in bias.items())
    assert job(f"sampling.logit_bias={{{text}}}") == 0
    for number, prompt in enumerate(PROMPTS):
        wanted = own if number == 1 else bias
        pairs = {(token,): value for token, value in wanted.items()}
        ids = tokenizer(prompt)["input_ids"]
        assert _texts(job)[number] == generate(ids, sequence_bias=pairs)
    assert _texts(job)[0][0] != free[0]


def test_a_row_whose_bias_or_words_make_no_sense_fails_alone(job: Job) -> None:
    own = [None, {"logit_bias": {"100000": 1}}, {"logit_bias": [1]}, {"logit_bias": {"3": 101}},
           {"bad_words": [""]}, {"stop_on_repetition": 2}]  # fmt: skip
    job.write([{"prompt": "The fox", "sampling_params": each and json.dumps(each)} for each in own])
    assert job() == 0
    found = job.rows()
    assert [row["status"] for row in found] == ["ok", *["error"] * 5]
    assert {row["error_type"] for row in found[1:]} == {"invalid_sampling_params"}
    for row, text in zip(
        found[1:], ("100000", "[1]", "101", "empty string", "at least 3"), strict=True
    ):
        assert text in row["error_message"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sampling.logit_bias={100000: 1}", "sampling.logit_bias names token 100000"),
        ('sampling.bad_words=[" "]', "sampling.bad_words: no tokens"),
        ("sampling.stop_on_repetition=1", "sampling.stop_on_repetition=1 must be at least 3"),
    ],
)
def test_what_makes_no_sense_for_the_job_is_refused_before_it_starts(
    job: Job, argument: str, message: str, capsys: Any
) -> None:
    job.write(ROWS)
    assert job(argument) == 2
    assert message in capsys.readouterr().err
    assert not job.parts


def test_repetition_ends_rows_with_its_reason_and_the_summary_counts_them(job: Job) -> None:
    job.write(ROWS)
    assert job("sampling.max_tokens=120", "sampling.ignore_eos=true") == 0
    whole = _texts(job)
    count = 12
    assert job(
        "sampling.max_tokens=120", "sampling.ignore_eos=true", "output.overwrite=true",
        f"sampling.stop_on_repetition={count}",
    ) == 0  # fmt: skip
    ended = 0
    for row, tokens in zip(job.rows(), whole, strict=True):
        ends = [
            end
            for end in range(count, len(tokens) + 1)
            for period in range(1, count // 3 + 1)
            if tokens[end - count + period : end] == tokens[end - count : end - period]
        ]
        assert row["output_token_ids"] == tokens[: min(ends, default=len(tokens))]
        assert row["finish_reason"] == ("repetition" if ends else "length")
        ended += bool(ends)
    assert ended
    assert job.summary["finish_reasons"].get("repetition") == ended


def test_stops_of_a_file_hold_for_every_sample_of_a_row(job: Job, tmp_path: Path) -> None:
    job.write(ROWS)
    stops = tmp_path / "stops.yaml"
    stops.write_text('- "e"\n- "o"\n')
    common = ("sampling.n=3", "sampling.temperature=1", "sampling.max_tokens=30")
    assert job(*common, f"sampling.stop_file={stops}") == 0
    found = job.rows()
    assert len(found) == 3 * len(ROWS)
    assert not any("e" in row["generated_text"] or "o" in row["generated_text"] for row in found)
    assert {row["stop_reason"] for row in found if row["finish_reason"] == "stop"} >= {"e", "o"}
