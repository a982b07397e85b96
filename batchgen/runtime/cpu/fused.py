"""Puts one-pass kernels in the place of a stock model's norms, gates and rotations.

What a module computes is not read from its name: a candidate is tried on random numbers
beside the kernel, and replaced only where both give the same. Classes and modules of
transformers stay as they are; only this model's own objects change.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from batchgen.kernels.native.compiler import NativeCompileError
from batchgen.kernels.native.elementwise import prepare, rms_norm, rotate_, silu_mul

# The kernels round differently; what computes something else is far above this.
_TOLERANCE = 1e-5
_ROTATION = "apply_rotary_pos_emb"

Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels are to be had here: float32 on a CPU with a C compiler."""
    if device.type != "cpu" or dtype is not torch.float32:
        return False
    try:
        prepare()
    except NativeCompileError:
        return False
    return True


@torch.inference_mode()
def fuse_elementwise(model: torch.nn.Module) -> int:
    """Replace what the kernels can compute of a float32 model on a CPU.

    Returns:
        How many modules changed.
    """
    generator = torch.Generator().manual_seed(0)
    rotations = _Rotations(generator)
    changed = 0
    for module in model.modules():
        for fuse in (_fuse_norm, _fuse_gate, rotations.fuse):
            changed += fuse(module, generator)
    return changed


def _fuse_norm(module: torch.nn.Module, generator: torch.Generator) -> bool:
    """Replace an RMS norm; in Gemma's the weight is what is added to one."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not (isinstance(eps, float) and isinstance(weight, torch.nn.Parameter)):
        return False
    if weight.dim() != 1 or len(list(module.parameters())) > 1:
        return False
    # Some rows so small that the epsilon shows.
    scales = torch.tensor([[1.0], [1e-3], [10.0]])
    rows = scales * torch.randn(3, weight.shape[0], generator=generator)
    for offset in (0.0, 1.0):
        fused = functools.partial(rms_norm, weight=weight.detach(), offset=offset, eps=eps)
        if _agree(module, fused, rows):
            _replace(module, fused)
            return True
    return False


def _fuse_gate(module: torch.nn.Module, generator: torch.Generator) -> bool:
    """Replace ``down(silu(gate(x)) * up(x))``."""
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    parts = [getattr(module, name, None) for name in names]
    if not all(isinstance(part, torch.nn.Module) for part in parts):
        return False
    gate, up, down, _ = parts
    if not hasattr(gate, "in_features"):
        return False

    def fused(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = down(silu_mul(gate(rows), up(rows)))  # type: ignore[misc]
        return out

    rows = torch.randn(3, gate.in_features, generator=generator)  # type: ignore[union-attr]
    if not _agree(module, fused, rows):
        return False
    _replace(module, fused)
    return True


class _Rotations:
    """Replaces the rotary embedding that an attention layer's code calls by its global name."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._fused: dict[Rotation, Rotation | None] = {}

    def fuse(self, module: torch.nn.Module, generator: torch.Generator) -> bool:
        """Return this layer a copy of its code that looks up a rotation of ours."""
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, FunctionType) or _ROTATION not in forward.__code__.co_names:
            return False
        original = forward.__globals__.get(_ROTATION)
        if not callable(original):
            return False
        if original not in self._fused:
            self._fused[original] = self._try(original)
        fused = self._fused[original]
        if fused is None:
            return False
        names = {**forward.__globals__, _ROTATION: fused}
        copy = FunctionType(
            forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
        )
        copy.__kwdefaults__ = forward.__kwdefaults__
        _replace(module, functools.partial(copy, module))
        return True

    def _try(self, original: Rotation) -> Rotation | None:
        fused = _rotation_in_place(original)
        query, key = self._random(1, 4, 5, 16), self._random(1, 2, 5, 16)
        angles = self._random(1, 5, 16), self._random(1, 5, 16)
        try:
            expected = original(query, key, *angles)
        except (TypeError, ValueError, RuntimeError, IndexError):
            return None
        got = fused(query.clone(), key.clone(), *angles)
        same = all(_is_close(a, b) for a, b in zip(expected, got, strict=True))
        return fused if same else None

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)


def _rotation_in_place(original: Rotation) -> Rotation:
    """Rotate by the kernel where its layout is given, by the original elsewhere."""

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fits = all(
            states.dim() == 4
            and states.shape[0] == 1
            and states.stride(3) == 1
            and cos.shape == sin.shape == (1, states.shape[2], states.shape[3])
            and states.dtype is cos.dtype is torch.float32
            for states in (q, k)
        )
        if kwargs or not fits:
            return original(q, k, cos, sin, **kwargs)
        # In place: they are fresh from their projections, and nothing else reads them.
        rotate_(q, cos, sin)
        rotate_(k, cos, sin)
        return q, k

    return rotate


def _replace(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    # An attribute of the object hides the method of its class.
    object.__setattr__(module, "forward", forward)


def _agree(
    module: torch.nn.Module, fused: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
) -> bool:
    try:
        return _is_close(module(rows), fused(rows))
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False


def _is_close(expected: object, got: torch.Tensor) -> bool:
    return isinstance(expected, torch.Tensor) and torch.allclose(
        expected, got, atol=_TOLERANCE, rtol=_TOLERANCE
    )
