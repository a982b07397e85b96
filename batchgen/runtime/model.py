"""Load a stock transformers model, and refuse what would be silently wrong.

The model's own code runs unchanged; only its attention is ours, through transformers'
``AttentionInterface``. Whether that works is found out at load: from the configuration
(``model_kinds``), by one tiny forward pass (``model_probe``), and by comparing logits with the
stock model's (``load_check``).
"""

from dataclasses import dataclass
from importlib.metadata import version
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
from batchgen.runtime.attention import ATTENTION_NAME
from batchgen.runtime.cpu.fused import can_fuse, fuse_elementwise
from batchgen.runtime.cpu.packed_linear import can_pack, pack_linears, packed_bytes
from batchgen.runtime.hub import require_answer, retries_unsaid, taken_as_hub_name
from batchgen.runtime.kv_cache import LayerGeometry
from batchgen.runtime.load_check import check_paged, stock_logits
from batchgen.runtime.model_kinds import (
    NOT_CALLED,
    refuse_kind,
    refuse_layers,
    resolve_max_model_len,
)
from batchgen.runtime.model_probe import ProbeFailedError, probe

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_PICKLES = "pytorch_model*.bin"


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
        UsageError: there is none at this path, transformers does not know it, its weights are
            pickles and may not be, or batchgen does not run such a model.
    """
    _refuse_pickles(source)
    require_answer("model.path", source.path, source.revision)
    try:
        with retries_unsaid():
            whole = AutoConfig.from_pretrained(**source.keywords())
    except Exception as error:  # a family's configuration checks itself as it likes
        where = "" if Path(source.path).exists() else taken_as_hub_name(source.path)
        raise UsageError(
            f"model.path={source.path}: {where}no usable configuration: {_reason(error)}"
        ) from error
    config = whole.get_text_config(decoder=True)
    try:
        refuse_kind(whole)
        refuse_layers(config)
    except UsageError as error:
        raise UsageError(f"model.path={source.path}: {error}") from error
    return config


def load_eos_ids(source: ModelSource, config: Any, tokenizer: Any) -> frozenset[int]:
    """Collect the ids that end a sequence: config's, generation_config's and the tokenizer's.

    An id that the configuration's class has by default counts only where no file names one.

    Args:
        source: where the model comes from.
        config: of the model, see :func:`load_config`.
        tokenizer: a transformers tokenizer, or None if the model has none.
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
    """Return what a model computes in; None if only its weights say that.

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
            or the family cannot run on a paged pool.
    """
    config = load_config(source)
    chosen = resolve_dtype(dtype, device.type, config) or "auto"
    max_model_len = resolve_max_model_len(config, max_model_len)
    model = _move(_load_weights(source, chosen).eval(), device, source)
    try:
        layers = probe(model, max_model_len)
        stock = stock_logits(model, max_model_len)
        if can_pack(device, model.dtype):
            pack_linears(model, lambda: probe(model, max_model_len))
        if can_fuse(device, model.dtype):
            fuse_elementwise(model)
        check_paged(model, layers, stock)
    except UsageError as error:
        raise UsageError(f"model.path={source.path}: {error}") from error
    return LoadedModel(
        model=model,
        layers=layers,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
    )


def geometry_without_weights(
    source: ModelSource, max_model_len: int | None = None
) -> list[LayerGeometry] | None:
    """Probe a model that has shapes but no weights, for planning.

    Returns:
        Geometry of each layer; None if the family cannot run without values.

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
        return probe(model.eval(), resolve_max_model_len(config, max_model_len))
    except ProbeFailedError:
        return None
    except UsageError as error:
        raise UsageError(f"model.path={source.path}: {error}") from error


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
        return UsageError(f"model.path={source.path}: the model {NOT_CALLED}")
    return UsageError(f"model.path={source.path} cannot be loaded: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Return what an error of transformers says; of a KeyError that is only a name."""
    if not isinstance(error, KeyError):
        return str(error)
    return (
        f"it names {error}, which transformers {version('transformers')} does not know (a RoPE "
        "type or an activation, for example); another release of transformers may"
    )
