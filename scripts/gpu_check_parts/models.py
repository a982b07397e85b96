"""Random models: small ones of several families, and the shapes that speed is measured on."""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
import transformers as tf

from batchgen.runtime.attention import ATTENTION_NAME
from batchgen.runtime.model import LoadedModel
from batchgen.runtime.model_kinds import resolve_max_model_len
from batchgen.runtime.model_probe import probe

VOCAB_SIZE = 512
# Entries of weight matrices, so large that attention decides between tokens.
_SPREAD = 0.15
_SPREAD_AT = 48


def _small(config: Callable[..., Any], **changes: Any) -> Callable[[bool], Any]:
    """Return what makes a family's configuration: on a GPU with heads that fill a tile."""

    def make(dry_run: bool) -> Any:
        head_dim = 8 if dry_run else 64
        common: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 6 * head_dim,
            "head_dim": head_dim,
            "intermediate_size": 12 * head_dim,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        return config(**(common | changes))

    return make


# A family for each thing that attention can have; gpt2 and phi3 differ in how they get there.
FAMILIES: dict[str, Callable[[bool], Any]] = {
    "llama": _small(tf.LlamaConfig),
    # A window that rows outgrow, and that leaves them room to grow.
    "mistral": lambda dry_run: _small(tf.MistralConfig, sliding_window=37 if dry_run else 200)(
        dry_run
    ),
    "gemma2": _small(
        tf.Gemma2Config,
        sliding_window=37,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=8,
    ),
    "gpt_oss": _small(
        tf.GptOssConfig,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=37,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen3": _small(tf.Qwen3Config),
    "phi3": _small(tf.Phi3Config),
    "gpt2": lambda dry_run: tf.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=2048,
        n_embd=48 if dry_run else 384,
        n_layer=3,
        n_head=6,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def llama_config(name: str, dry_run: bool) -> Any:
    """Return the configuration of Llama-3.2-1B, Llama-3.1-8B or Llama-2-7B.

    A dry run keeps the heads' ratio and drops everything else.
    """
    shapes: dict[str, dict[str, Any]] = {
        "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
               "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
               "tie_word_embeddings": True},
        "8B": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
               "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
        "7B": {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
               "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32_000},
    }  # fmt: skip
    shape = shapes[name]
    if dry_run:
        heads = shape["num_attention_heads"] // 8
        shape |= {
            "hidden_size": 16 * heads,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": shape["num_key_value_heads"] // 8,
            "vocab_size": VOCAB_SIZE,
        }
    return tf.LlamaConfig(**shape, max_position_embeddings=8192, rope_theta=500_000.0)


def random_model(
    config: Any, dtype: torch.dtype, device: torch.device, seed: int, *, loud: bool = False
) -> LoadedModel:
    """Make a model with our attention in it, on the device.

    Args:
        config: of the family.
        dtype: of the weights.
        device: where they are drawn.
        seed: of the weights.
        loud: make weights so large that outputs differ between rows, for comparisons.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = cast(Any, tf.AutoModelForCausalLM).from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    model = model.eval()
    if loud:
        _make_loud(model)
    return LoadedModel(
        model=model,
        layers=probe(model, model.config.max_position_embeddings),
        max_model_len=resolve_max_model_len(model.config, None),
        vocab_size=model.config.vocab_size,
    )


@torch.no_grad()
def _make_loud(model: Any) -> None:
    width = model.config.hidden_size
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sink" in name:
            parameter.normal_(0, _SPREAD * (_SPREAD_AT / width) ** 0.5)


def stock_copy(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Copy a model and give the copy transformers' own attention, eager: right everywhere."""
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    stock.generation_config = tf.GenerationConfig()
    return stock if dtype is None else stock.to(dtype)
