"""Whether the values of what an engine is built from make sense: model, pool and engine.

The command and the Python API look at them before anything is loaded.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from batchgen.config import Config, EngineConfig, ModelConfig, PoolConfig

# Far more than a machine runs; arrays and threads are made for so many at the start.
MOST_SEQS = 1 << 20
MOST_THREADS = 1 << 12
_DTYPES = ("auto", "float32", "float16", "bfloat16")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")


def engine_complaints(config: Config) -> Iterator[str]:
    """Name every key of the three groups whose value makes no sense, and what to do."""
    yield from _model(config.model)
    yield from _pool(config.pool)
    yield from _engine(config.engine)


def at_least(key: str, value: int | None, least: int) -> Iterator[str]:
    """Complain of a count that is too small; null is none."""
    if value is not None and value < least:
        yield f"{key}={value} must be at least {least}."


def between(key: str, value: int | None, least: int, most: int) -> Iterator[str]:
    """Complain of a count out of its range; null is none."""
    if value is not None and not least <= value <= most:
        yield f"{key}={value} must lie between {least} and {most}."


def _model(model: ModelConfig) -> Iterator[str]:
    path = Path(model.path)
    # What is only an adapter is refused with what to do about it.
    is_model = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    if path.is_dir() and not is_model:
        yield (
            f"model.path={path} holds no config.json, so it is not a model's directory. "
            "Name the directory that does, or a .gguf file."
        )
    if model.revision == "":
        yield "model.revision is empty. Name a branch, tag or commit, or leave it out."
    if model.dtype not in _DTYPES:
        yield f"model.dtype={model.dtype} must be one of {', '.join(_DTYPES)}."
    if not _DEVICE.fullmatch(model.device):
        yield f"model.device={model.device} must be auto, cpu, cuda or cuda:N."
    yield from at_least("model.max_model_len", model.max_model_len, 1)


def _pool(pool: PoolConfig) -> Iterator[str]:
    if not 4 <= pool.block_size <= 256:
        yield f"pool.block_size={pool.block_size} must lie between 4 and 256."
    if not 0 < pool.gpu_memory_utilization <= 1:
        yield (
            f"pool.gpu_memory_utilization={pool.gpu_memory_utilization} must be above 0 and at "
            "most 1."
        )
    yield from at_least("pool.num_blocks", pool.num_blocks, 1)
    yield from at_least("pool.swap_blocks", pool.swap_blocks, 0)
    if pool.cpu_memory_gib is not None and not 0 < pool.cpu_memory_gib < math.inf:
        yield f"pool.cpu_memory_gib={pool.cpu_memory_gib} must be a positive number."
    if pool.swap_gib is not None and not 0 <= pool.swap_gib < math.inf:
        yield f"pool.swap_gib={pool.swap_gib} must be 0 (no swapping) or a positive number."


def _engine(engine: EngineConfig) -> Iterator[str]:
    yield from between("engine.max_num_seqs", engine.max_num_seqs, 1, MOST_SEQS)
    yield from at_least("engine.max_num_batched_tokens", engine.max_num_batched_tokens, 1)
    yield from between("engine.threads", engine.threads, 1, MOST_THREADS)
    if engine.stall_s is not None and not 0 < engine.stall_s < math.inf:
        yield f"engine.stall_s={engine.stall_s} must be a positive number of seconds, or null."
