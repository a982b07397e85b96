"""``from batchgen import Engine``: the command's engine, with Python objects in and out."""

import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen import Engine, FailedPromptsError, SamplingParams
from batchgen.errors import EngineError, RowErrorType, UsageError
from batchgen.sampling import Structure
from tests.job.harness import Job
from tests.support import tiny_tokenizers
from tests.support.invariants import check_invariants

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


def test_n01_chats_take_the_way_of_a_job_to_any_chat_template(
    model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizers.make()
    tokenizer.chat_template = (
        "{{ tools | tojson }}{{ mood }}{% for m in messages %}{{ m.role }}:"
        "{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    user, begun = ({"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It is"})
    tools = [{"type": "function", "function": {"name": "weather"}}]
    with Engine(model_dir, num_blocks=64, tokenizer=str(tmp_path)) as engine:
        (plain,) = engine.generate([[user]], {"max_tokens": 2})
        named = {"chat_template_kwargs": {"mood": "calm"}, "tools": tools}
        (more,) = engine.generate(
            [[user, begun]], {"max_tokens": 2}, continue_final_message=True, **named
        )
        with pytest.warns(UserWarning, match="in 1 rows the last message is the assistant's"):
            engine.generate([[user, begun]], {"max_tokens": 2})
        with pytest.raises(UsageError, match=r"chat_template_kwargs\.mod: .*did you mean mood"):
            engine.generate([[user]], chat_template_kwargs={"mod": 1})
    texts = ["nulluser:Who?;", f"{json.dumps(tools)}calmuser:Who?;assistant:It is"]
    assert [each.samples[0].prompt_tokens for each in (plain, more)] == [
        len(tokenizer(text)["input_ids"]) for text in texts
    ]


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
    assert sum(scored["label_scores"].values()) == pytest.approx(1)
    assert scored["label_scores"][scored["label"]] == scored["label_score"]


def test_t17_each_prompt_has_parameters_of_its_own(
    engine: Engine, tokenizer: Any, generate: Callable[..., list[int]]
) -> None:
    each = [{"max_tokens": 3}, SamplingParams(max_tokens=5, logit_bias=((7, -1.0),)), None]
    outputs = engine.generate(TEXTS, each)
    assert [output["completion_tokens"] for output in outputs] == [3, 5, 256]
    for text, output, length in zip(TEXTS, outputs, (3, 5, 256), strict=True):
        expected = generate(tokenizer(text)["input_ids"], max_new_tokens=length)
        assert (output.token_ids or [])[:3] == expected[:3]
    # One that makes no sense is its prompt's own error, as in a row of a job.
    bad, good = engine.generate(TEXTS[:2], [{"max_tokns": 3}, {"max_tokens": 2}])
    assert bad.error is not None
    assert bad.error.type is RowErrorType.INVALID_SAMPLING_PARAMS
    assert "max_tokns (did you mean max_tokens" in bad.error.message
    assert good["completion_tokens"] == 2
    structured = SamplingParams(structured=Structure(json='{"const": 5}'))
    assert engine.generate(["a"], [structured])[0].text == "5"


@pytest.mark.parametrize("kind", [TEXTS[0], [5, 6], [{"role": "user", "content": "a"}]])
def test_t17_none_among_prompts_is_the_error_of_a_null_row(engine: Engine, kind: Any) -> None:
    first, none = engine.generate([kind, None], {"max_tokens": 2})
    assert first.error is None
    assert none.error is not None
    assert none.error.type is RowErrorType.NULL_PROMPT
    (alone,) = engine.generate([None])
    assert alone["error_type"] == "null_prompt"


def test_t17_answers_have_the_names_shapes_and_types_of_a_jobs_rows(
    engine: Engine, job: Job
) -> None:
    params = {"max_tokens": 4, "logprobs": 1, "prompt_logprobs": 0}
    answers = engine.generate([*TEXTS, ""], params)
    job.write([{"prompt": text} for text in (*TEXTS, "")])
    given = [f"sampling.{name}={value}" for name, value in params.items()]
    assert job(*given) == 0
    parts = pq.read_table(job.out).sort_by("row_index")
    table = answers.to_arrow()
    # A job's ids are made of the file's name.
    assert table.schema.remove(0).equals(parts.schema.remove(0))
    per_run = ("id", "queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
    measured = [each.name for each in table.schema if "blocks" in each.name]
    same = [each for each in table.column_names if each not in (*per_run, *measured)]
    same.remove("cached_tokens")
    assert table.select(same).to_pylist() == parts.select(same).to_pylist()
    first = answers[0]
    assert dict(first) == first.samples[0]
    assert first["generated_text"] == first.text == first.samples[0].generated_text
    (token, *_), *_ = first["logprobs"]
    assert set(token) == {"token_id", "logprob", "rank"}
    assert first["prompt_logprobs"][0] is None
    assert first.to_arrow().num_rows == 1
    assert pa.Table.from_pylist([dict(each) for each in answers]).num_rows == 4
    with pytest.raises(KeyError):
        _ = first["text"]
    with pytest.raises(AttributeError, match="no column generated_txt"):
        _ = first.samples[0].generated_txt


def test_t17_an_engine_counts_and_is_closed_at_the_end_of_a_block(model_dir: Path) -> None:
    with Engine(model_dir, num_blocks=64, swap_blocks=0) as engine:
        engine.generate(TEXTS, {"max_tokens": 4})
        assert engine.stats["generated_tokens"] == 12
        assert engine.stats["steps"] >= 4
        engine.generate(TEXTS, {"max_tokens": 4})
        assert engine.stats["generated_tokens"] == 24
        assert engine.stats["ttft_ms"]["p50"] > 0
    engine.close()
    for use in (lambda: engine.generate(["a"]), lambda: engine.stats):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_t28_a_random_sample_is_decided_by_the_prompts_id(engine: Engine, job: Job) -> None:
    params = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
    ids = ["x", "y", "z"]
    named = engine.generate(TEXTS, params, ids=ids)
    assert [output["id"] for output in named] == ids
    turned = engine.generate(TEXTS[::-1], params, ids=ids[::-1])
    assert [each.token_ids for each in turned] == [each.token_ids for each in named][::-1]
    job.write([{"id": each, "prompt": text} for each, text in zip(ids, TEXTS, strict=True)])
    given = [f"sampling.{name}={value}" for name, value in params.items()]
    assert job(*given) == 0
    assert [row["output_token_ids"] for row in job.rows()] == [each.token_ids for each in named]
    # By default the place in the list is the id.
    places = engine.generate(TEXTS, params)
    numbered = engine.generate(TEXTS, params, ids=[0, 1, 2])
    assert [each.token_ids for each in places] == [each.token_ids for each in numbered]
    for wrong, message in (
        (["x", "x", "y"], "'x' is there twice"),
        (["x"], "ids must be as many"),
        (["x", 1, "y"], r"ids\[1\] cannot be used"),
        ([1.5, 2, 3], r"ids\[0\] cannot be used"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.generate(TEXTS, ids=wrong)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize(
    "place",
    [
        "engine.scheduler.Scheduler.schedule",
        "engine.block_pool.BlockPool.allocate",
        "engine.stopping.StopRules.check",
        "job.stream.RequestStream.results",
        "job.stream.RequestStream._request",
        "runtime.executor.ModelExecutor.execute",
        "runtime.detokenize.StopStringMatcher.push",
    ],
)
def test_t24_after_a_call_that_was_broken_off_the_next_one_works(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str, error: type[BaseException]
) -> None:
    params = {"max_tokens": 6, "stop": ["\x00"]}
    expected = [each.token_ids for each in engine.generate(TEXTS, params)]
    module, kind, name = f"batchgen.{place}".rsplit(".", 2)
    owner = getattr(importlib.import_module(module), kind)
    real, calls = getattr(owner, name), itertools.count()

    def broken(*given: Any, **named: Any) -> Any:
        if next(calls) == 1:
            raise error("broken off")
        return real(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        with pytest.raises((error, EngineError)):
            engine.generate(TEXTS, params)
    scheduler = engine._open.engine.scheduler
    check_invariants(scheduler)
    assert scheduler.num_unfinished == scheduler.blocks.pool.num_owned == 0
    assert [each.token_ids for each in engine.generate(TEXTS, params)] == expected


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
        (["a"], {"temprature": 1}, r"parameter temprature \(did you mean temperature"),
        (["a"], "greedy", "must be a mapping, a SamplingParams or a list of them, not str"),
        (["a", "b"], [{}], "sampling must be as many as the prompts: 1 for 2"),
        (["a"], [7], r"sampling\[0\] cannot be used: 7 is neither a mapping nor"),
        (["a"], [{"stop": {"a"}}], r"sampling\[0\] cannot be used"),
        (["a", "\ud800"], None, r"prompts\[1\] cannot be used: .*surrogates not allowed"),
        ([[1], [2**70]], None, r"prompts\[1\] cannot be used"),
        ([[1], [1.5]], None, r"prompts\[1\] cannot be used"),
        ([[{"role": "user", "content": b"x"}]], None, r"prompts\[0\] cannot be used"),
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
