"""In which numbers the pool keeps keys and values."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.errors import UsageError
from batchgen.runtime.backends import AttentionName
from batchgen.runtime.kv_cache import KVCache, kv_bytes_per_token
from batchgen.runtime.kv_dtype import (
    FP8,
    KVDtype,
    drift_warning,
    measure_format,
    resolve_kv_dtype,
)
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.sampling import SamplingParams
from tests.support.drive import make_attention, make_engine, make_requests, make_scheduler
from tests.support.logits_recorder import LogitsRecorder
from tests.support.tiny_models import save


def _load(directory: Path) -> LoadedModel:
    return load_model(
        ModelSource(str(save("llama", directory))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )


def test_auto_is_the_models_own_and_a_smaller_dtype_warns() -> None:
    for own in (torch.float32, torch.bfloat16):
        assert resolve_kv_dtype(KVDtype.AUTO, own) == own
        assert drift_warning(own, own) is None
    assert resolve_kv_dtype(KVDtype.BFLOAT16, torch.float32) == torch.bfloat16
    assert resolve_kv_dtype(KVDtype.FP8_E4M3, torch.bfloat16) == FP8
    warning = drift_warning(FP8, torch.bfloat16)
    assert warning is not None
    assert "from bfloat16 to float8_e4m3fn, so outputs drift" in warning


@pytest.mark.parametrize(
    ("name", "own"),
    [(KVDtype.FLOAT32, torch.bfloat16), (KVDtype.FLOAT16, torch.bfloat16)],
)
def test_what_saves_nothing_is_refused(name: KVDtype, own: torch.dtype) -> None:
    with pytest.raises(UsageError, match=rf"pool.kv_dtype={name} saves nothing: .* bfloat16"):
        resolve_kv_dtype(name, own)


def test_fp8_needs_the_kernels_that_read_it(tmp_path: Path) -> None:
    loaded = _load(tmp_path)
    for name in AttentionName:
        reason = "TRITON_INTERPRET=1" if name in ("auto", "triton") else "kv_dtype|float32"
        with pytest.raises(UsageError, match=reason):
            make_attention(loaded, name, kv_dtype=FP8)


def test_scales_leave_room_above_the_models_own_numbers(tmp_path: Path) -> None:
    loaded = _load(tmp_path)
    kept = measure_format(loaded, FP8)
    assert measure_format(loaded, torch.bfloat16).scales is None
    assert kept.scales is not None
    # Numbers of another prompt, as transformers itself computes them.
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        cache = model(input_ids=torch.arange(3, 120)[None], use_cache=True).past_key_values
    for scales, layer in zip(kept.scales, cache.layers, strict=True):
        for scale, numbers in ((scales.key, layer.keys), (scales.value, layer.values)):
            largest = numbers[0].abs().amax(dim=(1, 2))
            assert (largest < 448 * scale).all()
            # Not so much that small ones vanish.
            assert (largest > 448 * scale / 20).all()


def test_the_pool_takes_the_bytes_that_the_ledger_says(tmp_path: Path) -> None:
    loaded = _load(tmp_path)
    kept = measure_format(loaded, FP8)
    assert 4 * kv_bytes_per_token(loaded.layers, FP8) == kv_bytes_per_token(
        loaded.layers, torch.float32
    )
    cache = KVCache(
        loaded.layers, 5, 4, num_swap_blocks=0, dtype=FP8, device=torch.device("cpu"),
        scales=kept.scales,
    )  # fmt: skip
    held = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert held == 5 * 4 * kv_bytes_per_token(loaded.layers, FP8)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16])
def test_a_pool_of_half_the_bytes_gives_nearly_the_same_logits(
    kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    loaded = _load(tmp_path)
    runs = []
    for dtype in (torch.float32, kv_dtype):
        scheduler = make_scheduler(20, 4, budget=9, swap_blocks=3)
        attention = make_attention(loaded, AttentionName.TORCH, kv_dtype=dtype)
        engine = make_engine(loaded, scheduler, attention, kv_dtype=dtype)
        engine._executor = recorder = LogitsRecorder(engine)
        params = SamplingParams(max_tokens=1)
        for _ in engine.run(make_requests([list(range(3, 20)), list(range(3, 15))], params)):
            pass
        runs.append([logits for _, logits in recorder.records])
    gaps = [(a - b).abs().max().item() for a, b in zip(*runs, strict=True)]
    assert 0 < max(gaps) < 0.02 * runs[0][0].abs().max()
