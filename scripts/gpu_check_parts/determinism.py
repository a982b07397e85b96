"""Part 5: does a row's result depend on its neighbours?

With ``engine.deterministic`` it must not: the same rows run one by one, in another order, in
other steps, with and without the cache, the cascade, overlap and preemption, and each token's
log-probability and those of the likeliest others must have the same bits. Without it, what
differs in the log-probabilities of the whole vocabulary is counted; twice the same batch must
give the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from batchgen.engine.request import Request
from batchgen.runtime.cpu.fixed_rows import fix_row_counts
from batchgen.runtime.model import LoadedModel
from gpu_check_parts.context import Context
from gpu_check_parts.engines import Row, Settings, run_rows
from gpu_check_parts.equality import Variant, mixed_rows, score_prompts, variants
from gpu_check_parts.models import FAMILIES, random_model

_DTYPES = (torch.bfloat16, torch.float32)
# Likeliest tokens whose log-probabilities are compared beside the chosen token's.
_NUM_BEST = 16

# The bits of a row: its tokens' log-probabilities, as they are written down.
Bits = bytes


def run(context: Context) -> None:
    """Check the promise, and measure what differs without it; in both precisions."""
    # On a CPU the key needs attention in C, which is in float32.
    promised = context.choose(_DTYPES, _DTYPES[1:])
    every = {
        f"{_name(dtype)}, engine.deterministic": partial(_check_promise, context, dtype)
        for dtype in promised
    } | {_name(dtype): partial(_measure, context, dtype) for dtype in _DTYPES}
    for name in context.in_time(context.mine(list(every)), str):
        with context.attempt(name):
            every[name]()


def _check_promise(context: Context, dtype: torch.dtype) -> None:
    loaded = random_model(
        FAMILIES["llama"](context.dry_run), dtype, context.device, context.seed, loud=True
    )
    fix_row_counts(loaded.model)
    rows = mixed_rows(context)
    reference: list[Bits] | None = None
    for variant, order in _companies(context, rows):
        name = f"{_name(dtype)}, engine.deterministic: {variant.name}"
        with context.attempt(name):
            settings = replace(variant.settings, deterministic=True)
            found, idle = _bits_of_rows(loaded, settings, rows, order, variant.must_count)
            reference = reference or found
            differing = sum(a != b for a, b in zip(reference, found, strict=True))
            problems = [f"{each} is 0: the variant did not happen" for each in idle]
            if differing:
                problems.append(f"{differing} of {len(rows)} rows differ")
            context.check(name, not problems, "; ".join(problems) or f"{len(rows)} rows equal")


def _companies(
    context: Context, rows: Sequence[Row]
) -> Iterator[tuple[Variant, Sequence[int] | None]]:
    """Settings and orders in which a row meets other rows, or is cut in other places."""
    every = variants(context, rows)
    base = every[0].settings
    every.append(Variant("smaller steps", replace(base, step_tokens=base.step_tokens // 3)))
    yield from ((variant, None) for variant in every)
    present = {variant.name for variant in every}
    for name, settings, order in _make_ups(context, base, len(rows)):
        if name not in present:
            yield Variant(name, settings), order


def _bits_of_rows(
    loaded: LoadedModel,
    settings: Settings,
    rows: Sequence[Row],
    order: Sequence[int] | None,
    must_count: Sequence[str],
) -> tuple[list[Bits], list[str]]:
    """Run rows in an order, or in a job's; return their bits, and counters that stayed at 0."""
    given = rows if order is None else [rows[index] for index in order]
    in_order = order is not None
    done = run_rows(loaded, settings, given, in_order=in_order, logprobs=_NUM_BEST)
    idle = [each for each in must_count if not getattr(done.counters, each)]
    bits = {
        request.request_id if order is None else order[request.request_id]: _bits(request)
        for request in done.requests
    }
    return [bits[index] for index in range(len(rows))], idle


def _bits(request: Request) -> Bits:
    assert request.logprobs is not None
    entries = request.logprobs.rows(request.num_prompt_tokens, len(request.token_ids))
    return entries.token_ids.tobytes() + entries.logprobs.tobytes()


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
