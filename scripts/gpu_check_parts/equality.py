"""Part 4: the engine against transformers' ``generate``, whatever the pool and the batch.

In float32 tokens must be the same; a difference is a fault unless it begins at a near-tie. In
bfloat16 a tie may fall either way, so it is the distributions that are compared: ours must not
be further from float32 than transformers' own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.counters import SchedulerCounters
from batchgen.engine.preemption import PreemptionPolicy
from batchgen.engine.request import Request
from batchgen.runtime.model import LoadedModel
from batchgen.runtime.shared_prefixes import SharedPrefix
from batchgen.sampling import SamplingParams
from gpu_check_parts.context import Context
from gpu_check_parts.engines import Row, Settings, build_engine, run_requests, run_rows
from gpu_check_parts.models import FAMILIES, VOCAB_SIZE, random_model, stock_copy

# Two tokens whose logits are nearer than this may change places in float32.
_NEAR_TIE = 1e-4
# Ours may be this much further from float32 than transformers' own bfloat16 is.
_ROOM = 1.5
_LEAST_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run the same rows, and the counters that must show that it was one."""

    name: str
    settings: Settings
    must_count: tuple[str, ...] = ()


def run(context: Context) -> None:
    """Compare this process's share of the families, in both precisions."""
    every = {
        f"{family}, {precision}": partial(compare, context, family)
        for precision, compare in (("fp32", _compare_tokens), ("bf16", _compare_distributions))
        for family in FAMILIES
    }
    for name in context.in_time(context.mine(list(every)), str):
        with context.attempt(name):
            every[name]()


def variants(context: Context, rows: Sequence[Row]) -> list[Variant]:
    """Settings that must not change a token."""
    size = context.choose(8, 4)
    needs = [-(-(len(row.prompt) + row.output_tokens) // size) for row in rows]
    base = Settings(
        num_blocks=sum(needs) + 8,
        block_size=size,
        # Small, so that prompts fall into chunks.
        step_tokens=context.choose(256, 64),
        # Optimistic, so that a tight pool runs out.
        admission=AdmissionPolicy.PROMPT,
    )
    tight = replace(base, num_blocks=max(max(needs) + 2, sum(needs) // 4))
    swapping = replace(tight, swap_blocks=sum(needs), preemption=PreemptionPolicy.SWAP)
    moved = ("preemptions", "swapped_out_blocks", "swapped_in_blocks")
    return [
        Variant("roomy pool", base, ("cached_tokens",)),
        Variant("cascade on", replace(base, sharing=SharedPrefix.ON)),
        Variant("cascade off", replace(base, sharing=SharedPrefix.OFF)),
        Variant("no prefix cache", replace(base, prefix_caching=False)),
        Variant("swap forced", swapping, moved),
        Variant("recompute forced", tight, ("preemptions", "recomputed_tokens")),
        Variant("overlap on, swap forced", replace(swapping, overlap=True), moved),
        # What a job does on a CPU in any case.
        *context.choose(
            [
                Variant("overlap off", replace(base, overlap=False)),
                Variant("graphs off", replace(base, cuda_graphs=False)),
            ],
            [],
        ),
    ]


def mixed_rows(context: Context) -> list[Row]:
    """Rows on shared prefixes of their own group, some alone; only the tokens are drawn.

    Lengths are always the same, so that a pool that is too small is so with any seed.
    """
    rng = np.random.default_rng(context.seed)
    prefix_tokens, groups, count, longest_own, output_tokens = context.choose(
        (150, 3, 12, 70, 48), (30, 2, 6, 18, 16)
    )
    prefixes = [_tokens(rng, prefix_tokens) for _ in range(groups)]
    rows = []
    for index in range(count):
        own = _tokens(rng, 1 + 7 * index % longest_own)
        # One in four stands alone.
        prompt = own if index % 4 == 3 else prefixes[index % groups] + own
        rows.append(Row(prompt, output_tokens - index % 3))
    return rows


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(3, VOCAB_SIZE, count).tolist()
    return tokens


def _compare_tokens(context: Context, family: str) -> None:
    config = FAMILIES[family](context.dry_run)
    loaded = random_model(config, torch.float32, context.device, context.seed, loud=True)
    stock = stock_copy(loaded.model)
    rows = mixed_rows(context)
    expected = [_generate(stock, row) for row in rows]
    for variant in variants(context, rows):
        name = f"{family}, fp32, {variant.name}"
        with context.attempt(name):
            done = run_rows(loaded, variant.settings, rows)
            verdicts = [
                _judge(stock, rows[index], expected[index], output)
                for index, output in done.outputs.items()
            ]
            counters = done.counters
            idle = [each for each in variant.must_count if not getattr(counters, each)]
            wrong = [verdict for verdict in verdicts if verdict.startswith("wrong")]
            ties = sum(verdict.startswith("tie") for verdict in verdicts)
            detail = (
                f"{len(rows)} rows equal, {ties} after a near-tie{_counted(counters)}, "
                f"{done.graph_steps} of {done.stats.steps} steps as graphs"
            )
            problems = wrong + [f"{each} is 0: the variant did not happen" for each in idle]
            context.check(name, not problems, problems[0] if problems else detail)


def _counted(counters: SchedulerCounters) -> str:
    return (
        f"; {counters.cached_tokens} tokens from the cache, {counters.preemptions} preemptions, "
        f"{counters.swapped_in_blocks} blocks swapped in"
    )


@torch.inference_mode()
def _generate(stock: Any, row: Row) -> list[int]:
    ids = torch.tensor([list(row.prompt)], device=stock.device)
    output = stock.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=row.output_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(row.prompt) :].tolist()
    return tokens


@torch.inference_mode()
def _judge(stock: Any, row: Row, expected: list[int], output: list[int]) -> str:
    """Say "equal", "tie at ..." or "wrong at ..."."""
    if output == expected:
        return "equal"
    pairs = zip(expected, output, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(output)))
    if at >= min(len(expected), len(output)):
        return f"wrong: {len(output)} tokens, generate made {len(expected)}"
    ids = torch.tensor([[*row.prompt, *expected[:at]]], device=stock.device)
    logits = stock(input_ids=ids).logits[0, -1].float()
    gap = float(logits[expected[at]] - logits[output[at]])
    kind = "tie" if abs(gap) <= _NEAR_TIE else "wrong"
    return f"{kind} at token {at} of a prompt of {len(row.prompt)}: logits {gap:.1e} apart"


def _compare_distributions(context: Context, family: str) -> None:
    """Log-probabilities of the whole vocabulary after prompts that grow by a token.

    Each finds all but its last token in the cache, so that both prefill and steps of a single
    token are among them.
    """
    config = FAMILIES[family](context.dry_run)
    loaded = random_model(config, torch.bfloat16, context.device, context.seed, loud=True)
    rows = mixed_rows(context)[: context.choose(6, 2)]
    prompts = [
        list(row.prompt)[:end]
        for row in rows
        for end in range(max(1, len(row.prompt) - 3), len(row.prompt) + 1)
    ]
    settings = variants(context, rows)[0].settings
    ours = score_prompts(loaded, settings, prompts)
    exact, stock = (stock_copy(loaded.model, dtype) for dtype in (torch.float32, None))
    wanted, usual = (_log_probabilities(model, prompts) for model in (exact, stock))
    allowed = max(_LEAST_ERROR, _ROOM * float((usual - wanted).abs().max()))
    error = float((torch.from_numpy(ours) - wanted).abs().max())
    detail = f"error {error:.3f} of log-probabilities, allowed {allowed:.3f}, {len(prompts)} rows"
    context.check(f"{family}, bf16, distributions", error <= allowed, detail)


def score_prompts(
    loaded: LoadedModel,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    order: Sequence[int] | None = None,
) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return [N, V] log-probabilities of all tokens after each prompt, by its number."""
    vocabulary = np.arange(loaded.vocab_size)
    requests = [
        Request.create(
            index, prompts[index], SamplingParams(max_tokens=1),
            max_model_len=loaded.max_model_len, scored_tokens=vocabulary,
        )
        for index in (range(len(prompts)) if order is None else order)
    ]  # fmt: skip
    done = run_requests(build_engine(loaded, settings), requests, loaded)
    scores = {request.request_id: request.scores for request in done.requests}
    return np.stack([scores[index] for index in range(len(prompts))])


@torch.inference_mode()
def _log_probabilities(stock: Any, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """[N, V] float64, one prompt at a time."""
    scores = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=stock.device)
        logits = stock(input_ids=ids).logits[0, -1]
        scores.append(torch.log_softmax(logits.float(), dim=-1).double().cpu())
    return torch.stack(scores)
