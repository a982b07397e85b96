"""Kernels compiled ahead of time for a GPU that is not here, and what is asked of them."""

import re
from collections.abc import Sequence

import triton
from kernel_resources import SHARED_BYTES, Resources, resources, variants


def compiled(capability: int, names: Sequence[str]) -> list[Resources]:
    """Compile variants by their names."""
    pattern = f"^({'|'.join(map(re.escape, names))})$"
    return _compiled(capability, pattern)


def compiled_layer(capability: int, family: str) -> list[Resources]:
    """Compile every variant that steps of a family's layers can meet."""
    return _compiled(capability, f"^{re.escape(family)}: ")


def assert_fits(rows: Sequence[Resources]) -> None:
    """Nothing is spilled to local memory, and a program's shared memory is there."""
    for row in rows:
        assert row.spilled_bytes == 0, row
        assert row.shared_bytes <= SHARED_BYTES[row.capability], row


def _compiled(capability: int, pattern: str) -> list[Resources]:
    with triton.knobs.compilation.scope():
        # Notes for a debugger take a quarter of the time and change no instruction.
        triton.knobs.compilation.disable_line_info = True
        return [resources(variant) for variant in variants((capability,), pattern)]
