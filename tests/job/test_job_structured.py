"""Constrained outputs through the whole command."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from tests.job.harness import Job

WORDS = ["The", "quick", "brown", "movie", "story", "acting", "fine", "end", "lazy", "dog"]
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}},
    "required": ["label", "sure"],
    "additionalProperties": False,
}


def rows(number: int = 24) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [{"prompt": " ".join(rng.choices(WORDS, k=rng.randrange(2, 9)))} for _ in range(number)]


def test_every_label_is_legal_and_most_labels_are_met(job: Job) -> None:
    job.write(rows(60))
    choices = ["yes", "no", "good", "goodness", "good story"]
    assert job(f"structured.choice={json.dumps(choices)}", "sampling.temperature=1.5") == 0
    labels = {row["generated_text"] for row in job.rows()}
    assert labels <= set(choices)
    assert len(labels) > 3
    assert {row["finish_reason"] for row in job.rows()} == {"stop"}


def test_the_label_is_the_likeliest_by_the_models_own_first_token(
    job: Job, tokenizer: Any, generate: Any
) -> None:
    job.write(rows())
    assert job('structured.choice=["yes","no","bad"]') == 0
    firsts = {token for token, id_ in tokenizer.get_vocab().items()
              for word in ("yes", "no", "bad") if word.startswith(token)}  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids(sorted(firsts))

    def only_firsts(_: int, tokens: Any) -> list[int]:
        return ids

    for row, given in zip(job.rows(), rows(), strict=True):
        prompt = tokenizer(given["prompt"])["input_ids"]
        (first,) = generate(prompt, 1, prefix_allowed_tokens_fn=only_firsts)
        assert row["generated_text"].startswith(tokenizer.decode([first]))
        assert row["output_token_ids"][0] == first


@pytest.mark.parametrize("options", [(), ("sampling.temperature=1", "sampling.n=3")])
def test_outputs_do_not_depend_on_pool_blocks_cache_or_batch(job: Job, options: Any) -> None:
    job.write(rows(12))
    (job.folder / "schema.json").write_text(json.dumps(SCHEMA))
    common = (f"structured.json_file={job.folder}/schema.json", "sampling.max_tokens=40", *options)
    assert job(*common) == 0
    first = job.results()
    for other in (
        ("pool.block_size=4", "pool.num_blocks=30", "pool.swap_blocks=0"),
        ("pool.prefix_caching=false", "engine.max_num_seqs=3", "engine.max_num_batched_tokens=11"),
        ("pool.num_blocks=8", "pool.block_size=8", "engine.admission=prompt"),
    ):
        assert job(*common, *other, "output.overwrite=true") == 0
        assert job.results() == first


def test_json_outputs_satisfy_the_schema_and_forced_tokens_took_no_step(job: Job) -> None:
    job.write(rows(40))
    schema = job.folder / "schema.json"
    schema.write_text(json.dumps(SCHEMA, indent=2))
    assert job(f"structured.json_file={schema}", "sampling.max_tokens=40") == 0
    for row in job.rows():
        assert row["finish_reason"] == "stop"
        validate(json.loads(row["generated_text"]), SCHEMA)
    summary = job.summary
    assert summary["forced_tokens"] > summary["completion_tokens"] / 2
    assert summary["forced_tokens"] < summary["generated_tokens"]


def test_an_output_cut_by_max_tokens_says_length(job: Job) -> None:
    job.write(rows(4))
    assert job('structured.regex="[a-z]{40}"', "sampling.max_tokens=3") == 0
    for row in job.rows():
        assert row["finish_reason"] == "length"
        assert re.fullmatch("[a-z]{3,39}", row["generated_text"])
        assert row["completion_tokens"] == 3


def test_a_rows_own_structure_wins_and_a_bad_one_fails_that_row_only(job: Job) -> None:
    own = [
        None,
        {"structured": {"choice": ["left", "right"]}},
        {"structured": {"regex": "[0-9]{2}"}},
        {"structured": {"json": SCHEMA}, "max_tokens": 40},
        {"structured": {"json": {"properties": {"b": {"const": 1}, "a": {"const": 2}},
                                 "required": ["b", "a"], "additionalProperties": False,
                                 "type": "object"}}, "max_tokens": 40},
        {"structured": {}},
        {"structured": {"regex": "(a"}},
        {"structured": {"choice": []}},
        {"structured": {"json": {"type": "integer", "minimum": 5, "maximum": 3}}},
    ]  # fmt: skip
    job.write(
        [
            row | {"sampling_params": each and json.dumps(each)}
            for row, each in zip(rows(len(own)), own, strict=True)
        ]
    )
    assert job('structured.choice=["yes","no"]') == 0
    found = job.rows()
    texts = [row["generated_text"] for row in found]
    assert texts[0] in ("yes", "no")
    assert texts[1] in ("left", "right")
    assert re.fullmatch("[0-9]{2}", texts[2])
    validate(json.loads(texts[3]), SCHEMA)
    assert texts[4] == '{"b": 1, "a": 2}'
    assert found[5]["completion_tokens"] == 8
    assert [row["error_type"] for row in found[6:]] == [
        "invalid_sampling_params",
        "invalid_sampling_params",
        "unsatisfiable_constraint",
    ]
    assert "unclosed group at character 1" in found[6]["error_message"]
    assert job.json("_plan.json")["row_errors"] == {
        "invalid_sampling_params": 2,
        "unsatisfiable_constraint": 1,
    }


def test_a_constraint_that_nothing_satisfies_fails_its_rows_before_the_run(job: Job) -> None:
    job.write(rows(3))
    assert job(r"structured.regex='[^\s\S]'") == 0
    assert {row["error_type"] for row in job.rows()} == {"unsatisfiable_constraint"}
    assert job.summary["steps"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["structured.regex=yes|(no"], ["structured.regex='yes|(no'", "character 5"]),
        (["structured.choice=[a,a]"], ["structured.choice", "'a' twice"]),
        (["structured.choice=[]"], ["structured.choice", "empty list"]),
        (["structured.choice=[a]", "structured.regex=b"], ["structured.choice and"]),
        (["structured.json_file={job}/none.json"], ["structured.json_file", "not a file"]),
        (["structured.json_file={job}/bad.json"], ["bad.json", "line 2 column 1"]),
        (["structured.json_file={job}/type.json"], ["/properties/a", "text"]),
        (["structured.choice=[a]", "sampling.ignore_eos=true"], ["ignore_eos"]),
    ],
)
def test_a_structure_that_makes_no_sense_ends_the_command_before_it_starts(
    job: Job, capsys: Any, arguments: list[str], says: list[str]
) -> None:
    job.write(rows(2))
    (job.folder / "bad.json").write_text('{"type":\n}')
    (job.folder / "type.json").write_text('{"properties": {"a": {"type": "text"}}}')
    assert job(*(each.format(job=job.folder) for each in arguments)) == 2
    said = capsys.readouterr()
    assert all(text in said.out + said.err for text in says), said
    assert not job.out.exists()


def test_a_model_without_a_tokenizer_cannot_be_constrained(
    job: Job, copied_model: Path, capsys: Any
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied_model / name).unlink()
    job.write([{"prompt_token_ids": [5, 6]}])
    assert job("structured.choice=[a]") == 2
    assert "model.tokenizer" in capsys.readouterr().err


def test_another_structure_is_another_job(job: Job, capsys: Any) -> None:
    job.write(rows(2))
    assert job('structured.choice=["yes","no"]') == 0
    assert job('structured.choice=["yes","no","bad"]') == 2
    assert "sampling" in capsys.readouterr().err
    assert job('structured.choice=["yes","no"]') == 0


def test_rows_that_differ_in_their_structure_are_no_duplicates(job: Job) -> None:
    own = [["left"], ["right"], ["left"]]
    job.write(
        [
            {"prompt": "same", "sampling_params": json.dumps({"structured": {"choice": each}})}
            for each in own
        ]
    )
    assert job() == 0
    assert [row["generated_text"] for row in job.rows()] == ["left", "right", "left"]
    assert job.summary["duplicates"] == 1
