"""Loading: what is refused, and where the end of a sequence comes from."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from batchgen.errors import UsageError
from batchgen.runtime import model as model_module
from batchgen.runtime.model import (
    LoadedModel,
    ModelSource,
    geometry_without_weights,
    load_config,
    load_eos_ids,
    load_model,
    resolve_device,
)
from batchgen.runtime.model_kinds import resolve_max_model_len
from tests.support.tiny_models import save


def _load(directory: Path, max_model_len: int | None = None) -> LoadedModel:
    return load_model(
        ModelSource(str(directory)),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=max_model_len,
    )


def _edit(path: Path, **changes: object) -> None:
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | changes))


def _eos_ids(folder: Path, tokenizer: Any = None) -> frozenset[int]:
    source = ModelSource(str(folder))
    return load_eos_ids(source, load_config(source), tokenizer)


def test_c10_the_end_of_a_sequence_comes_from_config_and_generation_config(tmp_path: Path) -> None:
    save("llama", tmp_path)
    _edit(tmp_path / "config.json", eos_token_id=7)
    _edit(tmp_path / "generation_config.json", eos_token_id=[9, 11])
    assert _eos_ids(tmp_path) == {7, 9, 11}
    (tmp_path / "generation_config.json").unlink()
    assert _eos_ids(tmp_path) == {7}


def test_n05_the_tokenizers_end_of_sequence_counts_too(tmp_path: Path) -> None:
    save("llama", tmp_path)
    _edit(tmp_path / "config.json", eos_token_id=2)
    _edit(tmp_path / "generation_config.json", eos_token_id=2)
    assert _eos_ids(tmp_path, SimpleNamespace(eos_token_id=5)) == {2, 5}
    assert _eos_ids(tmp_path, SimpleNamespace(eos_token_id=None)) == {2}
    # No logits are ever at an id beyond the vocabulary, nor at -1.
    _edit(tmp_path / "config.json", eos_token_id=-1)
    assert _eos_ids(tmp_path, SimpleNamespace(eos_token_id=5000)) == {2}


def test_n05_an_id_that_no_file_names_counts_only_where_there_is_no_other(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    del written["eos_token_id"]
    path.write_text(json.dumps(written))
    assert _eos_ids(tmp_path) == {2}
    assert _eos_ids(tmp_path, SimpleNamespace(eos_token_id=5)) == {5}
    _edit(path, eos_token_id=2)
    assert _eos_ids(tmp_path, SimpleNamespace(eos_token_id=5)) == {2, 5}


def test_i07_missing_weights_are_refused_by_name_and_tied_ones_are_not(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(model_module, "can_pack", lambda device, dtype: False)
    save("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        _load(tmp_path)
    _edit(tmp_path / "config.json", tie_word_embeddings=True)
    model = _load(tmp_path).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_i07_a_tied_checkpoint_with_both_tensors_loads_tied(tmp_path: Path, monkeypatch) -> None:
    # Packing makes a second copy of a tied weight: what is loaded shows without it.
    monkeypatch.setattr(model_module, "can_pack", lambda device, dtype: False)
    save("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _edit(tmp_path / "config.json", tie_word_embeddings=True)
    model = _load(tmp_path).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_packed_head_is_that_of_the_tied_embedding(tmp_path: Path) -> None:
    save("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _edit(tmp_path / "config.json", tie_word_embeddings=True)
    model = _load(tmp_path).model
    embeddings = model.model.embed_tokens.weight
    with torch.inference_mode():
        torch.testing.assert_close(model.lm_head(torch.eye(embeddings.shape[1])).T, embeddings)


def test_i03_query_heads_that_are_no_multiple_of_kv_heads_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    _edit(tmp_path / "config.json", num_attention_heads=3, num_key_value_heads=2, head_dim=16)
    with pytest.raises(UsageError):
        _load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4, "use_sliding_window": False},
        {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["full_attention"] * 3},
    ],
)
def test_i04_a_window_that_no_layer_uses_changes_nothing(changes, tmp_path: Path) -> None:
    save("qwen2", tmp_path)
    _edit(tmp_path / "config.json", **changes)
    loaded = _load(tmp_path)
    windows = [layer.self_attn.sliding_window for layer in loaded.model.model.layers]
    assert windows == [None] * 3


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_longest_row_is_refused_beyond_its_origin(kind: str) -> None:
    rope = {
        "rope_type": kind, "factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    config = tf.LlamaConfig(max_position_embeddings=512, rope_parameters=rope)
    with pytest.raises(UsageError, match="max_model_len=128"):
        resolve_max_model_len(config, None)
    assert resolve_max_model_len(config, 128) == 128


def test_more_tokens_than_positions_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    with pytest.raises(UsageError, match="512"):
        _load(tmp_path, max_model_len=513)
    assert _load(tmp_path, max_model_len=100).max_model_len == 100


def test_geometry_is_known_without_weights(tmp_path: Path) -> None:
    save("gemma2", tmp_path)
    expected = _load(tmp_path).layers
    (tmp_path / "model.safetensors").unlink()
    assert geometry_without_weights(ModelSource(str(tmp_path))) == expected


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.path"):
        load_config(ModelSource(str(tmp_path)))


def test_a_name_that_the_hub_does_not_answer_for_is_first_said_to_be_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = logging.getLogger("huggingface_hub.utils._http")

    def unreachable(**_: object) -> None:
        hub.warning("Retrying in 1s")
        raise OSError("cannot connect")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tf.AutoConfig, "from_pretrained", unreachable)
    monkeypatch.setattr("batchgen.runtime.model.require_answer", lambda *_: None)
    with pytest.raises(UsageError) as refused:
        load_config(ModelSource("models/mine"))
    said = str(refused.value)
    begin = f"model.path=models/mine: there is no directory {tmp_path / 'models' / 'mine'}, "
    assert said.startswith(begin)
    assert said.endswith("cannot connect")
    assert not caplog.records
    hub.warning("Retrying in 1s")
    assert len(caplog.records) == 1


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        assert resolve_device("cuda").type == "cuda"
    else:
        with pytest.raises(UsageError, match=r"model\.device=cuda"):
            resolve_device("cuda")
    assert resolve_device("cpu").type == "cpu"


def test_a_device_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device("cuda").index is None
    with pytest.raises(UsageError, match=r"model\.device=cuda:2, but torch sees 2 GPUs"):
        resolve_device("cuda:2")
    with pytest.raises(UsageError, match=r"model\.device=gpu: .*set auto, cpu, cuda"):
        resolve_device("gpu")


def test_weights_that_the_device_has_no_room_for_are_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: torch.nn.Module, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", no_room)
    monkeypatch.setattr(tf.PreTrainedModel, "to", no_room)
    with pytest.raises(UsageError, match=r"take \d.\d GiB, for which cpu has no room; set a model"):
        load_model(
            ModelSource(str(save("llama", tmp_path))),
            dtype="float32",
            device=torch.device("cpu"),
            max_model_len=None,
        )
