"""The C paged attention, called on tensors."""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from batchgen.kernels.native.compiler import load_library
from batchgen.kernels.reference import AttentionOptions

_SOURCE = Path(__file__).with_suffix(".c")
_LANES = 8
# Tokens taken through a shared prefix together; the kernel lowers it where memory or the
# number of threads asks for that.
_TILE = 1 << 20
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where the keys of T packed tokens of R rows lie.

    Attributes:
        block_tables: [R, W] int32.
        rows: [T] int64 row of each token.
        positions: [T] int64; a token sees the keys up to its own.
        shares: take neighbouring tokens through the blocks that they share together.
    """

    block_tables: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    shares: bool = True


def supports(head_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can be compiled for keys and values like these."""
    return head_size % _LANES == 0 and dtype is torch.float32


def native_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    packed: PackedRows,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend causally to each row's blocks.

    Args:
        query: [T, Hq, D] float32 on the CPU; the last dimension is contiguous.
        key_cache: [N, B, Hkv, D] float32, contiguous.
        value_cache: the same shape.
        packed: which keys each token sees.
        options: scale, window, soft cap and sinks.

    Returns:
        [T, Hq, D]; a token's result depends on nothing but its own query, keys and values.

    Raises:
        NativeCompileError: the kernel cannot be compiled here.
    """
    num_tokens, num_heads, size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    assert query.stride(2) == 1 and key_cache.is_contiguous() and value_cache.is_contiguous()
    assert key_cache.shape == value_cache.shape
    kernel = _kernel(size, num_heads // num_kv_heads)
    tables = np.ascontiguousarray(packed.block_tables)
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    out = torch.empty(num_tokens, num_heads, size)
    kernel(
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        tables.ctypes.data,
        tables.shape[1],
        packed.rows.ctypes.data,
        packed.positions.ctypes.data,
        num_tokens,
        num_kv_heads,
        block_size,
        options.scale,
        options.softcap or 0.0,
        options.window or 0,
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        _TILE if packed.shares else 1,
        torch.get_num_threads(),
    )
    return out


def prepare(head_size: int, group: int) -> None:
    """Compile the kernel for a head size and the query heads to a key/value head.

    Raises:
        NativeCompileError: it cannot be compiled here.
    """
    _kernel(head_size, group)


@cache
def _kernel(head_size: int, group: int) -> "ctypes._NamedFuncPointer":
    # The vectors are written out: the compiler's own attempts would use up their registers.
    flags = ["-fno-tree-vectorize"]
    library = load_library(_SOURCE, {"HEAD_SIZE": head_size, "GROUP": group}, flags)
    kernel = library.paged_attention
    kernel.restype = None
    kernel.argtypes = [
        _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT,
        _INT, _INT, _FLOAT, _FLOAT, _INT, _POINTER, _POINTER, _INT, ctypes.c_int,
    ]  # fmt: skip
    return kernel
