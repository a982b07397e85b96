"""Scored choices through the whole command, against transformers."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.job.harness import Job

WORDS = ["The", "quick", "brown", "movie", "story", "acting", "fine", "end", "lazy", "dog"]
CHOICES = ["yes", "good", "goodness", "good story", "bad"]
KEY = f"sampling.score_choices={json.dumps(CHOICES)}"


def rows(number: int = 20) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [{"text": " ".join(rng.choices(WORDS, k=rng.randrange(2, 9)))} for _ in range(number)]


@pytest.fixture
def scoring(job: Job) -> Job:
    job.write(rows())
    job.given |= {
        "prompt.template": '"Say: {{ text }} is"',
        "prompt.format": "plain",
        "sampling.score_choices": json.dumps(CHOICES),
    }
    return job


@pytest.fixture(scope="session")
def reference(model_dir: Path, tokenizer: Any) -> Any:
    """Log-probabilities of the choices after a text, by one forward pass for each choice."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def continuing(prompt: list[int], tokens: list[int]) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0].double().log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        return sum(float(logits[at, token]) for at, token in zip(places, tokens, strict=True))

    def score(text: str) -> list[float]:
        prompt = tokenizer(text)["input_ids"]
        spelled = [tokenizer(choice)["input_ids"] for choice in CHOICES]
        found = []
        for tokens in spelled:
            longer = {each[len(tokens)] for each in spelled
                      if len(each) > len(tokens) and each[: len(tokens)] == tokens}  # fmt: skip
            value = continuing(prompt, tokens)
            going_on = sum(np.exp(continuing(prompt, [*tokens, each]) - value) for each in longer)
            found.append(value + np.log1p(-going_on))
        return found

    return score


def softmax(values: Any) -> np.ndarray:
    weights = np.exp(np.asarray(values) - np.max(values))
    return weights / weights.sum()


def test_scores_are_transformers_own_and_the_label_is_the_likeliest(
    scoring: Job, reference: Any
) -> None:
    assert scoring() == 0
    for row, given in zip(scoring.rows(), rows(), strict=True):
        expected = reference(f"Say: {given['text']} is")
        assert [choice for choice, _ in row["label_logprobs"]] == CHOICES
        assert [value for _, value in row["label_logprobs"]] == pytest.approx(expected, abs=1e-4)
        scores = [value for _, value in row["label_scores"]]
        assert scores == pytest.approx(softmax(expected), abs=1e-4)
        assert row["label"] == CHOICES[int(np.argmax(expected))]
        assert row["label_score"] == max(scores)
        assert (row["generated_text"], row["output_token_ids"]) == (None, [])
        assert (row["finish_reason"], row["completion_tokens"]) == ("stop", 0)
        assert row["hit_blocks"] + row["new_blocks"] == row["freed_blocks"]
    plan, summary = scoring.json("_plan.json"), scoring.summary
    assert summary["generated_tokens"] == 0
    assert summary["steps"] <= 3
    assert plan["requests"] > len(rows()) - summary["duplicates"]


def test_scores_do_not_depend_on_pool_blocks_cache_or_batch(scoring: Job) -> None:
    def labels() -> list[Any]:
        return [(row["label"], row["label_logprobs"]) for row in scoring.rows()]

    assert scoring() == 0
    first = labels()
    for other in (
        ("pool.block_size=4", "pool.num_blocks=20", "pool.swap_blocks=0"),
        ("pool.prefix_caching=false", "engine.max_num_seqs=3", "engine.max_num_batched_tokens=11"),
        ("schedule.order=length", "output.order=input"),
    ):
        assert scoring(*other, "output.overwrite=true") == 0
        for (label, values), (label_before, before) in zip(labels(), first, strict=True):
            assert label == label_before
            assert [v for _, v in values] == pytest.approx([v for _, v in before], abs=1e-4)


def test_a_prior_parts_the_labels_and_leaves_the_models_own_scores(scoring: Job) -> None:
    assert scoring() == 0
    raw = [row["label_logprobs"] for row in scoring.rows()]
    choices = '["yes","bad"]'
    assert scoring(f"sampling.score_choices={choices}", "output.overwrite=true",
                   "sampling.score_calibration=prior", "output.rows_per_part=6") == 0  # fmt: skip
    found = scoring.rows()
    counts = Counter(row["label"] for row in found)
    assert abs(counts["yes"] - counts["bad"]) <= 2
    for row, before in zip(found, raw, strict=True):
        own = dict(row["label_logprobs"])
        assert own == pytest.approx({key: dict(before)[key] for key in own}, abs=1e-4)
    figures = scoring.summary["score_calibration"]
    assert figures["kind"] == "prior"
    assert figures["shares"]["yes"] == pytest.approx(counts["yes"] / len(found))
    # As large a share as was asked for, and nothing to do the second time.
    assert scoring(f"sampling.score_choices={choices}", "sampling.score_calibration=prior",
                   "sampling.score_prior=[0.9,0.1]", "output.overwrite=true") == 0  # fmt: skip
    assert 16 <= Counter(row["label"] for row in scoring.rows())["yes"] <= 19
    before = scoring.parts
    assert scoring(f"sampling.score_choices={choices}", "sampling.score_calibration=prior",
                   "sampling.score_prior=[0.9,0.1]") == 0  # fmt: skip
    assert scoring.parts == before


def test_prompts_without_content_make_the_choices_equal(scoring: Job, reference: Any) -> None:
    # Blocks that the prompts fill, so that the plan is asked when they are to be needed again.
    assert scoring("sampling.score_calibration=content_free", "pool.block_size=4") == 0
    empty = [softmax(reference(f"Say: {text} is")) for text in ("N/A", "", "[MASK]")]
    offsets = -np.log(np.mean(empty, axis=0))
    for row in scoring.rows():
        own = np.array([value for _, value in row["label_logprobs"]])
        expected = softmax(own + offsets)
        assert [value for _, value in row["label_scores"]] == pytest.approx(expected, abs=1e-4)
        assert row["label"] == CHOICES[int(expected.argmax())]


def test_failed_rows_and_rows_with_choices_of_their_own_keep_out_of_the_calibration(
    job: Job,
) -> None:
    own = [None, {"score_choices": ["fine", "end"]}, {"score_choices": ["one"]}, {"n": 2}]
    job.write(
        [
            {"prompt": text["text"], "sampling_params": each and json.dumps(each)}
            for text, each in zip(rows(12), own * 3, strict=True)
        ]
    )
    assert job('sampling.score_choices=["yes","bad"]', "sampling.score_calibration=prior") == 0
    found = job.rows()
    assert {row["label"] for row in found[::4]} == {"yes", "bad"}
    for row in found[1::4]:
        raw = dict(row["label_logprobs"])
        assert set(raw) == {"fine", "end"}
        assert [v for _, v in row["label_scores"]] == pytest.approx(softmax(list(raw.values())))
    for row in found[2::4] + found[3::4]:
        assert row["error_type"] == "invalid_sampling_params"
        assert row["label"] is row["label_scores"] is row["label_logprobs"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (['sampling.score_choices=["yes"]'], "two or more"),
        ([KEY, "sampling.temperature=1"], "temperature"),
        ([KEY, 'structured.choice=["a"]'], "structured"),
        ([KEY, "sampling.n=2"], "one result a row"),
        (["sampling.score_calibration=prior"], "needs sampling.score_choices"),
        ([KEY, "sampling.score_prior=[0.5,0.5]"], "needs sampling.score_calibration=prior"),
        ([KEY, "sampling.score_calibration=prior", "sampling.score_prior=[0.5,0.5]"], "each of"),
        ([KEY, "sampling.score_calibration=content_free"], "needs prompt.template"),
        (['sampling.score_choices=["a","<|im_end|>"]'], "frames the model's text"),
    ],
)
def test_scoring_that_makes_no_sense_is_refused_before_it_starts(
    job: Job, capsys: Any, arguments: list[str], says: str
) -> None:
    job.write([{"prompt": row["text"]} for row in rows(3)])
    assert job(*arguments) == 2
    assert says in capsys.readouterr().err
    assert not job.out.exists()
