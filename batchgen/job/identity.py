"""The job's fingerprint: all that can change a result's text, and nothing else."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchgen.config import Config
from batchgen.data.digest import file_digest
from batchgen.data.output.manifest import Fingerprint
from batchgen.job.inputs import JobInputs, prompt_spec

# What transformers reads from a model's directory; other files there change nothing.
_MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt", "*.py")


def fingerprint(config: Config, inputs: JobInputs, *, device: str, id_digest: str) -> Fingerprint:
    """Collect what a resumed run must share with the run before it.

    Pool sizes, batch sizes and orders are left out: they change no text (in half
    precision a near-tie may fall otherwise, as it may between two runs of one batch size).

    Args:
        config: the resolved configuration.
        inputs: the opened inputs.
        device: type of the device, ``cpu`` or ``cuda``.
        id_digest: digest over the ids that the run reads.
    """
    spec = asdict(prompt_spec(config.prompt))
    shots = spec.pop("shots")
    del spec["shot_places"]
    return {
        "model": {
            "files": _model_files(config.model.path, config.model.revision, inputs.model_config),
            "tokenizer": _tokenizer_files(config),
            "dtype": config.model.dtype,
            "device": device,
            "max_model_len": inputs.limits.max_model_len,
        },
        "pool": {"kv_dtype": config.pool.kv_dtype.value},
        "engine": {
            "attention": config.engine.attention.value,
            "deterministic": config.engine.deterministic,
        },
        "prompt": {
            **spec,
            "shots": _digest(shots),
            "source": inputs.renderer.source.value,
            "truncation": config.prompt.truncation.value,
        },
        "sampling": {
            **asdict(inputs.sampling),
            "score_calibration": config.sampling.score_calibration.value,
            "score_prior": config.sampling.score_prior,
        },
        "input": {
            "files": _input_files(inputs),
            "id_column": config.input.id_column,
            "limit": config.input.limit,
            "ids": id_digest,
        },
        "output": {"carry_columns": inputs.carried.names if inputs.carried is not None else []},
    }


def _model_files(path: str, revision: str | None, model_config: Any) -> dict[str, Any]:
    where = Path(path)
    if where.is_file():
        return {where.name: file_digest(where)}
    if where.is_dir():
        files = {file for pattern in _MODEL_FILES for file in where.glob(pattern)}
        return {file.name: file_digest(file) for file in sorted(files)}
    commit = getattr(model_config, "_commit_hash", None)
    return {"hub": path, "revision": revision, "commit": commit}


def _input_files(inputs: JobInputs) -> dict[str, Any]:
    """Give the input's files in their order."""
    return {str(each["name"]): each for each in inputs.source.identity()}


def _tokenizer_files(config: Config) -> dict[str, Any] | None:
    path = config.model.tokenizer
    return _model_files(path, None, None) if path else None


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
