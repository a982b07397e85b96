"""The job's fingerprint: all that can change a result's text, and nothing else."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from batchgen.config import Config
from batchgen.data.digest import file_digest
from batchgen.data.output.manifest import Fingerprint
from batchgen.job.front import model_source
from batchgen.job.inputs import JobInputs
from batchgen.job.template_time import FINGERPRINT_KEY
from batchgen.prompts.source import Source, settle_source
from batchgen.runtime.backends import AttentionName, AttentionNeeds, resolve_attention
from batchgen.runtime.kv_dtype import KVDtype, resolve_kv_dtype
from batchgen.runtime.model import geometry_without_weights, resolve_device, resolve_dtype
from batchgen.runtime.model_files import text_files, weight_files

_COLUMN_KEYS = {
    Source.TEXT: "column",
    Source.MESSAGES: "messages_column",
    Source.TOKEN_IDS: "token_ids_column",
}


def fingerprint(config: Config, inputs: JobInputs, *, device: str, id_digest: str) -> Fingerprint:
    """Collect what a resumed run must share with the run before it.

    What a key's ``auto``, or its absence, comes to stands here, so that it does not matter
    which of two ways to say the same was taken.

    Pool sizes, batch sizes and orders are left out: they change no text (in half
    precision a near-tie may fall otherwise, as it may between two runs of one batch size).

    Args:
        config: the resolved configuration.
        inputs: the opened inputs.
        device: type of the device, ``cpu`` or ``cuda``.
        id_digest: digest over the ids that the run reads.

    Raises:
        UsageError: a file cannot be read, or the model cannot run with these keys.
    """
    dtype, kv_dtype, attention = _numerics(config, inputs.model_config)
    limit = config.input.limit
    return {
        "model": {
            "files": _model_files(config, inputs.model_config),
            "tokenizer": _tokenizer_files(config),
            "dtype": dtype,
            "device": device,
            "max_model_len": inputs.limits.max_model_len,
        },
        "pool": {"kv_dtype": kv_dtype},
        "engine": {"attention": attention, "deterministic": config.engine.deterministic},
        "prompt": _prompt(config, inputs),
        "sampling": {
            **asdict(inputs.sampling),
            "top_k": max(0, inputs.sampling.top_k),
            "score_calibration": config.sampling.score_calibration.value,
            "score_prior": config.sampling.score_prior,
        },
        "input": {
            "files": {str(each["name"]): each for each in inputs.source.identity()},
            "id_column": config.input.id_column,
            "limit": limit if limit and limit < inputs.source.num_rows else None,
            "ids": id_digest,
        },
        "output": {"carry_columns": inputs.carried.names if inputs.carried is not None else []},
    }


def _prompt(config: Config, inputs: JobInputs) -> dict[str, Any]:
    spec = inputs.spec
    values = asdict(spec)
    shots = values.pop("shots")
    del values["shot_places"], values["variables"]
    source, column = settle_source(spec, inputs.source.schema.names)
    return {
        **values,
        **{key: column if source is each else None for each, key in _COLUMN_KEYS.items()},
        "format": inputs.renderer.format,
        "shots": _digest(shots),
        "source": source.value,
        "tools_column": inputs.renderer.tools_column,
        # Keys that are not set are absent, as in outputs from before there were these.
        "chat_template_kwargs": spec.variables.named or None,
        "continue_final_message": spec.continue_final_message or None,
        FINGERPRINT_KEY: inputs.template_time,
        "truncation": config.prompt.truncation.value,
    }


def _numerics(config: Config, model_config: Any) -> tuple[str, str, str]:
    """Return the dtypes of model and pool, and the attention backend.

    They are as spelt where nothing but the loaded model can tell what ``auto`` comes to.
    """
    device = resolve_device(config.model.device)
    attention = AttentionName(config.engine.attention.value)
    dtype = resolve_dtype(config.model.dtype, device.type, model_config)
    if dtype is None:
        return config.model.dtype, config.pool.kv_dtype.value, attention
    kv_dtype = resolve_kv_dtype(KVDtype(config.pool.kv_dtype.value), dtype)
    if attention is AttentionName.AUTO:
        layers = geometry_without_weights(model_source(config.model), config.model.max_model_len)
        deterministic = config.engine.deterministic
        if layers is not None:
            needs = AttentionNeeds(layers, device, dtype, kv_dtype, deterministic=deterministic)
            attention = resolve_attention(attention, needs)
    return _dtype_name(dtype), _dtype_name(kv_dtype), attention


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _model_files(config: Config, model_config: Any) -> dict[str, Any]:
    model = config.model
    where = Path(model.path)
    if where.is_file():
        beside = where.parent / "generation_config.json"
        return _digests([where, *([beside] if beside.is_file() else [])], where.parent)
    if where.is_dir():
        weights = weight_files(where, allow_pickle=model.allow_pickle)
        return _digests({*text_files(where), *weights}, where)
    commit = getattr(model_config, "_commit_hash", None)
    return {"hub": model.path, "revision": None if commit else model.revision, "commit": commit}


def _tokenizer_files(config: Config) -> dict[str, Any] | None:
    """Return what tells a tokenizer of its own; None for the model's, however it is named."""
    path, model = config.model.tokenizer, config.model
    if path is None or (path == model.path and model.revision in (None, "main")):
        return None
    where, own = Path(path), Path(model.path)
    if where.exists() and own.exists() and where.samefile(own):
        return None
    if where.is_dir():
        return _digests(text_files(where), where)
    return _digests([where], where.parent) if where.is_file() else {"hub": path}


def _digests(files: Iterable[Path], folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file_digest(file) for file in sorted(files)}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
