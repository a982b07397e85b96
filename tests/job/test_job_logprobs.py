"""Log-probabilities through the whole command, against transformers' own forward pass."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.data.output.logprobs import LOGPROBS_TYPE
from tests.job.harness import Job

SHARED = "A review of the movie: good acting, bad story, and a fine end. "
TEXTS = [SHARED + end for end in ("yes", "no", "The quick brown fox", "dog dog dog dog", "")]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def _rows(job: Job, *keys: dict[str, Any]) -> None:
    own = [json.dumps(each) if each else None for each in keys] or [None] * len(TEXTS)
    job.write(
        [
            {"prompt": text, "sampling_params": params}
            for text, params in zip(TEXTS, own, strict=True)
        ]
    )


def _check(model: Any, tokenizer: Any, row: dict[str, Any], output: Any, prompt: Any) -> None:
    """Hold a row's entries against logits of its whole text in one piece."""
    ids = tokenizer(TEXTS[row["row_index"]])["input_ids"]
    tokens = [*ids, *row["output_token_ids"]]
    with torch.inference_mode():
        exact = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    for name, first, end, k in (
        ("prompt_logprobs", 0, len(ids), prompt),
        ("logprobs", len(ids), len(tokens), output),
    ):
        entries = row[name]
        if k is None:
            assert entries is None
            continue
        assert len(entries) == end - first
        for at, entry in zip(range(first, end), entries, strict=True):
            if at == 0:
                assert entry is None
                continue
            _check_entry(entry, exact[at - 1], tokens[at], k)
    if output is not None:
        total = sum(exact[i - 1, tokens[i]].item() for i in range(len(ids), len(tokens)))
        assert math.isclose(row["cumulative_logprob"], total, abs_tol=1e-3)
    else:
        assert row["cumulative_logprob"] is None


def _check_entry(entry: list[dict[str, Any]], exact: torch.Tensor, token: int, k: int) -> None:
    assert entry[0]["token_id"] == token
    assert len({each["token_id"] for each in entry}) == len(entry)
    for each in entry:
        assert math.isclose(each["logprob"], exact[each["token_id"]].item(), abs_tol=1e-4)
        likelier = (exact > exact[each["token_id"]] + 1e-4).sum().item()
        as_likely = (exact > exact[each["token_id"]] - 1e-4).sum().item()
        assert likelier + 1 <= each["rank"] <= as_likely
    ranks = sorted(each["rank"] for each in entry)
    assert ranks[: k or 1] == (list(range(1, k + 1)) or [entry[0]["rank"]])
    assert len(entry) == k + (entry[0]["rank"] > k)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("pool.prefix_caching=false",),
        ("schedule.order=length", "engine.max_num_seqs=1"),
        ("engine.max_num_batched_tokens=7",),
        ("pool.block_size=4", "pool.num_blocks=20", "engine.admission=prompt"),
        ("pool.block_size=4", "pool.num_blocks=20", "engine.admission=prompt",
         "pool.swap_blocks=0"),
    ],
)  # fmt: skip
def test_d09_d10_entries_are_the_models_own_whatever_is_cached_cut_or_moved(
    job: Job, model: Any, tokenizer: Any, options: Any
) -> None:
    wanted = [(2, 3), (None, 1), (0, None), (5, 0), (None, None)]
    _rows(job, *({"logprobs": out, "prompt_logprobs": prompt} for out, prompt in wanted))
    assert job("sampling.max_tokens=12", *options) == 0
    for row, (output, prompt) in zip(job.rows(), wanted, strict=True):
        _check(model, tokenizer, row, output, prompt)
    if "pool.num_blocks=20" in options:
        assert job.summary["preemptions"] > 0


def test_samples_share_the_prompts_entries_and_each_has_its_own(
    job: Job, model: Any, tokenizer: Any
) -> None:
    _rows(job)
    common = ("sampling.temperature=1.5", "sampling.top_k=20", "sampling.repetition_penalty=1.4")
    logs = ("sampling.logprobs=2", "sampling.prompt_logprobs=1", "sampling.n=3")
    assert job(*common, "sampling.n=3") == 0
    plain = job.results()
    assert job(*common, *logs, "output.overwrite=true") == 0
    assert job.results() == plain
    rows = job.rows()
    assert len(rows) == 3 * len(TEXTS)
    for row in rows:
        _check(model, tokenizer, row, 2, 1)
    # The prompt is computed for one of the three only, and the plan has said so.
    plan, summary = job.json("_plan.json"), job.summary
    lengths = [len(tokenizer(text)["input_ids"]) for text in TEXTS]
    assert plan["prefill_tokens_floor"] == plan["expected_prefill_tokens"]
    assert sum(lengths) + 2 * len(TEXTS) <= plan["expected_prefill_tokens"]
    # Rows that start together compute a few tokens twice rather than wait.
    assert 0 <= summary["prefill_tokens_computed"] - plan["expected_prefill_tokens"] < 15


def test_prompts_that_are_logged_are_computed_whole_and_the_plan_says_so(
    job: Job, tokenizer: Any
) -> None:
    _rows(job)
    assert job("sampling.prompt_logprobs=0") == 0
    whole = sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    assert job.json("_plan.json")["expected_prefill_tokens"] == whole
    assert job.summary["prefill_tokens_computed"] == whole
    assert {row["cached_tokens"] for row in job.rows()} == {0}


def test_structured_outputs_are_the_same_with_entries_for_forced_tokens_too(
    job: Job, model: Any, tokenizer: Any
) -> None:
    _rows(job)
    schema = {"type": "object", "properties": {"label": {"enum": ["good", "bad"]}},
              "required": ["label"], "additionalProperties": False}  # fmt: skip
    (job.folder / "schema.json").write_text(json.dumps(schema))
    common = (f"structured.json_file={job.folder}/schema.json", "sampling.max_tokens=40")
    assert job(*common) == 0
    plain = job.results()
    assert job.summary["forced_tokens"] > 0
    assert job(*common, "sampling.logprobs=1", "output.overwrite=true") == 0
    assert job.results() == plain
    for row in job.rows():
        assert row["finish_reason"] == "stop"
        _check(model, tokenizer, row, 1, None)


def test_the_columns_have_one_type_and_are_null_where_nothing_is_asked_for(job: Job) -> None:
    _rows(job)
    assert job() == 0
    for part in job.parts:
        schema = pq.read_schema(part)
        assert schema.field("logprobs").type == LOGPROBS_TYPE
        assert schema.field("prompt_logprobs").type == LOGPROBS_TYPE
    assert {(row["logprobs"], row["prompt_logprobs"]) for row in job.rows()} == {(None, None)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sampling.logprobs=-1",), "sampling.logprobs=-1 must lie between 0 and 100"),
        (("sampling.prompt_logprobs=101",), "sampling.prompt_logprobs=101 must lie"),
        (("sampling.logprobs=1", 'sampling.score_choices=["a","b"]'), "score_choices generates"),
    ],
)
def test_what_cannot_be_is_refused(job: Job, arguments: Any, message: str, capsys: Any) -> None:
    _rows(job)
    assert job(*arguments) == 2
    assert message in capsys.readouterr().err
