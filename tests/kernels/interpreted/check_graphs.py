"""Decode steps as graphs over the real kernels: recorded launches that start again."""

from pathlib import Path

import numpy as np
import pytest
import torch

from batchgen.engine.core import EngineCore
from batchgen.kernels.triton.launch import Launch
from batchgen.runtime import model as model_module
from batchgen.runtime import triton_attention
from batchgen.runtime.attention import AttentionBackend, ModelForward
from batchgen.runtime.device.graphs import DecodeGraphs
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.runtime.shared_prefixes import SharedPrefix
from batchgen.runtime.torch_attention import TorchAttention
from batchgen.runtime.triton_attention import TritonAttention
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.model_device import ModelDevice, Temper
from tests.support.tiny_models import save


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ModelDevice:
    """A device that records launches as well as operators."""
    device, start = ModelDevice(Temper.LATE), Launch.run

    def launch(prepared: Launch) -> None:
        if device.graph_pools:
            device.graph_pools[0].launch(lambda: start(prepared))
        else:
            start(prepared)

    monkeypatch.setattr(Launch, "run", launch)
    monkeypatch.setattr(model_module, "can_fuse", lambda device, dtype: False)
    return device


def _outputs(
    loaded: LoadedModel, attention: AttentionBackend, device: ModelDevice, prefix: int,
    num_blocks: int, *, graphs: bool,
) -> tuple[list[list[int]], ModelExecutor]:  # fmt: skip
    """Rows of several lengths behind a common prefix, one step ahead; one has to make room."""
    cache = KVCache(
        loaded.layers, num_blocks, 4, num_swap_blocks=9, dtype=torch.float32,
        device=torch.device("cpu"), uses_triton=attention.name == "triton",
    )  # fmt: skip
    decode = None
    if graphs:
        assert isinstance(attention, TritonAttention)
        decode = DecodeGraphs(
            device, ModelForward(loaded.model), cache, attention,
            max_rows=4, max_keys=48, say=pytest.fail, patience=0,
        )  # fmt: skip
    executor = ModelExecutor(loaded.model, cache, attention, device, decode)
    scheduler = make_scheduler(num_blocks, 4, swap_blocks=9, budget=14)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 199, prefix).tolist()
    prompts = [shared + rng.integers(3, 199, n).tolist() for n in (2, 1, 3)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (7, 8, 9)]
    engine = EngineCore(scheduler, executor, overlap=True)
    finished = run_all(engine, make_requests(prompts, params))
    assert scheduler.counters.preemptions > 0
    return [request.output_token_ids for request in finished], executor


@pytest.mark.parametrize(
    ("deterministic", "prefix", "num_blocks"), [(False, 10, 6), (True, 33, 14)]
)
def test_tokens_of_recorded_launches_equal_those_of_the_torch_path(
    deterministic: bool,
    prefix: int,
    num_blocks: int,
    device: ModelDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Shared runs are cut where tiles end, which are smaller here than on a GPU.
    monkeypatch.setattr(triton_attention, "MOST_KEYS", 32)
    loaded = load_model(
        ModelSource(str(save("llama", tmp_path, num_layers=1))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )
    sizes = prefix, num_blocks
    expected, _ = _outputs(loaded, TorchAttention(), device, *sizes, graphs=False)
    attention = TritonAttention(loaded.layers, SharedPrefix.ON, deterministic=deterministic)
    tokens, executor = _outputs(loaded, attention, device, *sizes, graphs=True)
    assert tokens == expected
    assert executor.graph_steps == device.replays > 2
    assert {shape.num_levels for shape in executor._graphs._graphs} == {0, 1}
