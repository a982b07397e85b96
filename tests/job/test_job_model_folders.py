"""A model's directory that is damaged, incomplete or more than a model is refused by its file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.errors import UsageError
from batchgen.job import load
from batchgen.prompts.tokenizer import load_tokenizer
from batchgen.runtime import hub
from batchgen.runtime.model_files import check_model, weight_files
from tests.job.harness import Job

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 123\n"
PAGE = b"<!DOCTYPE html><html><body>404</body></html>"

Damage = Callable[[Path], Any]


def holds(content: bytes) -> Damage:
    return lambda file: file.write_bytes(content)


def cut(kept_bytes: int) -> Damage:
    return lambda file: file.write_bytes(file.read_bytes()[:kept_bytes])


def header(length: int) -> Damage:
    """Another length of the header in front of it."""
    return lambda file: file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])


def instead(make: Damage) -> Damage:
    """Something else under the file's name."""

    def damage(file: Path) -> None:
        file.unlink(missing_ok=True)
        make(file)

    return damage


def says(**values: Any) -> Damage:
    def damage(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


DANGLING = instead(lambda file: file.symlink_to("nowhere"))
FOLDER = instead(Path.mkdir)
PIPE = instead(os.mkfifo)
T20 = {
    "a web page": (WEIGHTS, holds(PAGE), "looks like a web page"),
    "no weights": (WEIGHTS, holds(b""), "is empty"),
    "cut weights": (WEIGHTS, cut(-100), "is damaged or cut"),
    "weights cut in their header": (WEIGHTS, cut(100), "is damaged or cut"),
    "weights of seven bytes": (WEIGHTS, cut(7), "is damaged or cut"),
    "a giant header": (WEIGHTS, header(1 << 62), "is damaged or cut"),
    "no header": (WEIGHTS, header(0), "is damaged or cut"),
    "a short header": (WEIGHTS, header(20), "is damaged or cut"),
    "more than the header says": (
        WEIGHTS,
        lambda file: file.write_bytes(file.read_bytes() + b"more"),
        "is damaged or cut",
    ),
    "weights that link nowhere": (WEIGHTS, DANGLING, "is a link to nowhere, which is not there"),
    "weights that are a directory": (WEIGHTS, FOLDER, "is no regular file"),
    "weights that are a pipe": (WEIGHTS, PIPE, "is no regular file"),
    "a link to nowhere": ("extra.json", DANGLING, "is a link to nowhere"),
    "a link to itself": (
        "extra.json",
        lambda file: file.symlink_to(file.name),
        "cannot be read: .*Too many levels",
    ),
    "a directory": ("extra.json", FOLDER, "is no regular file"),
    "a pipe": ("extra.json", PIPE, "is no regular file"),
    "no heads": ("config.json", says(num_attention_heads=0), "num_attention_heads=0"),
    "a negative size": ("config.json", says(hidden_size=-48), "hidden_size=-48"),
    "a word for a number": ("config.json", says(num_hidden_layers="two"), '="two"'),
    "true for a number": ("config.json", says(vocab_size=True), "vocab_size=true"),
    "a fraction": ("config.json", says(head_dim=8.5), "head_dim=8.5"),
    "10^9 layers": ("config.json", says(num_hidden_layers=10**9), "from 1 to 10,000"),
    "10^9 layers within": (
        "config.json",
        says(text_config={"n_layer": 10**9}),
        "text_config.n_layer=1000000000",
    ),
    "a size of one layer": (
        "config.json",
        says(intermediate_size=[96, 0, 96]),
        "intermediate_size=0",
    ),
    "a word for a token": ("config.json", says(eos_token_id=[1, "x"]), 'eos_token_id="x"'),
    "a list for a configuration": ("config.json", holds(b"[]"), "holds no JSON object"),
    "a deep configuration": ("config.json", holds(b'{"a":' + b"[" * 100_000), "is no JSON"),
    "a number of 5,000 digits": (
        "config.json",
        holds(b'{"hidden_size":' + b"9" * 5000 + b"}"),
        "is no JSON",
    ),
    "a cut generation_config": ("generation_config.json", cut(50), "is no JSON"),
    "a word where generation ends": (
        "generation_config.json",
        says(eos_token_id="x"),
        'eos_token_id="x"',
    ),
    "an empty chat template": ("chat_template.jinja", holds(b""), "is empty"),
    "a cut tokenizer_config": ("tokenizer_config.json", cut(50), "is no JSON"),
    "an index of nothing": (INDEX, holds(b'{"weight_map": {}}'), "has no weight_map"),
    "an index of numbers": (INDEX, holds(b'{"weight_map": {"a": 1}}'), "has no weight_map"),
}


@pytest.mark.parametrize("case", T20)
def test_t20_a_damaged_file_of_a_model_is_named_before_anything_is_planned(
    job: Job, copied_model: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, damage, problem = T20[case]
    if name == INDEX:
        (copied_model / WEIGHTS).unlink()
    damage(copied_model / name)
    job.write([{"prompt": "a b"}])
    assert job() == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert str(copied_model / name) in said
    assert any(problem.partition(": .*")[0] in line for line in said.splitlines()), said
    assert not job.out.exists()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "not a multiple"),
        ({"dtype": "float99"}, "float99"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "ten"}}, "'str'"),
    ],
)
def test_t20_a_configuration_that_the_family_itself_refuses_is_no_traceback(
    job: Job,
    copied_model: Path,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    reason: str,
) -> None:
    says(**values)(copied_model / "config.json")
    job.write([{"prompt": "a b"}])
    assert job() == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert f"model.path={copied_model}" in said
    assert reason in said


def test_t20_a_missing_shard_is_named(tmp_path: Path, copied_model: Path) -> None:
    (copied_model / WEIGHTS).rename(copied_model / "a.safetensors")
    shards = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (copied_model / INDEX).write_text(json.dumps(shards))
    with pytest.raises(UsageError, match=r"b\.safetensors is missing"):
        check_model(str(copied_model), allow_pickle=False)


def test_t20_pickles_and_gguf_files_are_looked_at_too(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "pytorch_model.bin")
    check_model(str(tmp_path), allow_pickle=True)
    cut(-200)(tmp_path / "pytorch_model.bin")
    check_model(str(tmp_path), allow_pickle=False)
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is cut"):
        check_model(str(tmp_path), allow_pickle=True)
    gguf = tmp_path / "q.gguf"
    for content, problem in ((POINTER, "git lfs pull"), (b"PK\x03\x04", "is no GGUF file")):
        gguf.write_bytes(content)
        with pytest.raises(UsageError, match=rf"q\.gguf .*{problem}"):
            check_model(str(gguf), allow_pickle=False)


def test_t20_files_that_nobody_reads_may_be_as_they_like(copied_model: Path) -> None:
    for name in ("pytorch_model.bin", "other.safetensors", "training_args.bin"):
        (copied_model / name).write_bytes(POINTER)
    (copied_model / "broken.bin").symlink_to("nowhere")
    (copied_model / "__init__.py").write_bytes(b"")
    (copied_model / "trainer_state.json").write_text("not JSON")
    check_model(str(copied_model), allow_pickle=True)
    assert weight_files(copied_model, allow_pickle=True) == [copied_model / WEIGHTS]


@pytest.mark.parametrize("mode", ["run", "plan", "preview"])
@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "chat_template.jinja"])
def test_n11_a_git_lfs_pointer_in_a_model_is_told_with_what_fetches_it(
    job: Job, copied_model: Path, capsys: pytest.CaptureFixture[str], name: str, mode: str
) -> None:
    (copied_model / name).write_bytes(POINTER)
    job.write([{"prompt": "a b"}])
    assert job(f"mode={mode}") == 2
    said = capsys.readouterr().err
    assert f"{copied_model / name} looks like a Git LFS pointer" in said
    assert "git lfs pull" in said
    assert not job.out.exists()


def test_n11_a_git_lfs_pointer_in_a_tokenizer_of_its_own_is_told(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes(POINTER)
    job.write([{"prompt": "a b"}])
    assert job(f"model.tokenizer={tokenizer}") == 2
    assert f"model.tokenizer: {tokenizer / 'tokenizer.json'} looks like" in capsys.readouterr().err


@pytest.mark.parametrize("is_whole_model", [True, False])
def test_t15_an_adapter_is_refused_with_the_line_that_merges_it(
    job: Job, copied_model: Path, capsys: pytest.CaptureFixture[str], is_whole_model: bool
) -> None:
    (copied_model / "adapter_config.json").write_text("{}")
    if not is_whole_model:
        (copied_model / "config.json").unlink()
    job.write([{"prompt": "a b"}])
    for mode in ("run", "plan"):
        assert job(f"mode={mode}") == 2
        said = capsys.readouterr().err
        assert "adapter_config.json, and adapters are not supported" in said
        assert "AutoPeftModelForCausalLM" in said
        assert f'"{copied_model}"' in said or repr(str(copied_model)) in said.replace(
            "'\"'\"'", "'"
        )


def test_t15_an_adapter_on_the_hub_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"adapter_config.json": "/cache/adapter_config.json"}
    monkeypatch.setattr(hub, "cached_file", lambda name, file, **_: names.get(file))
    with pytest.raises(UsageError, match=r"someone/adapter.*AutoPeftModel"):
        hub.require_no_adapter("someone/adapter", None)
    names.clear()
    hub.require_no_adapter("someone/adapter", None)


CONFIG = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
# The first piece of a SentencePiece model, and the first line of a tiktoken vocabulary.
SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"
TIKTOKEN = b"IQ== 0\n"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer.model": SENTENCEPIECE}, "is a SentencePiece model, which needs: pip install"),
        ({"spiece.model": SENTENCEPIECE}, "spiece.model is a SentencePiece model"),
        ({"tokenizer.model": TIKTOKEN}, "is a tiktoken vocabulary, which needs: pip install"),
        ({}, "but no vocabulary"),
        ({"unknown.model": b"x"}, "which needs: pip install tiktoken"),
        ({"vocab.json": b'{"a": 0}'}, "neither merges.txt nor tokenizer.json"),
    ],
)
def test_t04_what_a_tokenizer_lacks_is_named_truly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], reason: str
) -> None:
    monkeypatch.setattr("batchgen.prompts.tokenizer._is_installed", lambda package: False)
    family = {"vocab.json": "GPT2Tokenizer", "unknown.model": "T5Tokenizer"}
    config = dict(CONFIG)
    config["tokenizer_class"] = family.get("".join(files), "LlamaTokenizer")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as refused:
        load_tokenizer(str(tmp_path))
    assert reason in str(refused.value)


def test_t28_weights_without_memory_are_a_usage_error(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(load, "load_model", no_room)
    job.write([{"prompt": "a b"}])
    assert job() == 2
    assert "there is no memory to load it; set a model.dtype" in capsys.readouterr().err
