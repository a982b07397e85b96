"""What the load check refuses, and that it refuses nothing that is right."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from model_table import WINDOW, tiny_config

from batchgen.errors import UsageError
from batchgen.runtime.cpu.packed_linear import PackedLinear
from batchgen.runtime.load_check import check_paged, stock_logits
from batchgen.runtime.model import (
    LoadedModel,
    ModelSource,
    geometry_without_weights,
    load_config,
    load_model,
)
from batchgen.runtime.model_kinds import resolve_max_model_len
from tests.support.tiny_models import build, save


def _load(folder: Path, max_model_len: int | None = None, dtype: str = "float32") -> LoadedModel:
    return load_model(
        ModelSource(str(folder)),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=max_model_len,
    )


def _saved(folder: Path, config: Any) -> Path:
    build(config).save_pretrained(folder)
    return folder


def _refusal(folder: Path, **given: Any) -> str:
    """The reason, which a plan and a run give alike."""
    with pytest.raises(UsageError) as refused:
        _load(folder, **given)
    with pytest.raises(UsageError) as planned:
        geometry_without_weights(ModelSource(str(folder)), given.get("max_model_len"))
    assert str(planned.value) == str(refused.value)
    return str(refused.value)


def test_t1_a_window_that_only_the_mask_knows_is_refused_up_to_its_length(tmp_path: Path) -> None:
    config = tiny_config("phimoe")
    config.sliding_window = WINDOW
    folder = _saved(tmp_path, config)
    said = _refusal(folder)
    assert f"layer 0 has a sliding window of {WINDOW} tokens in its mask alone" in said
    assert f"set model.max_model_len={WINDOW} or less" in said
    assert _load(folder, max_model_len=WINDOW).layers[0].window is None


def test_t1_a_mask_that_the_model_makes_itself_is_refused_by_layer(tmp_path: Path) -> None:
    said = _refusal(_saved(tmp_path, tiny_config("doge")))
    assert "layer 0 attends by a mask that the model makes itself" in said


def test_t1_a_model_that_numbers_its_tokens_itself_is_refused(tmp_path: Path) -> None:
    config = tiny_config("bart")
    config.is_encoder_decoder, config.is_decoder = False, True
    assert "takes no position_ids" in _refusal(_saved(tmp_path, config))


def test_t1_attention_scaled_by_the_place_in_the_batch_is_refused(tmp_path: Path) -> None:
    config = tiny_config("llama4_text")
    config.layer_types = ["full_attention"] * 4
    config.no_rope_layers = [1, 0, 1, 0]
    config.attn_temperature_tuning = True
    assert "attn_temperature_tuning" in _refusal(_saved(tmp_path, config))


def test_a_model_that_looks_at_bidirectional_context_is_refused(tmp_path: Path) -> None:
    """A neighbour that no list names: an encoder that transformers loads as a causal model."""
    config = tiny_config("bert")
    config.is_decoder = False
    assert "sees tokens that come after its own" in _refusal(_saved(tmp_path, config))


def test_t1_a_longrope_nested_by_layer_type_counts() -> None:
    rope = {
        "full_attention": {
            "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    config = tf.Gemma3TextConfig(max_position_embeddings=512, rope_parameters=rope)
    with pytest.raises(UsageError, match=r"set model\.max_model_len=128"):
        resolve_max_model_len(config, None)
    assert resolve_max_model_len(config, 128) == 128


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "layers with a recurrent state"),
        ("t5", "is an encoder-decoder model"),
        ("whisper", "is an encoder-decoder model"),
        ("llava", "is a multimodal model"),
        ("deepseek_v3", "uses multi-head latent attention"),
        ("llama4_text", "attention within chunks of the sequence"),
        ("vit", "is not a text-generation model of transformers"),
    ],
)
def test_t16_the_kind_of_model_is_the_reason(family: str, reason: str, tmp_path: Path) -> None:
    tf.AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=reason):
        geometry_without_weights(ModelSource(str(tmp_path)))


def test_t16_a_family_without_the_interface_is_refused_before_its_length(tmp_path: Path) -> None:
    _saved(tmp_path, tf.BloomConfig(vocab_size=199, hidden_size=48, n_layer=2, n_head=6))
    with pytest.raises(UsageError, match="does not call transformers' attention interface"):
        load_config(ModelSource(str(tmp_path)))


def test_gemma3_checkpoints_with_a_vision_part_load_their_text_part(tmp_path: Path) -> None:
    text = tiny_config("gemma3_text")
    vision = tf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    config = tf.Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict())
    torch.manual_seed(0)
    tf.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert len(_load(tmp_path).layers) == text.num_hidden_layers


@pytest.mark.parametrize(
    "named",
    [
        {"hidden_act": "foo"},
        {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_t28_a_word_that_transformers_does_not_know_is_not_all_that_is_said(
    named: dict[str, Any], tmp_path: Path
) -> None:
    save("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    with pytest.raises(UsageError, match=r"names 'foo', which transformers .* does not know"):
        _load(tmp_path)


# -- logits -----------------------------------------------------------------------------------


class _Reading(torch.nn.Linear):
    """A linear layer of a class of its own, whose code reads its weight."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight.T


def _is_packed(model: Any, name: str) -> bool:
    return isinstance(model.get_submodule(name), PackedLinear)


def test_t22_packing_leaves_alone_what_is_no_plain_float32_linear(tmp_path: Path) -> None:
    model = _load(save("llama", tmp_path)).model
    assert _is_packed(model, "model.layers.0.mlp.up_proj")
    fresh = build(tf.LlamaConfig(
        vocab_size=199, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2,
    ))  # fmt: skip
    layer = fresh.model.layers[0].mlp
    layer.up_proj = _Reading(48, 96, bias=False)
    half = torch.nn.Linear(48, 96, bias=False, dtype=torch.bfloat16)
    quantised = torch.nn.Linear(48, 96, bias=False)
    quantised.weight = torch.nn.Parameter(
        torch.zeros(96, 48, dtype=torch.int8), requires_grad=False
    )
    layer.narrow, layer.quantised = half, quantised
    from batchgen.runtime.cpu.packed_linear import pack_linears

    pack_linears(fresh, lambda: fresh(torch.tensor([[1, 2, 3]])))
    for name in ("up_proj", "narrow", "quantised"):
        assert not _is_packed(fresh, f"model.layers.0.mlp.{name}")
    assert _is_packed(fresh, "model.layers.0.mlp.down_proj")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "gpt_oss", "gpt2"])
def test_a_right_model_passes_in_every_dtype(family: str, dtype: str, tmp_path: Path) -> None:
    _load(save(family, tmp_path), dtype=dtype)


def _shift_positions(model: Any) -> None:
    plain = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: plain(
        x, torch.arange(position_ids.shape[1])[None]
    )


def _drop_weights(model: Any) -> None:
    layer = model.model.layers[2].self_attn.o_proj
    layer.forward = lambda rows: 0 * rows


@pytest.mark.parametrize(
    ("spoil", "layer"), [(_shift_positions, "layer 0"), (_drop_weights, "layer 2")]
)
def test_what_differs_from_the_stock_model_is_refused_with_the_first_layer(
    spoil: Callable[[Any], None], layer: str, tmp_path: Path
) -> None:
    loaded = _load(save("llama", tmp_path))
    stock = stock_logits(loaded.model, 512)
    check_paged(loaded.model, loaded.layers, stock)
    spoil(loaded.model)
    with pytest.raises(UsageError, match=f"first in the attention of {layer}"):
        check_paged(loaded.model, loaded.layers, stock)
