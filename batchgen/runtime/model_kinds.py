"""What a model's configuration alone rules out: its kind, its layers, its lengths."""

from collections.abc import Iterator
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from batchgen.errors import UsageError

_TAKEN = (
    "batchgen runs decoder-only text models whose layers keep keys and values in a paged KV cache"
)
NOT_CALLED = (
    "does not call transformers' attention interface, so its attention cannot be replaced by "
    "a paged one"
)
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_LAYER_KINDS = {
    "linear_attention": "layers with a recurrent state (state-space or linear attention)",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "recurrent": "recurrent layers",
    "hybrid": "layers that combine attention with a recurrent state",
    "hybrid_sliding": "layers that combine attention with a recurrent state",
    "conv": "convolution layers, which keep a state of their own",
    "chunked_attention": "attention within chunks of the sequence (attention_chunk_size)",
    "indexed_attention": "sparse attention through an indexer",
    "compressed_sparse_attention": "attention to compressed keys",
    "heavily_compressed_attention": "attention to compressed keys",
    "minimax_m3_sparse": "sparse attention through an indexer",
}
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def refuse_kind(whole: Any) -> None:
    """Refuse a model that is not a decoder-only text model, before anything else is said of it.

    Args:
        whole: the configuration as it was read, with parts for images and the like.

    Raises:
        UsageError: which kind of model it is, and what batchgen takes.
    """
    kind = whole.model_type
    if whole.is_encoder_decoder:
        raise UsageError(f"{kind} is an encoder-decoder model; {_TAKEN}")
    if _has_remote_code(whole):
        return
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        _refuse_own_attention(whole)
        return
    if (
        kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        or kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    ):
        raise UsageError(
            f"{kind} is a multimodal model, whose text part transformers does not load by itself; "
            f"{_TAKEN}. If its text model is published on its own, name that"
        )
    raise UsageError(f"{kind} is not a text-generation model of transformers; {_TAKEN}")


def refuse_layers(config: Any) -> None:
    """Refuse layers whose state is not a plain KV cache.

    Raises:
        UsageError: which layers, and what is special about them.
    """
    kind = config.model_type
    if _value(config, "num_hidden_layers") is None:
        raise UsageError(f"{kind} is not one stack of decoder layers; {_TAKEN}")
    types = _value(config, "layer_types") or ()
    for name in sorted(set(types) - _ATTENTION_LAYERS):
        numbers = [str(index) for index, each in enumerate(types) if each == name]
        shown = ", ".join(numbers[:4]) + (", ..." if len(numbers) > 4 else "")
        raise UsageError(
            f"{kind} has {_LAYER_KINDS.get(name, f'layers of type {name}')} (layer {shown}); "
            f"{_TAKEN}"
        )
    if "kv_lora_rank" in vars(config) and _value(config, "kv_lora_rank") != 0:
        raise UsageError(
            f"{kind} uses multi-head latent attention (kv_lora_rank), which keeps its KV in a "
            f"compressed form; {_TAKEN}"
        )
    if _value(config, "attn_temperature_tuning") and _value(config, "floor_scale"):
        raise UsageError(
            f"{kind} scales its attention by the place of a token in the batch "
            f"(attn_temperature_tuning), so that a row's result would depend on its neighbours"
        )


def resolve_max_model_len(config: Any, asked: int | None) -> int:
    """Return how many tokens a request may have.

    Raises:
        UsageError: more was asked for than the model's positions allow, or a RoPE whose
            angles depend on the longest row of the batch would come into play.
    """
    limit = _value(config, "max_position_embeddings")
    if isinstance(limit, int) and limit <= 0:
        limit = None
    if asked is not None and limit is not None and asked > limit:
        raise UsageError(
            f"model.max_model_len={asked} is above the model's {limit} positions; "
            f"set it to {limit} or less"
        )
    chosen = asked or limit
    if chosen is None:
        raise UsageError("the model states no maximal length; set model.max_model_len")
    for rope in _ropes(_value(config, "rope_parameters") or {}):
        kind = rope.get("rope_type", rope.get("type", "default"))
        original = (
            rope.get("original_max_position_embeddings")
            or _value(config, "original_max_position_embeddings")
            or limit
        )
        if kind in _LENGTH_DEPENDENT_ROPE and original is not None and chosen > original:
            raise UsageError(
                f"this model's {kind} RoPE turns by the longest row of a batch beyond {original} "
                f"tokens, so a row's result would depend on its neighbours; set "
                f"model.max_model_len={original}"
            )
    return int(chosen)


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield RoPE parameters, which some families nest by the type of layer."""
    if isinstance(parameters, dict):
        yield parameters
        for part in parameters.values():
            yield from _ropes(part)


def _value(config: Any, name: str) -> Any:
    """Return a value of the configuration, or None if there is none or it differs by layer."""
    try:
        return getattr(config, name, None)
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def _refuse_own_attention(config: Any) -> None:
    """Refuse a family that states no maximal length and has an attention of its own.

    Of other families the probing pass says so; here it would be asked for a length first.
    """
    if _value(config, "max_position_embeddings") is not None:
        return
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if family is not None and not family._can_set_attn_implementation():
        raise UsageError(f"{family.__name__} {NOT_CALLED}")


def _has_remote_code(config: Any) -> bool:
    return "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
