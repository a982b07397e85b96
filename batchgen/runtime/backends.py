"""Which attention runs: what the job asks for, or the fastest that works here."""

from collections.abc import Callable
from enum import StrEnum

import torch

from batchgen.errors import UsageError
from batchgen.kernels.native.compiler import NativeCompileError
from batchgen.kernels.native.paged_attention import prepare, supports
from batchgen.runtime.attention import AttentionBackend
from batchgen.runtime.kv_cache import LayerGeometry
from batchgen.runtime.layout import SharedPrefix
from batchgen.runtime.native_attention import NativeAttention
from batchgen.runtime.torch_attention import TorchAttention


class AttentionName(StrEnum):
    """An attention backend; auto is the fastest that works on the device."""

    AUTO = "auto"
    TORCH = "torch"
    NATIVE = "native"


def choose_attention(
    name: AttentionName,
    layers: list[LayerGeometry],
    device: torch.device,
    dtype: torch.dtype,
    sharing: SharedPrefix = SharedPrefix.AUTO,
    *,
    say: Callable[[str], None],
) -> AttentionBackend:
    """Make the backend.

    Args:
        name: which one.
        layers: shapes of the model's keys and values.
        device, dtype: of the model.
        sharing: ``engine.shared_prefix_attention``.
        say: is told where ``auto`` has to do without the faster one on a CPU.

    Raises:
        UsageError: the backend that was asked for does not work here.
    """
    if name is AttentionName.TORCH or (name is AttentionName.AUTO and device.type != "cpu"):
        return TorchAttention(device, sharing)
    problem = _prepare_native(layers, device, dtype)
    if problem is None:
        return NativeAttention(sharing)
    if name is AttentionName.NATIVE:
        raise UsageError(f"engine.attention=native: {problem}; set engine.attention=torch")
    say(f"attention by torch's operators, which are slower: {problem}")
    return TorchAttention(device, sharing)


def _prepare_native(
    layers: list[LayerGeometry], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Compile the native kernel for all layers; give what is in the way."""
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    if not all(supports(layer.key_size, dtype) for layer in layers):
        return "it needs float32 and heads of a multiple of 8"
    try:
        for layer in layers:
            prepare(layer.key_size, layer.group)
    except NativeCompileError as error:
        return str(error)
    return None
