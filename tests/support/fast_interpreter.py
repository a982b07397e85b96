"""Triton's interpreter without its needless work, and with products like a GPU's."""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle


class _Lasting:
    """Patches of triton.language that no launch takes back."""

    def restore(self) -> None:
        pass


def patch_once() -> None:
    """Let a process patch triton.language once.

    The interpreter wraps each builtin at a launch, and wraps the wrappers at every call of a
    device function within it: most of its time, here.
    """
    patch = interpreter._patch_lang
    scopes: list[_Lasting] = []

    def patched(function: Any) -> _Lasting:
        if not scopes:
            patch(function)
            scopes.append(_Lasting())
        return scopes[0]

    def call(function: InterpretedFunction, *arguments: Any, **keywords: Any) -> Any:
        return function.rewrite()(*arguments, **keywords)

    interpreter._patch_lang = patched
    InterpretedFunction.__call__ = call


def product_row_by_row(
    builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any
) -> TensorHandle:
    """Multiply as ``tl.dot``, every row of ``a`` in the same way.

    The interpreter's own product is a CPU library's, which rounds a row by its place among the
    others; tensor cores do not.
    """
    products = a.data[:, :, None] * b.data[None, :, :]
    return TensorHandle(products.sum(1, dtype=d.data.dtype) + d.data, d.dtype.scalar)


_convert_float = interpreter._convert_float


def convert_to_fp8_by_torch(
    numbers: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any
) -> np.ndarray:
    """Convert as the interpreter, which loses the carry where a mantissa of fp8 rounds up to 1."""
    if source != tl.float32 or target != tl.float8e4nv:
        return _convert_float(numbers, source, target, rounding)
    values = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(numbers.shape)
