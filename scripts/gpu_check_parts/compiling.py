"""Part 1: compile what the timed parts launch, on all cores at once.

A kernel's variant takes seconds of one core, once: Triton keeps it on disk. What is timed runs
alone, so that without this most of a first run's time would go there, on one core.
"""

from collections.abc import Iterator

import torch
from kernel_variants import Layer, layer_variants, step_launches

from batchgen.kernels.triton.launch import Launch, target_of
from batchgen.runtime.attention_metadata import InputShape
from gpu_check_parts.context import Context
from gpu_check_parts.models import FAMILIES, llama_config


def run(context: Context) -> None:
    """Compile this process's share of the variants."""
    every = dict(_launches(context))
    for name in context.in_time(context.mine(list(every)), str):
        with context.attempt(f"{name} compiles"):
            every[name].compile()
            context.check(f"{name} compiles", True)


def layers(dry_run: bool) -> dict[str, Layer]:
    """Return the attention of the models whose steps are timed, and of those with fixed bits."""
    found = {
        name: _layer(llama_config(name, dry_run), torch.bfloat16) for name in ("1B", "8B", "7B")
    }
    small = FAMILIES["llama"](dry_run)
    for dtype in (torch.float32, torch.bfloat16):
        # Blocks of the checks of equality.
        name = f"small, {str(dtype).removeprefix('torch.')}"
        found[name] = _layer(small, dtype, block_size=8)
    return found


def _layer(config: object, dtype: torch.dtype, block_size: int = 16) -> Layer:
    heads, kv_heads, size = (
        getattr(config, key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    return Layer(heads, kv_heads, size, dtype, block_size=block_size)


def _launches(context: Context) -> Iterator[tuple[str, Launch]]:
    """All that steps of these layers may launch, by name."""
    target = target_of(context.device)
    for family, layer in layers(context.dry_run).items():
        if context.dry_run:
            # The interpreter compiles nothing, and knows no variants.
            step = InputShape(1, 1, width=1, max_query_len=1, max_keys=1)
            named = {each.kernel.__name__: each for each in step_launches(layer, step, target)}
        else:
            named = layer_variants(layer, target)
        yield from ((f"{family}: {name}", launch) for name, launch in named.items())
