"""In which numbers the pool keeps keys and values, and the scales of an fp8 pool."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch

from batchgen.errors import UsageError
from batchgen.kernels.reference import AttentionOptions, paged_attention
from batchgen.kernels.triton.batch import KVScales
from batchgen.runtime.attention import ModelForward
from batchgen.runtime.kv_cache import KVFormat, is_fp8
from batchgen.runtime.model import LoadedModel

FP8 = torch.float8_e4m3fn
# Made-up tokens from which an fp8 pool's scales are measured.
_CALIBRATION_TOKENS = 256
# Room above the largest number that was measured. An e4m3 number keeps its relative precision
# over 14 powers of two, so room costs nothing; what is larger still is cut off.
_HEADROOM = 4.0


class KVDtype(StrEnum):
    """``pool.kv_dtype``; auto is the model's own dtype."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "fp8_e4m3"


_DTYPES = {
    KVDtype.FLOAT32: torch.float32,
    KVDtype.FLOAT16: torch.float16,
    KVDtype.BFLOAT16: torch.bfloat16,
    KVDtype.FP8_E4M3: FP8,
}


def resolve_kv_dtype(name: KVDtype, model_dtype: torch.dtype) -> torch.dtype:
    """Choose the pool's dtype: the model's, or one of fewer bytes.

    Raises:
        UsageError: it would keep no less than the model's own and not the same.
    """
    chosen = _DTYPES.get(name, model_dtype)
    if chosen != model_dtype and chosen.itemsize >= model_dtype.itemsize:
        own = str(model_dtype).removeprefix("torch.")
        raise UsageError(
            f"pool.kv_dtype={name} saves nothing: the model computes in {own}; set "
            f"pool.kv_dtype=auto, or a smaller dtype such as fp8_e4m3"
        )
    return chosen


def drift_warning(kv_dtype: torch.dtype, model_dtype: torch.dtype) -> str | None:
    """Return what a smaller dtype costs; None if nothing is rounded."""
    if kv_dtype == model_dtype:
        return None
    own, kept = (str(dtype).removeprefix("torch.") for dtype in (model_dtype, kv_dtype))
    return (
        f"pool.kv_dtype: keys and values are rounded from {own} to {kept}, so outputs drift "
        f"from the model's own"
    )


def measure_format(loaded: LoadedModel, dtype: torch.dtype) -> KVFormat:
    """Measure the scales of an fp8 pool on one made-up prompt; other dtypes need none.

    They depend on the model alone: not on a row, nor on what runs beside it.
    """
    if not is_fp8(dtype):
        return KVFormat(dtype)
    num_tokens = min(_CALIBRATION_TOKENS, loaded.max_model_len)
    # Fixed numbers of no meaning; a generator's could differ by release.
    ids = np.arange(1, num_tokens + 1) * 7919 % loaded.vocab_size
    device = loaded.model.device
    notes = _LargestNumbers()
    forward = ModelForward(loaded.model)
    last = torch.tensor([num_tokens - 1], device=device)
    positions = torch.arange(num_tokens, device=device)
    forward(torch.from_numpy(ids).to(device), positions, last, notes)
    return KVFormat(dtype, [notes.scales[index] for index in range(len(loaded.layers))])


@dataclass(slots=True)
class _LargestNumbers:
    """An attention that notes how large keys and values are."""

    scales: dict[int, KVScales] = field(default_factory=dict)

    def attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        extra: dict[str, object],
    ) -> torch.Tensor:
        """See :meth:`batchgen.runtime.attention.LayerAttention.attend`."""
        index = layer.layer_idx
        assert isinstance(index, int)
        self.scales[index] = KVScales(_scale(key), _scale(value))
        # One row in one block.
        table = torch.zeros((1, 1), dtype=torch.int64, device=query.device)
        ends = [len(query)]
        return paged_attention(query, key[None], value[None], [0, *ends], ends, table, options)


def _scale(numbers: torch.Tensor) -> torch.Tensor:
    """Return what [T, Hkv, D] numbers are divided by: [Hkv] float32."""
    largest = numbers.float().abs().amax(dim=(0, 2))
    return largest.clamp_min(1e-6) * (_HEADROOM / torch.finfo(FP8).max)
