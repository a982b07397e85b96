"""Loading a stock transformers model, and refusing what would be silently wrong.

The model's own code runs unchanged; only its attention is ours, through transformers'
``AttentionInterface``. Whether that works for a family is not read from a list of names:
one tiny forward pass at load time counts the calls of each layer and reads the geometry
of its keys and values.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from batchgen.errors import UsageError
from batchgen.kernels.reference import AttentionOptions
from batchgen.runtime.attention import ATTENTION_NAME
from batchgen.runtime.cpu.fused import can_fuse, fuse_elementwise
from batchgen.runtime.cpu.packed_linear import can_pack, pack_linears, packed_bytes
from batchgen.runtime.hub import require_answer, retries_unsaid, taken_as_hub_name
from batchgen.runtime.kv_cache import LayerGeometry

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# What families pass to the attention function beyond its documented keywords without
# changing what it has to compute (their meaning is elsewhere, or already applied).
_HARMLESS = frozenset({
    "cache_position", "dropout", "is_causal", "logits_to_keep", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "position_embeddings", "return_dict", "use_cache",
})  # fmt: skip
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_NOT_CALLED = (
    "does not call transformers' attention interface, so its attention cannot be replaced by "
    "a paged one"
)
_PICKLES = "pytorch_model*.bin"
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class ProbeFailedError(UsageError):
    """The probing pass itself raised an error."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that passed the probe.

    Attributes:
        model: in evaluation mode, on its device.
        layers: geometry of each layer's K and V.
        max_model_len: prompt and output tokens a request may have.
        vocab_size: token ids lie below it.
    """

    model: PreTrainedModel
    layers: list[LayerGeometry]
    max_model_len: int
    vocab_size: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers, shared ones once, and of packed weights."""
        tensors = {*self.model.parameters(), *self.model.buffers()}
        return sum(tensor.nbytes for tensor in tensors) + packed_bytes(self.model)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        path: a directory, a hub name, or a ``.gguf`` file.
        revision: of a hub name.
        trust_remote_code: run code that comes with the checkpoint.
        allow_pickle: load weights from pickles, which can hold code as well.
    """

    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False

    def keywords(self) -> dict[str, Any]:
        """Arguments for transformers' ``from_pretrained``."""
        keywords: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.path.endswith(".gguf"):
            path = Path(self.path)
            keywords |= {
                "pretrained_model_name_or_path": str(path.parent),
                "gguf_file": path.name,
            }
        else:
            keywords |= {
                "pretrained_model_name_or_path": self.path,
                "revision": self.revision or "main",
            }
        return keywords


def load_config(source: ModelSource) -> Any:
    """Read a model's configuration; no weights.

    Raises:
        UsageError: there is none at this path, transformers does not know it, or its weights
            are pickles and may not be.
    """
    _refuse_pickles(source)
    require_answer("model.path", source.path, source.revision)
    try:
        with retries_unsaid():
            return AutoConfig.from_pretrained(**source.keywords()).get_text_config(decoder=True)
    except Exception as error:  # a family's configuration checks itself as it likes
        where = "" if Path(source.path).exists() else taken_as_hub_name(source.path)
        raise UsageError(
            f"model.path={source.path}: {where}no usable configuration: {error}"
        ) from error


def resolve_max_model_len(config: Any, asked: int | None) -> int:
    """Say how many tokens a request may have.

    Raises:
        UsageError: more was asked for than the model's positions allow, or a RoPE whose
            angles depend on the longest row of the batch would come into play.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if asked is not None and limit is not None and asked > limit:
        raise UsageError(
            f"model.max_model_len={asked} is above the model's {limit} positions; "
            f"set it to {limit} or less"
        )
    chosen = asked or limit
    if chosen is None:
        raise UsageError("the model states no maximal length; set model.max_model_len")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    original = rope.get("original_max_position_embeddings") or limit
    if kind in _LENGTH_DEPENDENT_ROPE and original is not None and chosen > original:
        raise UsageError(
            f"this model's {kind} RoPE turns by the longest row of a batch beyond {original} "
            f"tokens, so a row's result would depend on its neighbours; set "
            f"model.max_model_len={original}"
        )
    return int(chosen)


def load_eos_ids(source: ModelSource, config: Any, tokenizer: Any) -> frozenset[int]:
    """Collect the ids that end a sequence: config's, generation_config's and the tokenizer's.

    An id that the configuration's class has by default counts only where no file names one.

    Args:
        source: where the model comes from.
        config: of the model, see :func:`load_config`.
        tokenizer: a transformers tokenizer, or None where the model has none.
    """
    path = Path(source.path)
    folder = path.parent if path.suffix == ".gguf" else path
    try:
        generation = GenerationConfig.from_pretrained(
            str(folder), revision=source.revision or "main"
        )
    except OSError:
        generation = None
    own = _listed_ids(config)
    named = _listed_ids(generation) | _listed_ids(tokenizer)
    if not named or not _is_default_eos(source, config):
        named |= own
    return frozenset(token for token in named if 0 <= token < config.vocab_size)


def _listed_ids(holder: Any) -> set[int]:
    ids = getattr(holder, "eos_token_id", None)
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def _is_default_eos(source: ModelSource, config: Any) -> bool:
    """Whether no file names the configuration's end of sequence."""
    if config.eos_token_id != getattr(type(config), "eos_token_id", None):
        return False
    written, _ = PreTrainedConfig.get_config_dict(**source.keywords())
    parts = [written, *(part for part in written.values() if isinstance(part, dict))]
    return not any("eos_token_id" in part for part in parts)


def resolve_device(name: str) -> torch.device:
    """Choose the device; ``auto`` is cuda where there is one, else the CPU.

    Raises:
        UsageError: there is no such device, or torch sees no GPU, or not as many.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"model.device={name}, but torch sees no GPU; set model.device=cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"model.device={name}: {error}; set auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(
            f"model.device={name}, but torch sees {count} GPU{'s' if count > 1 else ''}, counted "
            f"from cuda:0"
        )
    return device


def resolve_dtype(name: str, device_type: str, config: Any) -> torch.dtype | None:
    """Return what a model computes in; None where only its weights say that.

    Args:
        name: ``model.dtype``; ``auto`` is float32 on a CPU and else the checkpoint's.
        device_type: ``cpu`` or ``cuda``.
        config: of the model, see :func:`load_config`.
    """
    if name == "auto":
        return torch.float32 if device_type == "cpu" else getattr(config, "dtype", None)
    return DTYPES[name]


def load_model(
    source: ModelSource, *, dtype: str, device: torch.device, max_model_len: int | None
) -> LoadedModel:
    """Load a model with our attention in it and probe it.

    Args:
        source: where it comes from.
        dtype: ``auto`` is the checkpoint's on a GPU and float32 on a CPU.
        device: where it runs.
        max_model_len: a bound below the model's own, or None.

    Raises:
        UsageError: it cannot be loaded, weights are missing, the device has no room for them,
            or the probe refuses it.
    """
    config = load_config(source)
    chosen = resolve_dtype(dtype, device.type, config) or "auto"
    model = _move(_load_weights(source, chosen).eval(), device, source)
    layers = probe(model)
    if can_pack(device, model.dtype):
        pack_linears(model, lambda: probe(model))
    if can_fuse(device, model.dtype):
        fuse_elementwise(model)
    return LoadedModel(
        model=model,
        layers=layers,
        max_model_len=resolve_max_model_len(config, max_model_len),
        vocab_size=config.vocab_size,
    )


def geometry_without_weights(source: ModelSource) -> list[LayerGeometry] | None:
    """Probe a model that has shapes but no weights, for planning.

    Returns:
        Geometry of each layer; None where the family cannot run without values.

    Raises:
        UsageError: the family cannot run on a paged pool.
    """
    config = load_config(source)
    try:
        with torch.device("meta"):
            model = cast(Any, AutoModelForCausalLM).from_config(
                config,
                attn_implementation=ATTENTION_NAME,
                dtype=torch.bfloat16,
                trust_remote_code=source.trust_remote_code,
            )
    except Exception as error:  # a family's code fails as it likes
        raise _refusal(source, error) from error
    try:
        return probe(model.eval())
    except ProbeFailedError:
        return None


def _refuse_pickles(source: ModelSource) -> None:
    folder = Path(source.path)
    if source.allow_pickle or not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in folder.glob(_PICKLES))
    if pickles:
        raise UsageError(
            f"model.path={source.path} has its weights in {pickles[0]}, a pickle, which can run "
            "code when it is loaded. Convert it to safetensors, or set model.allow_pickle=true "
            "if you trust where it comes from"
        )


def _load_weights(source: ModelSource, dtype: torch.dtype | str) -> Any:
    is_gguf = source.path.endswith(".gguf")
    try:
        model, report = cast(
            tuple[Any, dict[str, Any]],
            AutoModelForCausalLM.from_pretrained(
                **source.keywords(),
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                output_loading_info=True,
                # None takes what is there, safetensors first.
                use_safetensors=None if source.allow_pickle or is_gguf else True,
            ),
        )
    except Exception as error:  # a family's code fails as it likes
        raise _refusal(source, error) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"model.path={source.path}: the checkpoint has no weights for "
            f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}; they would be random"
        )
    return model


def _move(model: Any, device: torch.device, source: ModelSource) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        gib = sum(parameter.nbytes for parameter in model.parameters()) / (1 << 30)
        raise UsageError(
            f"model.path={source.path}: its weights take {gib:.1f} GiB, for which {device} has no "
            f"room; set a model.dtype of fewer bytes or another model.device, or end what else "
            f"uses the card: {error}"
        ) from error


def _refusal(source: ModelSource, error: Exception) -> UsageError:
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        # The family looks its attention up in a table of its own.
        return UsageError(f"model.path={source.path}: the model {_NOT_CALLED}")
    return UsageError(f"model.path={source.path} cannot be loaded: {error}")


@dataclass(slots=True)
class _Probe:
    """Stands behind the ``paged`` keyword in the probing pass and takes notes."""

    calls: list[int] = field(default_factory=list)
    layers: dict[int, LayerGeometry] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        extra: dict[str, object],
    ) -> torch.Tensor:
        """Note the call; see :meth:`LayerAttention.attend`."""
        index = getattr(layer, "layer_idx", None)
        if not isinstance(index, int):
            self.problems.append("an attention layer does not know its index")
            return query
        self.calls.append(index)
        self.layers[index] = LayerGeometry(
            num_kv_heads=key.shape[1],
            key_size=key.shape[2],
            value_size=value.shape[2],
            window=options.window,
            group=query.shape[1] // key.shape[1],
        )
        self.unknown |= {
            name for name, given in extra.items() if given is not None and name not in _HARMLESS
        }
        if query.shape[1] % key.shape[1]:
            self.problems.append(
                f"{query.shape[1]} query heads are no multiple of {key.shape[1]} KV heads"
            )
        if query.shape[2] != key.shape[2] or key.shape[2] != value.shape[2]:
            self.problems.append(
                f"heads of {query.shape[2]}, {key.shape[2]} and {value.shape[2]} for query, key "
                f"and value (multi-head latent attention keeps its KV in another form)"
            )
        if getattr(layer, "is_causal", True) is False:
            self.problems.append(f"layer {index} is not causal")
        return query.new_zeros(*query.shape[:2], value.shape[2])


@torch.inference_mode()
def probe(model: PreTrainedModel) -> list[LayerGeometry]:
    """Run one tiny forward pass and read how the model calls its attention.

    Returns:
        Geometry of each layer.

    Raises:
        UsageError: the family cannot run on a paged pool; the reason is named.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if foreign:
        raise UsageError(
            f"{name} has layers of type {', '.join(foreign)}, whose state is not a KV cache"
        )
    notes = _Probe()
    ids = torch.zeros((1, 3), dtype=torch.long, device=model.device)
    try:
        model(
            input_ids=ids,
            position_ids=torch.arange(3, device=model.device)[None],
            use_cache=False,
            logits_to_keep=torch.tensor([2], device=model.device),
            paged=notes,
        )
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ProbeFailedError(
            f"{name} does not run with a replaced attention: {type(error).__name__}: {error}"
        ) from error
    _judge(name, notes, config.num_hidden_layers)
    return [notes.layers[index] for index in range(config.num_hidden_layers)]


def _judge(name: str, notes: _Probe, num_layers: int) -> None:
    if not notes.calls:
        raise UsageError(f"{name} {_NOT_CALLED}")
    if sorted(notes.calls) != list(range(num_layers)):
        raise UsageError(
            f"{name} called attention {len(notes.calls)} times for {num_layers} layers; layers "
            f"whose state is not a KV cache, or that share one, are not supported"
        )
    if notes.unknown:
        raise UsageError(
            f"{name} hands its attention {', '.join(sorted(notes.unknown))}, which batchgen "
            f"does not implement; leaving it out would give wrong results"
        )
    if notes.problems:
        raise UsageError(f"{name}: {notes.problems[0]}; this is not supported")
