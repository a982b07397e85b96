"""Step inputs and results on a device that is as late, or as early, as its fences allow."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from batchgen.engine.core import EngineCore
from batchgen.errors import EngineError
from batchgen.runtime.attention import ModelForward
from batchgen.runtime.backends import AttentionName
from batchgen.runtime.device.api import HostDevice
from batchgen.runtime.device.transfers import (
    Downloads,
    SampledTokenBuffers,
    Uploads,
    fill_placeholders,
)
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.sampling import SamplingParams
from tests.support.drive import make_attention, make_requests, make_scheduler, run_all
from tests.support.model_device import ModelDevice, ModelEvent, Temper
from tests.support.tiny_models import save

_TEMPERS = st.sampled_from(Temper)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(
        ModelSource(str(save("llama", Path(tmp_path_factory.mktemp("llama"))))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )


@st.composite
def _arrays(draw: st.DrawFn) -> list[np.ndarray]:
    """Arrays of one step; now and then more than the buffers hold."""
    arrays = []
    for _ in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from((np.int64, np.int32, np.float64, np.bool_)))
        rows, columns = draw(st.integers(0, 40)), draw(st.sampled_from((1, 3, 40, 400)))
        arrays.append((np.arange(rows * columns) * 7 % 251).reshape(rows, columns).astype(dtype))
    return arrays


def _upload_all(device: Any, steps: list[list[np.ndarray]]) -> list[list[torch.Tensor]]:
    """Upload steps one after another, and let each step's work take what it sees."""
    uploads, seen = Uploads(device), []

    def take(tensors: list[torch.Tensor]) -> None:
        seen.append([tensor.clone() for tensor in tensors])

    for number, arrays in enumerate(steps):
        uploads.begin()
        # The same object is written over after it was packed, as a caller may.
        packed = [array.copy() for array in arrays]
        tensors = [uploads.put(array) for array in packed]
        for array in packed:
            array.fill(number)
        uploads.send()
        device.compute.run(lambda tensors=tensors: take(tensors))
    device.finish()
    return seen


@settings(deadline=None, max_examples=60)
@given(temper=_TEMPERS, steps=st.lists(_arrays(), min_size=1, max_size=6))
def test_every_step_sees_its_own_arrays(temper: Temper, steps: list[list[np.ndarray]]) -> None:
    for arrays, tensors in zip(steps, _upload_all(ModelDevice(temper), steps), strict=True):
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.numpy().dtype == array.dtype
            np.testing.assert_array_equal(tensor.numpy(), array)


def test_without_its_fence_an_upload_is_overwritten_before_it_is_read(monkeypatch) -> None:
    steps = [[np.full((3, 3), number)] for number in range(5)]
    assert [int(t[0][0, 0]) for t in _upload_all(ModelDevice(Temper.LATE), steps)] == [
        0,
        1,
        2,
        3,
        4,
    ]
    monkeypatch.setattr(ModelEvent, "is_done", lambda self: True)
    assert [int(t[0][0, 0]) for t in _upload_all(ModelDevice(Temper.LATE), steps)] != [
        0,
        1,
        2,
        3,
        4,
    ]


def test_arrays_lie_where_kernels_may_read_whole_vectors() -> None:
    uploads = Uploads(HostDevice())
    uploads.begin()
    first = uploads.put(np.zeros(3, dtype=np.int64)).data_ptr()
    assert (uploads.put(np.zeros(3, dtype=np.int32)).data_ptr() - first) % 128 == 0


@settings(deadline=None, max_examples=40)
@given(temper=_TEMPERS, counts=st.lists(st.integers(0, 900), min_size=1, max_size=6))
def test_tokens_arrive_as_they_were_sampled_one_or_two_steps_later(
    temper: Temper, counts: list[int]
) -> None:
    device = ModelDevice(temper)
    downloads, sampled = Downloads(device), SampledTokenBuffers(device)
    waiting, found = [], []
    for number, count in enumerate(counts):
        _, tokens = sampled.begin(count)
        device.compute.run(lambda tokens=tokens, number=number: tokens.fill_(number))
        waiting.append(downloads.send(tokens))
        if number:
            found.append(waiting[number - 1].tokens())
    found.append(waiting[-1].tokens())
    for number, (count, tokens) in enumerate(zip(counts, found, strict=True)):
        assert tokens.tolist() == [number] * count


def test_tokens_of_a_step_that_nobody_waited_for_do_no_harm() -> None:
    device = ModelDevice(Temper.LATE)
    downloads, sampled = Downloads(device), SampledTokenBuffers(device)
    arrivals = []
    for number in range(4):
        _, tokens = sampled.begin(2)
        device.compute.run(lambda tokens=tokens, number=number: tokens.fill_(number))
        arrivals.append(downloads.send(tokens))
    assert arrivals[3].tokens().tolist() == [3, 3]


def test_a_step_reads_what_the_one_before_sampled() -> None:
    token_ids = torch.tensor([7, -1, -3, 0, -2])
    fill_placeholders(token_ids, torch.tensor([40, -1, 60, 99]))
    # A row that got no token runs token 0.
    assert token_ids.tolist() == [7, 40, 60, 0, 0]


def _engine(
    loaded: LoadedModel, device: Any, *, ahead: bool = False, num_blocks: int = 60
) -> EngineCore:
    scheduler = make_scheduler(num_blocks, 4, budget=24, swap_blocks=8, eos=(2, 9, 30, 77))
    cache = KVCache(
        loaded.layers,
        num_blocks,
        4,
        num_swap_blocks=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    attention = make_attention(loaded, AttentionName.TORCH)
    executor = ModelExecutor(loaded.model, cache, attention, device)
    return EngineCore(scheduler, executor, overlap=ahead)


def _params() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.8, top_k=20, ignore_eos=True),
        SamplingParams(max_tokens=10, temperature=1.0, top_p=0.7, min_p=0.01, ignore_eos=True),
        SamplingParams(max_tokens=11, temperature=1.3, min_tokens=5, stop_token_ids=(7,)),
        SamplingParams(max_tokens=12, repetition_penalty=1.4, ignore_eos=True),
    ]


def _prompts() -> list[list[int]]:
    return [[*range(3, 13), 20 + i, 30 + i] for i in range(5)]


def _outputs(engine: EngineCore) -> list[list[int]]:
    # The row with penalties first: until it has ended, steps do not overlap.
    params = _params()[::-1] + _params()[:4] * 2
    prompts = [[*range(3, 13), 20 + i, 30 + i % 5] for i in range(len(params))]
    return [request.output_token_ids for request in run_all(engine, make_requests(prompts, params))]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("temper", Temper)
def test_tokens_are_the_same_however_late_or_early_the_device_works(
    loaded: LoadedModel, temper: Temper, ahead: bool
) -> None:
    expected = _outputs(_engine(loaded, HostDevice()))
    assert max(map(len, expected)) > 10
    assert _outputs(_engine(loaded, ModelDevice(temper), ahead=ahead)) == expected
    # Too small a pool: rows make room and come back.
    crowded = _engine(loaded, ModelDevice(temper), ahead=ahead, num_blocks=17)
    assert _outputs(crowded) == expected
    assert crowded.scheduler.counters.swapped_in_blocks > 0


def test_a_step_whose_arrays_find_no_memory_is_sent_again_after_torch_gave_some_up(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _outputs(_engine(loaded, HostDevice()))
    device, trims = HostDevice(), []
    monkeypatch.setattr(device, "trim", lambda: trims.append(True), raising=False)
    put, calls = Uploads.put, iter(range(1 << 20))

    def fail_sometimes(self: Uploads, array: np.ndarray) -> torch.Tensor:
        if next(calls) % 29 == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return put(self, array)

    monkeypatch.setattr(Uploads, "put", fail_sometimes)
    assert _outputs(_engine(loaded, device)) == expected
    assert len(trims) > 3


def test_what_a_pass_without_memory_held_is_free_before_the_step_is_run_in_halves(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _outputs(_engine(loaded, HostDevice()))
    held: list[weakref.ref[torch.Tensor]] = []
    trims, halves = [], []

    def let_go() -> bool:
        return all(tensor() is None for tensor in held)

    forward = ModelForward.__call__

    def short_of_memory(self: ModelForward, token_ids: torch.Tensor, *given: Any) -> torch.Tensor:
        if len(token_ids) > 7:
            states = torch.ones(1000)
            held.append(weakref.ref(states))
            raise torch.OutOfMemoryError("CUDA out of memory")
        halves.append(let_go())
        return forward(self, token_ids, *given)

    monkeypatch.setattr(ModelForward, "__call__", short_of_memory)
    device = HostDevice()
    monkeypatch.setattr(device, "trim", lambda: trims.append(let_go()), raising=False)
    engine = _engine(loaded, device)
    assert _outputs(engine) == expected
    assert len(held) == len(trims) == engine.stats.out_of_memory > 1
    assert all(trims)
    assert all(halves)


def test_t28_a_lack_of_memory_on_a_cpu_is_one_too(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _outputs(_engine(loaded, HostDevice()))
    forward, put, calls = ModelForward.__call__, Uploads.put, iter(range(1 << 20))

    def short_of_memory(self: ModelForward, token_ids: torch.Tensor, *given: Any) -> torch.Tensor:
        if len(token_ids) > 7:
            torch.empty(1 << 60, dtype=torch.uint8)
        return forward(self, token_ids, *given)

    def fail_sometimes(self: Uploads, array: np.ndarray) -> torch.Tensor:
        if next(calls) % 29 == 7:
            np.empty(1 << 60, dtype=np.uint8)
        return put(self, array)

    monkeypatch.setattr(ModelForward, "__call__", short_of_memory)
    monkeypatch.setattr(Uploads, "put", fail_sometimes)
    engine = _engine(loaded, HostDevice())
    assert _outputs(engine) == expected
    assert engine.stats.out_of_memory > 1


def test_t28_another_error_of_a_pass_is_not_taken_for_a_lack_of_memory(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: ModelForward, *given: Any) -> torch.Tensor:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(ModelForward, "__call__", wrong)
    engine = _engine(loaded, HostDevice())
    with pytest.raises(EngineError, match="shapes do not fit"):
        _outputs(engine)
    assert engine.stats.out_of_memory == 0


class _NoReading(TorchDispatchMode):
    """Refuses what cannot be done without the host reading the device."""

    FORBIDDEN = frozenset({
        "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "_unique2",
        "unique_dim", "unique_consecutive", "equal", "is_nonzero", "item",
    })  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, name
        if name in ("index", "index_put_", "_index_put_impl_"):
            assert all(i is None or i.dtype is torch.int64 for i in args[1]), "boolean index"
        if name == "repeat_interleave":
            assert "output_size" in (kwargs or {})
        return func(*args, **(kwargs or {}))


def _decoding(engine: EngineCore, params: list[SamplingParams]) -> Iterator[None]:
    """Bring rows to where all of them decode, then go on step by step."""
    for request in make_requests(_prompts()[: len(params)], params):
        engine.scheduler.add(request)
    while any(request.num_output_tokens < 2 for request in engine.scheduler.running) or (
        engine.scheduler.waiting
    ):
        engine.step()
    for _ in range(5):
        engine.step()
        assert len(engine.scheduler.running) == len(params)
        yield


@pytest.mark.parametrize("ahead", [False, True])
def test_the_steady_decode_loop_waits_for_the_device_once_a_step(
    loaded: LoadedModel, ahead: bool
) -> None:
    params = [
        SamplingParams(max_tokens=99, ignore_eos=True),
        SamplingParams(max_tokens=99, temperature=0.8, top_k=20, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=99, temperature=1.0, min_p=0.01, ignore_eos=True),
        SamplingParams(max_tokens=99, temperature=1.3, min_tokens=90, stop_token_ids=(7,)),
    ]
    device = ModelDevice(Temper.LATE)
    engine = _engine(loaded, device, ahead=ahead)
    steps = _decoding(engine, params)
    next(steps)
    with _NoReading():
        before = device.host_waits
        for number, _ in enumerate(steps, start=1):
            assert device.host_waits == before + number


def test_the_guard_against_reading_the_device_can_see_it() -> None:
    with pytest.raises(AssertionError), _NoReading():
        torch.tensor([1, 2]).max().item()
    with pytest.raises(AssertionError), _NoReading():
        torch.arange(3)[torch.tensor([True, False, True])]
