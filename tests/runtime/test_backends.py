"""Which attention backend runs where, and what a user is told."""

from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton

from batchgen.errors import UsageError
from batchgen.runtime import backends
from batchgen.runtime.backends import AttentionName, AttentionNeeds, choose_attention
from batchgen.runtime.kv_cache import LayerGeometry

LAYERS = [LayerGeometry(2, 64, 64, group=4)]
HALF = torch.bfloat16
FP8 = torch.float8_e4m3fn
# What starts Triton's kernels on a GPU.
_DRIVER = SimpleNamespace(get_current_target=lambda: None)


def _choose(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    name: AttentionName = AttentionName.AUTO,
    driver: Any = _DRIVER,
    **given: Any,
) -> tuple[str, list[str]]:
    """The backend on a GPU of a capability, and what was said about it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    needs = {"layers": LAYERS, "device": torch.device("cuda"), "dtype": HALF, "kv_dtype": HALF}
    notes: list[str] = []
    backend = choose_attention(name, AttentionNeeds(**(needs | given)), say=notes.append)
    return backend.name, notes


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_auto_is_triton_on_a_gpu(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _choose(monkeypatch, capability) == ("triton", [])
    assert _choose(monkeypatch, capability, deterministic=True) == ("triton", [])
    assert _choose(monkeypatch, capability, AttentionName.TORCH) == ("torch", [])


def test_auto_says_why_it_has_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [LayerGeometry(1, 512, 512)]
    for name, note in (
        _choose(monkeypatch, (7, 5)),
        _choose(monkeypatch, (9, 0), layers=wide),
    ):
        assert name == "torch"
        assert len(note) == 1
        assert "8.0 or above" in note[0] or "up to 256, the model has 512" in note[0]
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    name, note = _choose(monkeypatch, (9, 0))
    assert (name, note) == (
        "torch", ["attention by torch's operators, which are slower: triton is not installed"],
    )  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler."),
        CalledProcessError(1, ["gcc"], stderr="Python.h: No such file or directory"),
    ],
)
def test_triton_without_a_compiler_is_no_reason_to_fail(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(get_current_target=Mock(side_effect=error))
    name, note = _choose(monkeypatch, (9, 0), driver=driver)
    assert name == "torch"
    assert "needs a C compiler" in note[0]
    assert str(error) in note[0]
    with pytest.raises(UsageError, match=r"C compiler .*; set engine.attention=torch"):
        _choose(monkeypatch, (9, 0), AttentionName.TRITON, driver=driver)


def test_a_backend_that_was_asked_for_is_refused_where_it_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match=r"engine.attention=triton: .* 8.0 .*attention=torch"):
        _choose(monkeypatch, (7, 5), AttentionName.TRITON)
    with pytest.raises(UsageError, match=r"engine.attention=native: .* not on cuda"):
        _choose(monkeypatch, (9, 0), AttentionName.NATIVE)
    cpu = torch.device("cpu")
    with pytest.raises(UsageError, match=r"engine.attention=triton: .* TRITON_INTERPRET=1"):
        _choose(monkeypatch, (9, 0), AttentionName.TRITON, device=cpu)


def test_an_fp8_pool_needs_capability_8_9(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _choose(monkeypatch, (8, 9), kv_dtype=FP8)[0] == "triton"
    with pytest.raises(UsageError, match=r"8.9 or above; set pool.kv_dtype=auto"):
        _choose(monkeypatch, (8, 0), kv_dtype=FP8)


def test_deterministic_needs_a_backend_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"8.0 or above; .* rows beside it"):
        _choose(monkeypatch, (7, 5), deterministic=True)
