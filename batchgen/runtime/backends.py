"""Which attention runs: what the job asks for, or the fastest that works here."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec

import torch

from batchgen.errors import UsageError
from batchgen.kernels.native.compiler import NativeCompileError
from batchgen.kernels.native.paged_attention import prepare, supports
from batchgen.runtime.attention import AttentionBackend
from batchgen.runtime.cpu.attention import NativeAttention
from batchgen.runtime.kv_cache import LayerGeometry, is_fp8
from batchgen.runtime.shared_prefixes import SharedPrefix
from batchgen.runtime.torch_attention import TorchAttention


class AttentionName(StrEnum):
    """An attention backend; auto is the fastest that works on the device."""

    AUTO = "auto"
    TORCH = "torch"
    NATIVE = "native"
    TRITON = "triton"


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a backend has to work with.

    Attributes:
        layers: shapes of the model's keys and values.
        device: of model and pool.
        dtype: of the model.
        kv_dtype: of the pool.
        sharing: ``engine.shared_prefix_attention``.
        deterministic: ``engine.deterministic``.
    """

    layers: list[LayerGeometry]
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    sharing: SharedPrefix = SharedPrefix.AUTO
    deterministic: bool = False


def choose_attention(
    name: AttentionName, needs: AttentionNeeds, *, say: Callable[[str], None]
) -> AttentionBackend:
    """Make the backend.

    Args:
        name: which one.
        needs: what it has to work with.
        say: takes a note if ``auto`` has to do without the fastest one.

    Raises:
        UsageError: the backend that was asked for does not work here, or none does.
    """
    candidates = _by_speed(needs) if name is AttentionName.AUTO else [name]
    problems: list[str] = []
    for candidate in candidates:
        problem = _problem(candidate, needs)
        if problem is None:
            if problems:
                say(f"attention by torch's operators, which are slower: {problems[0]}")
            return _make(candidate, needs)
        problems.append(problem)
    if name is not AttentionName.TORCH and _problem_with_torch(needs) is None:
        problems.append("set engine.attention=torch")
    raise UsageError(f"engine.attention={name}: {'; '.join(problems)}")


def resolve_attention(name: AttentionName, needs: AttentionNeeds) -> AttentionName:
    """Return the backend that a name comes to; ``auto`` itself where none works."""
    if name is not AttentionName.AUTO:
        return name
    working = (each for each in _by_speed(needs) if _problem(each, needs) is None)
    return next(working, name)


def _by_speed(needs: AttentionNeeds) -> list[AttentionName]:
    if needs.device.type == "cuda" or is_fp8(needs.kv_dtype):
        return [AttentionName.TRITON, AttentionName.TORCH]
    if needs.device.type == "cpu":
        return [AttentionName.NATIVE, AttentionName.TORCH]
    return [AttentionName.TORCH]


def _make(name: AttentionName, needs: AttentionNeeds) -> AttentionBackend:
    if name is AttentionName.NATIVE:
        return NativeAttention(needs.sharing)
    if name is AttentionName.TORCH:
        return TorchAttention(needs.sharing)
    from batchgen.runtime.triton_attention import TritonAttention

    if needs.device.index is not None:
        # Kernels start on the current device, whatever device their tensors are on.
        torch.cuda.set_device(needs.device)
    return TritonAttention(needs.layers, needs.sharing, deterministic=needs.deterministic)


def _problem(name: AttentionName, needs: AttentionNeeds) -> str | None:
    """Return what is in a backend's way; None if it works."""
    if name is AttentionName.NATIVE:
        return _prepare_native(needs)
    if name is AttentionName.TORCH:
        return _problem_with_torch(needs)
    if find_spec("triton") is None:
        return "triton is not installed"
    # triton is on Linux only.
    from batchgen.runtime.triton_attention import problem_with_triton

    return problem_with_triton(needs.layers, needs.device, needs.kv_dtype)


def _problem_with_torch(needs: AttentionNeeds) -> str | None:
    if is_fp8(needs.kv_dtype):
        return "torch's operators read no fp8; set pool.kv_dtype=auto"
    if needs.deterministic:
        return (
            "with torch's operators a result depends on the rows beside it; set "
            "engine.deterministic=false, or leave engine.attention=auto"
        )
    return None


def _prepare_native(needs: AttentionNeeds) -> str | None:
    """Compile the native kernel for all layers; return what is in the way."""
    if needs.device.type != "cpu":
        return f"it runs on a CPU, not on {needs.device.type}"
    if needs.kv_dtype != torch.float32:
        return "it needs a pool in float32"
    if not all(supports(layer.key_size, needs.dtype) for layer in needs.layers):
        return "it needs float32 and heads of a multiple of 8"
    try:
        for layer in needs.layers:
            prepare(layer.key_size, layer.group)
    except NativeCompileError as error:
        return str(error)
    return None
