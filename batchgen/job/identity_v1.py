"""The fingerprint as manifests of version 1 hold it, so that outputs begun then can go on.

Keys stand there as they were spelt, and files above 64 MiB by samples of their bytes.
"""

import hashlib
from pathlib import Path
from typing import Any

from batchgen.config import Config
from batchgen.data.output.manifest import Fingerprint
from batchgen.job.inputs import JobInputs

_MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt", "*.py")
_CHUNK_BYTES = 64 << 10
_WHOLE_FILE_BYTES = 64 << 20
_SAMPLED_CHUNKS = 256


def as_version_1(new: Fingerprint, config: Config, inputs: JobInputs) -> Fingerprint:
    """Return a fingerprint in the form of version 1.

    Args:
        new: the same in today's form.
        config: the resolved configuration.
        inputs: the opened inputs.
    """
    spec, model = inputs.spec, config.model
    return {
        **new,
        "model": {
            **new["model"],
            "files": _model_files(model.path, model.revision, inputs.model_config),
            "tokenizer": _model_files(model.tokenizer, None, None) if model.tokenizer else None,
            "dtype": model.dtype,
        },
        "pool": {"kv_dtype": config.pool.kv_dtype.value},
        "engine": {**new["engine"], "attention": config.engine.attention.value},
        "prompt": {
            **new["prompt"],
            "column": spec.column,
            "messages_column": spec.messages_column,
            "token_ids_column": spec.token_ids_column,
            "format": spec.format,
        },
        "sampling": {**new["sampling"], "top_k": inputs.sampling.top_k},
        "input": {
            **new["input"],
            "files": _input_files(new["input"]["files"], inputs),
            "limit": config.input.limit,
        },
    }


def _input_files(new: dict[str, dict[str, Any]], inputs: JobInputs) -> dict[str, Any]:
    sampled = {
        file.name: {"digest": sampled_digest(file.path)}
        for file in inputs.source.files
        if isinstance(file.path, Path)
    }
    return {name: {**entry, **sampled.get(name, {})} for name, entry in new.items()}


def _model_files(path: str, revision: str | None, model_config: Any) -> dict[str, Any]:
    where = Path(path)
    if where.is_file():
        return {where.name: sampled_digest(where)}
    if where.is_dir():
        files = {file for pattern in _MODEL_FILES for file in where.glob(pattern)}
        return {file.name: sampled_digest(file) for file in sorted(files) if file.is_file()}
    commit = getattr(model_config, "_commit_hash", None)
    return {"hub": path, "revision": revision, "commit": commit}


def sampled_digest(path: Path) -> str:
    """Return a digest of all of a small file, and of samples of a large one."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
        else:
            for index in range(_SAMPLED_CHUNKS):
                file.seek((size - _CHUNK_BYTES) * index // (_SAMPLED_CHUNKS - 1))
                digest.update(file.read(_CHUNK_BYTES))
    return digest.hexdigest()
