"""``from batchgen import Engine``: the command's engine, with Python objects in and out."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchgen
from batchgen import Engine, FailedPromptsError, SamplingParams
from batchgen.errors import RowErrorType, UsageError
from tests.job.harness import Job

TEXTS = [
    "The quick brown fox",
    "The quick brown dog jumps over the lazy fox",
    "something else entirely",
]


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    return Engine(model_dir, num_blocks=512, swap_blocks=0)


def test_importing_the_package_starts_nothing() -> None:
    code = (
        "import sys, batchgen; from batchgen import SamplingParams; "
        "heavy = {'torch', 'transformers', 'pyarrow', 'numpy', 'hydra'} & set(sys.modules); "
        "print(heavy, sorted(set(batchgen.__all__) - set(dir(batchgen))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("set() ")
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = batchgen.Motor


def test_texts_are_answered_as_transformers_and_the_command_answer_them(
    engine: Engine, tokenizer: Any, generate: Callable[..., list[int]], job: Job
) -> None:
    outputs = engine.generate(TEXTS, {"max_tokens": 8})
    job.write([{"prompt": text} for text in TEXTS])
    assert job() == 0
    for text, output, row in zip(TEXTS, outputs, job.rows(), strict=True):
        expected = generate(tokenizer(text)["input_ids"])
        assert output.token_ids == expected == row["output_token_ids"]
        assert output.text == row["generated_text"]
        assert output.finish_reason == row["finish_reason"]
        assert output.error is None


def test_chats_and_token_ids_are_prompts_too(engine: Engine, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "Name a fox."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    params = SamplingParams(max_tokens=6)
    (from_chat,) = engine.generate([chat], params)
    (from_ids,) = engine.generate([ids], params)
    assert from_chat.token_ids == from_ids.token_ids
    assert from_chat.samples[0].prompt_tokens == len(ids)


def test_outputs_stand_in_the_order_of_the_prompts_each_with_all_its_samples(
    engine: Engine,
) -> None:
    params = {"max_tokens": 5, "n": 3, "temperature": 1.0, "seed": 7}
    outputs = engine.generate(TEXTS[::-1] + TEXTS, params)
    assert len(outputs) == 6
    assert all([row.sample_index for row in each.samples] == [0, 1, 2] for each in outputs)
    assert [each.samples[0].row_index for each in outputs] == list(range(6))
    again = engine.generate(TEXTS[::-1] + TEXTS, params)
    assert [[row.output_token_ids for row in each.samples] for each in outputs] == [
        [row.output_token_ids for row in each.samples] for each in again
    ]


def test_a_prompt_that_fails_is_an_error_of_its_own_and_an_exception_only_where_asked(
    engine: Engine,
) -> None:
    prompts = [TEXTS[0], "", TEXTS[1] * 200]
    good, empty, long = engine.generate(prompts, {"max_tokens": 4})
    assert good.token_ids is not None
    assert empty.error is not None
    assert empty.error.type is RowErrorType.EMPTY_PROMPT
    assert (empty.text, empty.token_ids, empty.blocks) == (None, None, None)
    assert empty.finish_reason == "error"
    assert long.error is not None
    assert long.error.type is RowErrorType.PROMPT_TOO_LONG
    with pytest.raises(FailedPromptsError, match=r"2 of 3 .*number 1: empty_prompt") as caught:
        engine.generate(prompts, {"max_tokens": 4}, raise_errors=True)
    assert caught.value.outputs[0].token_ids == good.token_ids


def test_the_cache_outlives_a_call_and_every_account_closes(model_dir: Path) -> None:
    engine = Engine(str(model_dir), num_blocks=64, block_size=4, swap_blocks=0)
    prompts = [f"{TEXTS[1]} {n}" for n in range(4)]
    first = engine.generate(prompts, {"max_tokens": 4})
    second = engine.generate(prompts, {"max_tokens": 4})
    assert [each.token_ids for each in first] == [each.token_ids for each in second]
    for output in second:
        account = output.blocks
        assert account is not None
        assert account.hit_blocks > 0
        assert account.cached_tokens == (output.samples[0].prompt_tokens or 0) - 1
        assert account.hit_blocks + account.new_blocks == account.freed_blocks


def test_structured_and_scored_outputs_work_as_in_the_command(engine: Engine) -> None:
    choices = [" yes", " no"]
    (chosen,) = engine.generate(TEXTS[:1], {"structured": {"choice": choices}})
    assert chosen.text in choices
    (scored,) = engine.generate(TEXTS[:1], {"score_choices": choices})
    assert scored.samples[0].label in choices
    assert sum(score for _, score in scored.samples[0].label_scores or ()) == pytest.approx(1)


def test_no_prompts_no_outputs(engine: Engine) -> None:
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_block": 5}, "no option num_block; did you mean num_blocks"),
        ({"nonsense": 5}, "no option nonsense; known: revision"),
        ({"num_blocks": "5"}, "num_blocks='5' must be an integer, or null"),
        ({"num_blocks": True}, "num_blocks=True must be an integer"),
        ({"num_blocks": 0}, "num_blocks=0 must be at least 1"),
        ({"attention": "fast"}, "attention='fast' must be one of auto"),
        ({"dtype": "float8"}, "model.dtype=float8 must be one of"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(
    model_dir: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Engine(model_dir, **options)


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ("one text", None, "must be a list of prompts, not str"),
        (["a", [1, 2]], None, "must all be texts, all lists of messages"),
        ([{"role": "user", "content": "a"}], None, "must all be texts"),
        ([1, 2, 3], None, "must all be texts"),
        (["a"], {"temprature": 1}, "unknown sampling parameter temprature"),
        (["a"], {"temperature": -1}, "temperature=-1"),
        (["a"], SamplingParams(top_p=7), "top_p=7"),
        (["a"], {"structured": {"regex": "("}}, "structured.regex"),
    ],
)
def test_prompts_and_parameters_that_make_no_sense_are_refused(
    engine: Engine, prompts: Any, sampling: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        engine.generate(prompts, sampling)
