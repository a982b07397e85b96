from pathlib import Path

import pytest
import yaml

from batchgen.cli.settle import settle
from batchgen.config import Attention, Mode, PromptFormat
from batchgen.errors import UsageError


@pytest.fixture
def refusal(nested):
    def settle_and_refuse(**values) -> str:
        with pytest.raises(UsageError) as refused:
            settle(nested(**values))
        return str(refused.value)

    return settle_and_refuse


@pytest.fixture
def config_of(nested):
    return lambda **values: settle(nested(**values)).config


pytestmark = pytest.mark.usefixtures("caller")


@pytest.mark.parametrize("empty", ["", " ", "???"])
def test_g04_missing_and_empty_values_are_named_all_at_once(empty, refusal):
    message = refusal(**{"model.path": empty, "input.path": empty, "output.dir": empty})
    assert all(name in message for name in ("model.path", "input.path", "output.dir"))
    assert "model.path" not in refusal(**{"input.path": empty})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("pool.block_size", 0, "between 4 and 256"),
        ("pool.block_size", 257, "between 4 and 256"),
        ("pool.num_blocks", 0, "at least 1"),
        ("pool.swap_blocks", -1, "at least 0"),
        ("pool.gpu_memory_utilization", 0.0, "above 0"),
        ("pool.gpu_memory_utilization", 1.1, "at most 1"),
        ("pool.cpu_memory_gib", 0.0, "positive"),
        ("pool.cpu_memory_gib", float("nan"), "positive"),
        ("pool.swap_gib", -1.0, "positive"),
        ("engine.max_num_seqs", 0, "between 1 and 1048576"),
        ("engine.max_num_batched_tokens", 0, "at least 1"),
        ("model.max_model_len", 0, "at least 1"),
        ("model.dtype", "float8", "bfloat16"),
        ("model.device", "tpu", "cuda:N"),
        ("model.revision", "", "empty"),
        ("model.tokenizer", "", "empty"),
        ("input.limit", 0, "at least 1"),
        ("output.rows_per_part", 0, "at least 1"),
        ("log.every_s", 0.0, "positive"),
        ("engine.stall_s", 0.0, "positive"),
        ("engine.stall_s", float("inf"), "or null"),
        ("budget.wall_time_s", -1.0, "positive"),
        ("budget.wall_time_s", float("nan"), "or null"),
        ("errors.max_rate", 1.5, "between 0 and 1"),
        ("sampling.top_p", 2.0, "between 0 and 1"),
        ("sampling.min_tokens", 300, "above max_tokens=256"),
        ("sampling.temperature", -1.0, "greedy"),
        ("sampling.stop", [""], "empty string"),
        ("prompt.column", "", "empty"),
        ("prompt.template", "{{ text", "Jinja"),
        ("prompt.template", " ", "empty"),
        ("prompt.template_file", "missing.j2", "not a file"),
        ("sampling.stop_file", "missing.json", "cannot be read"),
        ("input.path", "missing.parquet", "does not exist"),
        ("input.path", "gs://bucket/x", "URI"),
        ("input.path", "s3://user:hunter2@bucket/x", "names a user"),
        ("output.dir", "gs://bucket/x", "URI"),
        ("output.dir", "s3://bucket", "must name a prefix"),
        ("output.dir", "s3://bucket/x?secret_key=hunter2", "only endpoint_override"),
        ("output.dir", "in.parquet", "is a file"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(key, value, says, refusal):
    message = refusal(**{key: value})
    assert key in message
    assert says in message


def test_values_at_their_limits_are_taken(config_of):
    config_of(
        **{
            "pool.block_size": 4,
            "pool.swap_blocks": 0,
            "pool.swap_gib": 0.0,
            "pool.gpu_memory_utilization": 1.0,
            "errors.max_rate": 0.0,
            "model.device": "cuda:3",
            "sampling.top_k": -1,
        }
    )


def test_all_complaints_come_at_once(refusal):
    message = refusal(**{"pool.block_size": 1, "sampling.top_p": 3.0})
    assert "pool.block_size" in message
    assert "sampling.top_p" in message


@pytest.mark.parametrize(
    "name", ["./model", "/no/model", "~/no-model", "m.gguf", "a/b/c", "no such"]
)
def test_a_model_that_looks_like_a_path_must_exist(name, refusal):
    assert "model.path" in refusal(**{"model.path": name})
    assert "model.tokenizer" in refusal(**{"model.tokenizer": name})


@pytest.mark.parametrize("name", ["models/mine", "own/mine"])
def test_a_name_that_may_be_meant_as_a_directory_is_warned_about(name, caller, nested):
    (caller / "own").mkdir()
    for key in ("model.path", "model.tokenizer"):
        (warning,) = settle(nested(**{key: name})).warnings
        assert warning.startswith(f"{key}={name}: there is no directory {caller / name},")
    assert not settle(nested(**{"model.path": "org/model"})).warnings
    (caller / name).mkdir(parents=True)
    (caller / name / "config.json").touch()
    assert not settle(nested(**{"model.path": name})).warnings


def test_a_missing_relative_input_is_said_to_be_the_callers_and_where_else_it_is(
    caller, refusal, tmp_path
):
    job = tmp_path / "job"
    job.mkdir()
    wrong = {"input.path": "rows.parquet", "job": str(job)}
    message = refusal(**wrong)
    assert f"input.path={caller / 'rows.parquet'} does not exist" in message
    assert "rows.parquet is relative, so it was looked for in the current directory" in message
    assert str(job) not in message
    (job / "rows.parquet").touch()
    assert f"There is {job / 'rows.parquet'}" in refusal(**wrong)
    assert "current directory" not in refusal(**{"input.path": str(tmp_path / "rows.parquet")})


def test_a_models_directory_holds_a_config(caller, refusal, config_of):
    (caller / "org" / "model").mkdir(parents=True)
    assert "config.json" in refusal()
    (caller / "org" / "model" / "config.json").touch()
    assert config_of().model.path == str(caller / "org" / "model")


def test_a_gguf_file_is_a_model_and_another_file_is_not(caller, refusal, config_of):
    (caller / "m.gguf").touch()
    assert config_of(**{"model.path": "m.gguf"}).model.path == str(caller / "m.gguf")
    assert "neither" in refusal(**{"model.path": "in.parquet"})


@pytest.mark.parametrize(
    "pair",
    [
        ("prompt.column", "prompt.template"),
        ("prompt.messages_column", "prompt.token_ids_column"),
        ("prompt.template", "prompt.template_file"),
        ("prompt.system", "prompt.system_file"),
    ],
)
def test_two_explicit_sources_are_refused(pair, caller, refusal):
    (caller / "f").write_text("x")
    values = {name: "f" if name.endswith("_file") else "x" for name in pair}
    message = refusal(**{"prompt.template": "x", **values})
    assert all(name in message for name in pair)


@pytest.mark.parametrize("key", ["prompt.system", "prompt.shots_file"])
def test_what_surrounds_a_template_needs_one(key, refusal):
    assert "needs prompt.template" in refusal(**{key: "in.parquet"})


def test_chat_format_does_not_apply_to_a_rendered_column(refusal):
    message = refusal(**{"prompt.column": "text", "prompt.format": PromptFormat.chat})
    assert "prompt.format=chat" in message


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("data", "data"),
        ("data", "data/out"),
        ("data/*.parquet", "data"),
        ("data/**/*.parquet", "data/deep/out"),
        ("data/in.parquet", "data"),
        ("data", "."),
    ],
)
def test_results_never_mix_with_the_input(caller, source, output, refusal):
    (caller / "data").mkdir()
    (caller / "data" / "in.parquet").touch()
    assert "mixed" in refusal(**{"input.path": source, "output.dir": output})


@pytest.mark.parametrize(
    ("source", "output"),
    [("data/*.parquet", "data/out"), ("data", "data/_out"), ("data", "data-out")],
)
def test_an_output_beside_the_input_is_fine(caller, source, output, config_of):
    (caller / "data").mkdir()
    config_of(**{"input.path": source, "output.dir": output})


def test_a_glob_is_absolute_even_from_a_directory_that_looks_like_one(
    tmp_path, monkeypatch, config_of
):
    odd = tmp_path / "[x]"
    odd.mkdir()
    (odd / "a.parquet").touch()
    monkeypatch.chdir(odd)
    pattern = config_of(**{"input.path": "./*.parquet"}).input.path
    assert Path(pattern).is_absolute()
    assert list(map(str, Path("/").glob(pattern[1:]))) == [str(odd / "a.parquet")]


@pytest.mark.parametrize("content", ['["</s>", "\\n\\n"]', '- "</s>"\n- "\\n\\n"\n'])
def test_g02_stops_come_from_a_json_or_yaml_list_as_well(caller, content, config_of):
    (caller / "stops").write_text(content)
    config = config_of(**{"sampling.stop": ["a", "</s>"], "sampling.stop_file": "stops"})
    assert config.sampling.stop == ["a", "</s>", "\n\n"]


@pytest.mark.parametrize("content", ["text", "[1]", "{a: b}", "[", "[no]", "['']"])
def test_a_stop_file_that_is_no_list_of_strings_is_refused(caller, content, refusal):
    (caller / "stops").write_text(content)
    assert "sampling." in refusal(**{"sampling.stop_file": "stops"})


def test_g03_a_backslash_and_an_n_are_warned_about(nested):
    warned = settle(nested(**{"sampling.stop": [r"\n\n"]})).warnings
    assert len(warned) == 1
    assert "sampling.stop" in warned[0]
    fine = {"sampling.stop": ["\n"], "prompt.template": r"{{ lines | join('\n') }}"}
    assert settle(nested(**fine)).warnings == ()


def test_the_resolved_yaml_reads_back_as_the_same_values(nested):
    values = {"prompt.template": "é ${not.ours} {{ x }}\n", "engine.attention": Attention.torch}
    settled = settle(nested(**values))
    back = yaml.safe_load(settled.resolved_yaml)
    assert back["prompt"]["template"] == "é ${not.ours} {{ x }}\n"
    assert back["engine"]["attention"] == "torch"
    assert settled.config.mode is Mode.run
