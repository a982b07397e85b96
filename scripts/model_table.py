"""Hold every decoder family of the installed transformers against its own `generate`.

Each family is built as a tiny random model from its configuration class and run through the
engine: prompts beyond any window, chunks, prefix hits, preemption. Its tokens have to be those of
transformers' `generate`, one prompt at a time, in float32; or the family has to be refused.

    python scripts/model_table.py                      # writes the table of docs/models.md
    python scripts/model_table.py llama gemma3_text    # shows some families only
"""

import argparse
import inspect
import logging
import re
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from batchgen import Engine
from batchgen.errors import UsageError
from batchgen.runtime.model import ModelSource, load_config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- families -->", "<!-- end of families -->"
NEW_TOKENS = 32
NEAR_TIE = 1e-4
WINDOW = 9
_LAYERS = 4

# Sizes by the names that configuration classes give them.
_SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "embed_dim": 64, "model_dim": 64,
    "embedding_size": 64, "word_embed_proj_dim": 64, "emb_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "d_ff": 96, "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96, "ffn_hidden_size": 96, "hidden_dim": 96, "mlp_hidden_size": 96,
    "dense_intermediate_size": 96, "intermediate_size_mlp": 96, "ffn_intermediate_size": 96,
    "num_hidden_layers": _LAYERS, "n_layer": _LAYERS, "n_layers": _LAYERS, "num_layers": _LAYERS,
    "decoder_layers": _LAYERS, "encoder_layers": _LAYERS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "multi_query_group_num": 2, "n_kv_heads": 2,
    "num_global_key_value_heads": 2, "swa_num_key_value_heads": 2, "swa_num_attention_heads": 4,
    "head_dim": 16, "kv_channels": 16, "attention_head_dim": 16, "global_head_dim": 16,
    "v_head_dim": 16, "swa_head_dim": 16, "swa_v_head_dim": 16, "d_kv": 16,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512, "n_ctx": 512,
    "max_sequence_length": 512, "seq_length": 512,
    "sliding_window": WINDOW, "window_size": WINDOW, "attention_window_size": WINDOW,
    "sliding_window_size": WINDOW, "attention_chunk_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_moe_experts": 4, "num_routed_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k": 2,
    "top_k_experts": 2, "moe_top_k": 2, "experts_per_token": 2,
    "moe_intermediate_size": 32, "expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "moe_ffn_hidden_size": 32,
    "n_group": 1, "topk_group": 1, "num_shared_experts": 1, "n_shared_experts": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199,
    "embedding_dim": 64, "attention_hidden_size": 64, "rotary_dim": 8, "query_pre_attn_scalar": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "floor_scale": 8,
}  # fmt: skip
# In multi-head latent attention these sizes have other meanings.
_LATENT = {"head_dim": 8, "qk_head_dim": 16}
# Lists with an item for each layer.
_PATTERNS = (
    "layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "moe_layer_freq",
    "hybrid_layer_pattern", "attn_type_list",
)  # fmt: skip
_SMALL = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": WINDOW,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_NO_LAYER_INPUT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
# Families whose classes check sizes against each other are made from these arguments.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": _SMALL | {
        "layer_types": ["full_attention"] * _LAYERS,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dots1": _SMALL | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    },
    "dots3_note": {"text_config": {"model_type": "dots3_note_text"}},
    "gemma3n_text": _SMALL | {
        "intermediate_size": [96] * _LAYERS, "num_kv_shared_layers": 0, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * _LAYERS,
    },
    "gemma4_text": _SMALL | {"global_head_dim": 16},
    "laguna": _SMALL | {
        "num_attention_heads_per_layer": [4] * _LAYERS, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "gpt_neo": {
        "vocab_size": 199, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 512,
    },
    "dory": _SMALL | {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "gemma4": {"text_config": _SMALL | {"global_head_dim": 16}},
    "gemma4_unified": {"text_config": _SMALL | {"global_head_dim": 16}},
    "lfm2_moe": _SMALL | {"layer_types": ["conv", "full_attention"] * 2},
    "gemma4_unified_text": _SMALL | {"global_head_dim": 16},
    "xlnet": {"vocab_size": 199, "d_model": 64, "n_layer": _LAYERS, "n_head": 4, "d_inner": 96},
    "xmod": _SMALL | {"default_language": "en_XX", "is_decoder": True},
    "reformer": {"is_decoder": True, "vocab_size": 199, "attn_layers": ["local"] * 2,
                 "axial_pos_embds": False},
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": _LAYERS, "max_seq_len": 512, "vocab_size": 199,
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma4_assistant": {"text_config": _SMALL | {"global_head_dim": 16} | _NO_LAYER_INPUT},
    "gemma4_unified_assistant": {
        "text_config": _SMALL | {"global_head_dim": 16} | _NO_LAYER_INPUT,
    },
}  # fmt: skip
# Seconds for building a family and generating with it.
_PATIENCE_S = 120


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a family.

    Attributes:
        family: transformers' ``model_type``.
        kind: equal, refused, wrong or unknown.
        detail: the reason, or what differs.
    """

    family: str
    kind: str
    detail: str


def families() -> list[str]:
    """List the families that transformers loads as causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def year(family: str) -> int:
    """Return the year that a family's code was written in, by its copyright line."""
    source = Path(inspect.getfile(CONFIG_MAPPING[family])).read_text()
    found = re.search(r"Copyright (?:\(c\) )?(20\d\d)", source)
    return int(found[1]) if found else 0


def tiny_config(family: str) -> Any:
    """Make a tiny configuration of a family, windows and experts included."""
    if family in _ARGUMENTS:
        return CONFIG_MAPPING[family](**_ARGUMENTS[family])
    config = CONFIG_MAPPING[family]()
    _shrink(config)
    return config


def _shrink(config: Any) -> None:
    """Make a configuration and all its parts small."""
    for part in vars(config).values():
        if isinstance(part, tf.PreTrainedConfig):
            _shrink(part)
    sizes = _SIZES | (_LATENT if _get(config, "kv_lora_rank") else {})
    optional = {"head_dim", "num_key_value_heads", "eos_token_id", "bos_token_id", "pad_token_id"}
    for name, size in sizes.items():
        given = _get(config, name)
        if isinstance(given, int) or (given is None and name in optional & vars(config).keys()):
            _set(config, name, size)
    for name in _PATTERNS:
        types = _get(config, name)
        if isinstance(types, list) and types:
            _set(config, name, _some_of_each(types))
    if isinstance(_get(config, "first_k_dense_replace"), int):
        config.first_k_dense_replace = 1


def _get(config: Any, name: str) -> Any:
    """Return a value, or None if there is none or it differs by layer."""
    try:
        return getattr(config, name, None)
    except (ValueError, RuntimeError, NotImplementedError):
        return None


def _set(config: Any, name: str, value: Any) -> None:
    """Set a value, unless the class computes it from others."""
    with suppress(AttributeError, NotImplementedError):
        setattr(config, name, value)


def _some_of_each(types: list[Any]) -> list[Any]:
    """Cut a list of layers' kinds to the first few, each kind among them."""
    kinds = list(dict.fromkeys(types))[:_LAYERS]
    return (kinds * _LAYERS)[:_LAYERS]


def build(family: str, seed: int = 0) -> Any:
    """Make a random model whose attention matters: with large weights."""
    torch.manual_seed(seed)
    config = tiny_config(family)
    model = tf.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sink" in name:
                parameter.normal_(0, 0.15)
    model.generation_config = tf.GenerationConfig()
    return model


def prompts() -> list[list[int]]:
    """Prompts of 1 to 90 tokens, beyond windows, with shared prefixes off block borders."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 199, 41).tolist()
    return [
        rng.integers(3, 199, 1).tolist(),
        shared[:22] + rng.integers(3, 199, 7).tolist(),
        shared + rng.integers(3, 199, 3).tolist(),
        shared + rng.integers(3, 199, 20).tolist(),
        rng.integers(3, 199, 90).tolist(),
    ]


def judge(family: str, folder: Path) -> Verdict:
    """Run a family through the engine and compare it with `generate`."""
    try:
        with _quiet(), _within(_PATIENCE_S):
            return _judge(family, folder)
    except UsageError as error:
        return Verdict(family, "refused", str(error).split(": ", 1)[-1])
    except Exception as error:
        # A family that cannot be judged, whatever it raised, is one to look at.
        return Verdict(family, "unknown", f"{type(error).__name__}: {error}")


def _judge(family: str, folder: Path) -> Verdict:
    config = CONFIG_MAPPING[family](**_ARGUMENTS.get(family, {}))
    config.save_pretrained(folder)
    load_config(ModelSource(str(folder)))
    try:
        model = build(family)
    except ImportError as error:
        # The command says the same of a checkpoint.
        return Verdict(family, "refused", f"cannot be loaded: {str(error).strip().splitlines()[0]}")
    model.save_pretrained(folder)
    found = _ours(folder)
    for ids, ours in zip(prompts(), found, strict=True):
        difference = _difference(model, ids, ours, _stock(model, ids))
        if difference:
            return Verdict(family, "wrong", f"a prompt of {len(ids)} tokens: {difference}")
    return Verdict(family, "equal", "")


@torch.inference_mode()
def _stock(model: Any, ids: list[int]) -> list[int]:
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def _ours(folder: Path) -> list[list[int]]:
    """Run the prompts with chunks, and a pool that makes some of them be preempted."""
    engine = Engine(
        str(folder),
        dtype="float32",
        block_size=4,
        num_blocks=52,
        swap_blocks=8,
        max_model_len=256,
        max_num_batched_tokens=37,
        admission="prompt",
    )
    answers = engine.generate(
        prompts(), {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0}
    )
    return [list(answer.token_ids) for answer in answers]


@torch.inference_mode()
def _difference(model: Any, ids: list[int], ours: list[int], stock: list[int]) -> str:
    """Describe the first token that differs, unless it is one of two near-equal ones."""
    if ours == stock:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(ours, stock, strict=False)) if a != b), len(stock))
    if at < min(len(ours), len(stock)):
        logits = model(input_ids=torch.tensor([ids + stock[:at]]), use_cache=False).logits[0, -1]
        if abs(logits[stock[at]] - logits[ours[at]]).item() < NEAR_TIE:
            return ""
    return f"token {at} of {len(stock)} differs"


@contextmanager
def _quiet() -> Iterator[None]:
    """Say nothing of what transformers warns about."""
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError if something takes longer."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def table(verdicts: Sequence[Verdict]) -> str:
    """Write the verdicts as Markdown."""
    counts = Counter(each.kind for each in verdicts)
    summary = ", ".join(
        f"{counts[kind]} {kind}" for kind in ("equal", "refused", "wrong", "unknown")
    )
    lines = [f"transformers {tf.__version__}: {summary}.", "", "| family | verdict |", "|---|---|"]
    lines += [
        f"| `{each.family}` | {each.kind}{': ' if each.detail else ''}{each.detail} |"
        for each in verdicts
    ]
    return "\n".join(lines)


def main() -> None:
    """Judge the families and write the page, or show some of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="all, if none is named")
    options = parser.parse_args()
    verdicts = []
    for family in options.families or families():
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(family, Path(folder))
        print(f"{verdict.family:30} {verdict.kind:8} {verdict.detail[:300]}", flush=True)
        verdicts.append(verdict)
    if not options.families:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{table(verdicts)}\n{END}{after}")
    sys.exit(any(each.kind in {"wrong", "unknown"} for each in verdicts))


if __name__ == "__main__":
    main()
