"""Part 4: does a row's result depend on its neighbours?

The same prompts run alone, all together, in another order, with other step and pool sizes. What
differs in the log-probabilities of the whole vocabulary is counted bit by bit. Twice the same
batch must give the same bits.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gpu_check_parts.context import Context
from gpu_check_parts.engines import Settings
from gpu_check_parts.equality import mixed_rows, score_prompts, variants
from gpu_check_parts.models import FAMILIES, random_model


def run(context: Context) -> None:
    """Measure in both precisions."""
    for dtype in context.in_time((torch.bfloat16, torch.float32), str):
        with context.attempt(f"llama, {_name(dtype)}"):
            _measure(context, dtype)


def _measure(context: Context, dtype: torch.dtype) -> None:
    config = FAMILIES["llama"](context.dry_run)
    loaded = random_model(config, dtype, context.device, context.seed, loud=True)
    rows = mixed_rows(context)
    prompts = [list(row.prompt) for row in rows]
    base = variants(context, rows)[0].settings
    reference = score_prompts(loaded, base, prompts)
    again = score_prompts(loaded, base, prompts)
    same = bool((reference == again).all())
    context.check(
        f"{_name(dtype)}: the same batch gives the same bits", same, _differing(reference, again)
    )
    for name, settings, order in _make_ups(context, base, len(prompts)):
        other = score_prompts(loaded, settings, prompts, order)
        equal = float((reference == other).all(axis=1).mean())
        worst = float(np.abs(reference - other).max())
        note = f"largest difference {worst:.1e}"
        context.figure(
            f"{_name(dtype)}, {name}: rows equal to the bit", 100 * equal, "%", note=note
        )


def _make_ups(
    context: Context, base: Settings, count: int
) -> list[tuple[str, Settings, Sequence[int] | None]]:
    order = np.random.default_rng(context.seed).permutation(count).tolist()
    return [
        ("one row at a time", replace(base, max_num_seqs=1, prefix_caching=False), None),
        ("another order", base, order),
        ("larger steps", replace(base, step_tokens=4 * base.step_tokens), None),
        ("no prefix cache", replace(base, prefix_caching=False), None),
    ]


def _differing(first: "np.ndarray", second: "np.ndarray") -> str:  # type: ignore[type-arg]
    rows = int((first != second).any(axis=1).sum())
    return f"{rows} of {len(first)} rows differ"


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
