"""The whole engine with engine.attention=triton on CPU tensors, against the torch path."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from batchgen.engine.core import EngineCore, PendingOutput
from batchgen.kernels.reference import store_kv
from batchgen.runtime import torch_attention, triton_attention
from batchgen.runtime.backends import AttentionName
from batchgen.runtime.kv_cache import KVFormat, window_of_all
from batchgen.runtime.kv_dtype import FP8, measure_format
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.runtime.shared_prefixes import SharedPrefix
from batchgen.sampling import SamplingParams
from tests.support.drive import make_attention, make_engine, make_requests, make_scheduler, run_all
from tests.support.fast_interpreter import convert_to_fp8_by_torch
from tests.support.logits_recorder import LogitsRecorder
from tests.support.tiny_models import save


class _Counting:
    """Notes what the plans that pass through ask for."""

    def __init__(self, engine: EngineCore, counts: Counter[str]) -> None:
        self._executor = engine._executor
        self._counts = counts

    def execute(self, plan: Any) -> PendingOutput:
        self._counts["steps"] += 1
        self._counts["copied blocks"] += len(plan.copies)
        self._counts["swapped out"] += len(plan.swap_out)
        self._counts["swapped in"] += len(plan.swap_in)
        lengths = np.diff(plan.query_starts)
        prefilled = plan.context_lens - lengths
        self._counts["chunks"] += int(((lengths > 1) & (prefilled > 0)).sum())
        return self._executor.execute(plan)


def _prompts() -> list[list[int]]:
    """A prefix that ends inside a block, branches of it, and a prompt longer than a step."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 199, 10).tolist()
    own = [rng.integers(3, 199, n).tolist() for n in (2, 1, 6, 3)]
    return [*[shared + tail for tail in own], rng.integers(3, 199, 17).tolist()]


def _load(family: str, directory: Path, num_layers: int = 2) -> LoadedModel:
    return load_model(
        ModelSource(str(save(family, directory, num_layers=num_layers))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )


def _tokens(
    loaded: LoadedModel,
    name: AttentionName,
    counts: Counter[str],
    *,
    block_size: int,
    num_blocks: int,
    new_tokens: int,
) -> list[list[int]]:
    scheduler = make_scheduler(
        num_blocks, block_size, swap_blocks=20, budget=14, window=window_of_all(loaded.layers)
    )
    attention = make_attention(loaded, name, sharing=SharedPrefix.ON)
    engine = make_engine(loaded, scheduler, attention)
    engine._executor = _Counting(engine, counts)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    finished = run_all(engine, make_requests(_prompts(), params))
    return [request.output_token_ids for request in finished]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What was in play in the runs of a test, cascades among it."""
    counts: Counter[str] = Counter()
    cascade = triton_attention.cascade_attention

    def counting(*arguments: Any, **keywords: Any) -> torch.Tensor:
        counts["cascades"] += 1
        return cascade(*arguments, **keywords)

    monkeypatch.setattr(triton_attention, "cascade_attention", counting)
    return counts


# Grouped heads; a window in every layer; soft caps, and windows in some layers; sinks as well.
# The interpreter is slow: one layer of each kind.
@pytest.mark.parametrize(
    ("family", "num_layers"), [("llama", 1), ("mistral", 1), ("gemma2", 2), ("gpt_oss", 2)]
)
def test_tokens_equal_those_of_the_torch_path(
    family: str, num_layers: int, tmp_path: Path, counts: Counter[str]
) -> None:
    loaded = _load(family, tmp_path, num_layers)
    sizes = {"block_size": 4, "num_blocks": 12, "new_tokens": 2}
    expected = _tokens(loaded, AttentionName.TORCH, Counter(), **sizes)
    assert _tokens(loaded, AttentionName.TRITON, counts, **sizes) == expected
    assert counts["copied blocks"] > 0
    assert counts["chunks"] > 0
    assert (counts["cascades"] > 0) == (family != "mistral")


def test_tokens_are_the_same_where_rows_make_room(tmp_path: Path, counts: Counter[str]) -> None:
    loaded = _load("llama", tmp_path, num_layers=1)
    sizes = {"block_size": 2, "num_blocks": 17, "new_tokens": 5}
    expected = _tokens(loaded, AttentionName.TORCH, Counter(), **sizes)
    assert _tokens(loaded, AttentionName.TRITON, counts, **sizes) == expected
    for what in ("swapped out", "swapped in", "chunks", "cascades"):
        assert counts[what] > 0, what


def _rounding_store(engine: EngineCore, kept: KVFormat) -> Any:
    """The torch path's store, with numbers rounded on their way as an fp8 pool does."""
    cache = engine._executor._executor.cache
    assert kept.scales is not None
    scales = {
        pool.data_ptr(): scale[:, None]
        for keys, values, both in zip(cache.keys, cache.values, kept.scales, strict=True)
        for pool, scale in ((keys, both.key), (values, both.value))
    }

    def store(pool: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> None:
        scale = scales[pool.data_ptr()]
        rounded = (new / scale).clamp(-448, 448).to(FP8).float() * scale
        store_kv(pool, rounded, slots)

    return store


def test_an_fp8_pool_gives_the_logits_of_rounded_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "_convert_float", convert_to_fp8_by_torch)
    loaded = _load("llama", tmp_path)
    kept = measure_format(loaded, FP8)
    runs = []
    for name, kv_format in (
        (AttentionName.TORCH, KVFormat(torch.float32)),
        (AttentionName.TRITON, kept),
    ):
        scheduler = make_scheduler(12, 4, budget=9)
        attention = make_attention(loaded, name, kv_dtype=kv_format.dtype)
        engine = make_engine(
            loaded, scheduler, attention, kv_dtype=kv_format.dtype, scales=kv_format.scales
        )
        monkeypatch.setattr(torch_attention, "store_kv", _rounding_store(engine, kept))
        engine._executor = recorder = LogitsRecorder(engine)
        params = SamplingParams(max_tokens=1)
        run_all(engine, make_requests([list(range(3, 16)), list(range(3, 12))], params))
        runs.append([logits for _, logits in recorder.records])
    for expected, got in zip(*runs, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
