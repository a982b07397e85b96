"""The C kernels between matrix products, called on tensors.

All tensors are float32 on the CPU, their last dimension contiguous.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from batchgen.kernels.native.compiler import load_library

_SOURCE = Path(__file__).with_suffix(".c")
_POINTER, _INT, _FLOAT, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    """Divide rows by the root of their mean square and scale them.

    Args:
        rows: [..., N].
        weight: [N].
        offset: added to the weight (1 in Gemma's norms, else 0).
        eps: added to the mean square.

    Returns:
        [..., N], contiguous.
    """
    size = weight.shape[0]
    flat = rows.reshape(-1, size)
    out = torch.empty(flat.shape)
    _library().rms_norm(
        flat.data_ptr(), flat.stride(0), weight.data_ptr(), offset, eps, flat.shape[0], size,
        out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out.view(rows.shape)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Multiply ``silu(gate)`` by ``up``: [..., N] each, and the result, which is contiguous."""
    size = gate.shape[-1]
    gates, ups = gate.reshape(-1, size), up.reshape(-1, size)
    out = torch.empty(gates.shape)
    _library().silu_mul(
        gates.data_ptr(), gates.stride(0), ups.data_ptr(), ups.stride(0), gates.shape[0], size,
        out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out.view(gate.shape)


def rotate_(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn each head's two halves by its token's angles, in place (RoPE as in Llama).

    Args:
        states: [1, H, T, D] in any strides of heads and tokens.
        cos, sin: [1, T, D].
    """
    _, heads, tokens, size = states.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    _library().rotate(
        states.data_ptr(), states.stride(2), states.stride(1), cos.data_ptr(), sin.data_ptr(),
        tokens, heads, size // 2, torch.get_num_threads(),
    )  # fmt: skip


def prepare() -> None:
    """Compile the kernels.

    Raises:
        NativeCompileError: they cannot be compiled here.
    """
    _library()


@cache
def _library() -> ctypes.CDLL:
    library = load_library(_SOURCE, {})
    library.rms_norm.argtypes = [
        _POINTER, _INT, _POINTER, _FLOAT, _FLOAT, _INT, _INT, _POINTER, _THREADS,
    ]  # fmt: skip
    library.silu_mul.argtypes = [
        _POINTER, _INT, _POINTER, _INT, _INT, _INT, _POINTER, _THREADS,
    ]  # fmt: skip
    library.rotate.argtypes = [
        _POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT, _INT, _THREADS,
    ]  # fmt: skip
    for name in ("rms_norm", "silu_mul", "rotate"):
        getattr(library, name).restype = None
    return library
