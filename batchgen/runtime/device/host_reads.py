"""What in a forward pass makes the host wait for the device: no graph can hold it.

A failed capture may leave the device in doubt, so a pass is looked at before it is captured.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result's shape or value the host has to know.
_READING = frozenset({
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "is_nonzero", "bincount",
})  # fmt: skip
_COPYING = frozenset({"_to_copy", "copy_"})


def host_reads(work: Callable[[], object]) -> list[str]:
    """Run work and list its operators that read the device, or copy from or to another."""
    with _NotingReads() as noting:
        work()
    return sorted(noting.found)


class _NotingReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            # Made of others, which were looked at.
            return result
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _READING or _is_masked(name, args) or _is_ragged(name, kwargs):
            self.found.add(name)
        elif name in _COPYING and _crosses(name, args, result):
            self.found.add(f"{name} between devices")
        return result


def _is_masked(name: str, args: Any) -> bool:
    """Whether an index is a mask, whose places have to be counted."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _is_ragged(name: str, kwargs: Any) -> bool:
    """Whether numbers on the device say how long the result is."""
    return name == "repeat_interleave" and kwargs.get("output_size") is None


def _crosses(name: str, args: Any, result: Any) -> bool:
    source = args[0] if name == "_to_copy" else args[1]
    return bool(source.device != result.device)
