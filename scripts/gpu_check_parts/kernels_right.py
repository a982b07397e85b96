"""Part 2: every kernel on fresh random inputs, with poisoned pools and outputs."""

from collections.abc import Callable
from functools import partial

import torch

from batchgen.kernels.triton.launch import device_capability
from gpu_check_parts.attention_right import (
    FP8,
    attention_cases,
    check_fixed_order,
    check_fp8,
    check_prefixes,
    check_rows,
)
from gpu_check_parts.context import Context, Verdict
from gpu_check_parts.pool_right import check_copies, check_moves, check_store


def run(context: Context) -> None:
    """Check this process's share of the kernels."""
    every = _checks(context)
    for name in context.in_time(context.mine(list(every)), str):
        with context.attempt(name):
            context.check(name, *every[name]())


def _checks(context: Context) -> dict[str, Callable[[], Verdict]]:
    """All checks by name, those that compile most first."""
    every: dict[str, Callable[[], Verdict]] = {}
    cases = attention_cases(context.dry_run)
    for case in cases:
        if case.window is None:
            every[f"shared prefixes: {case.name}"] = partial(check_prefixes, context, case)
        for decode in (False, True):
            name = f"{'decode' if decode else 'prefill'}: {case.name}"
            every[name] = partial(check_rows, context, case, decode=decode)
        if case.window is None and case.splits == 1:
            every[f"fixed order: {case.name}"] = partial(check_fixed_order, context, case)
    dtypes = [torch.bfloat16, torch.float32]
    # e4m3 begins with capability 8.9; the interpreter has it too.
    if context.dry_run or device_capability(context.device) >= 89:
        every["decode: fp8 pool"] = partial(check_fp8, context, cases[0])
        dtypes.append(FP8)
    for dtype in dtypes:
        name = f"store_kv: {str(dtype).removeprefix('torch.')} pool"
        every[name] = partial(check_store, context, dtype)
    every["copies of blocks"] = partial(check_copies, context)
    every["gather and scatter of blocks"] = partial(check_moves, context)
    return every
