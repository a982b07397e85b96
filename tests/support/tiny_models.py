"""Tiny random models of several families, made on the spot and saved to a directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

_COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 8}


def _with(config: Callable[..., Any], **changes: Any) -> Callable[[], Any]:
    return lambda: config(**(_COMMON | changes))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _with(tf.LlamaConfig),
    "qwen2": _with(tf.Qwen2Config),
    "qwen3": _with(tf.Qwen3Config, **_HEAD),
    "mistral": _with(tf.MistralConfig, sliding_window=9, **_HEAD),
    "gemma2": _with(
        tf.Gemma2Config,
        sliding_window=9,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=8,
        **_HEAD,
    ),
    "gemma3": _with(tf.Gemma3TextConfig, sliding_window=9, query_pre_attn_scalar=8, **_HEAD),
    "phi3": _with(tf.Phi3Config, sliding_window=9),
    "olmo2": _with(tf.Olmo2Config),
    "granite": _with(tf.GraniteConfig),
    "qwen3_moe": _with(
        tf.Qwen3MoeConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        **_HEAD,
    ),
    "gpt_oss": _with(
        tf.GptOssConfig,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **_HEAD,
    ),
    "smollm3": _with(tf.SmolLM3Config),
    "starcoder2": _with(tf.Starcoder2Config, sliding_window=9),
    "gpt_neox": _with(tf.GPTNeoXConfig, rotary_pct=0.5),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=199,
        n_positions=512,
        n_embd=48,
        n_layer=3,
        n_head=6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "opt": _with(tf.OPTConfig, ffn_dim=96, word_embed_proj_dim=48),
}

REFUSED: dict[str, Callable[[], Any]] = {
    "bloom": lambda: tf.BloomConfig(vocab_size=199, hidden_size=48, n_layer=2, n_head=6),
    "mamba": lambda: tf.MambaConfig(vocab_size=199, hidden_size=48, num_hidden_layers=2),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=199,
        hidden_size=48,
        num_layers=2,
        num_heads=6,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=128,
    ),
    "deepseek_v3": _with(
        tf.DeepseekV3Config,
        num_key_value_heads=6,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=3,
        n_group=1,
        topk_group=1,
    ),
}


def build(config: Any, seed: int = 0) -> tf.PreTrainedModel:
    """Make a random model with weights large enough that attention matters."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sink" in name:
                parameter.normal_(0, 0.15)
    return model


def save(family: str, directory: Path, seed: int = 0, *, num_layers: int | None = None) -> Path:
    """Save a tiny model of a family where it can be loaded from."""
    config = (FAMILIES | REFUSED)[family]()
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    build(config, seed).save_pretrained(directory)
    return directory
