"""Hold a loaded model against itself: stock sequences one by one against the paged path.

A few short random sequences go through the stock model, each alone, before anything of it is
replaced. Then the same tokens go through the model as the engine runs it: packed together, in
chunks, over a paged pool, with our attention and with packed and fused layers. Logits have to be
the same up to rounding. So a family whose positions, masks or scales depend on what only the
stock path has is refused, whatever its code is like.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from batchgen.engine.step import IntArray, SampleBatch, StepPlan
from batchgen.errors import UsageError
from batchgen.runtime.attention import ATTENTION_NAME, ModelForward
from batchgen.runtime.kv_cache import KVCache, LayerGeometry
from batchgen.runtime.torch_attention import TorchAttention

_LENGTHS = (3, 9, 20)
_BLOCK_SIZE = 4
# Tokens of each sequence that each step runs: together, in chunks, and one by one.
_STEPS = ((3, 4, 7), (0, 4, 12), (0, 1, 1))
# How far the median position's logits may be from the stock model's, over their own spread.
# Rounding alone stays far below; a wrong position or mask is far above. It is the median,
# since a router of experts may flip at a near-tie, which changes some positions for good.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True)
class StockLogits:
    """What the stock model says of the check's sequences.

    Attributes:
        sequences: their token ids.
        logits: for each [L, V] float32 logits.
        layers: for each layer the outputs of its attention module, [L, H] a sequence.
    """

    sequences: list[IntArray]
    logits: list[torch.Tensor]
    layers: dict[int, list[torch.Tensor]]


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, max_model_len: int) -> StockLogits:
    """Run the check's sequences through a model with its own attention, each alone.

    Args:
        model: as it was loaded, with nothing replaced.
        max_model_len: bounds the sequences.
    """
    config = model.config.get_text_config(decoder=True)
    sequences = _sequences(config, max_model_len)
    found = StockLogits(sequences, [], {})
    with _own_attention(model), _layer_outputs(model, found.layers):
        for ids in sequences:
            output = model(input_ids=torch.from_numpy(ids).to(model.device)[None], use_cache=False)
            found.logits.append(output.logits[0].float())
    return found


@torch.inference_mode()
def check_paged(model: PreTrainedModel, layers: list[LayerGeometry], stock: StockLogits) -> None:
    """Compare the paged path of a model with its stock logits.

    Args:
        model: ready for the engine.
        layers: geometry of its layers.
        stock: from before anything was replaced.

    Raises:
        UsageError: they differ; the first layer that does is named.
    """
    outputs: dict[int, list[torch.Tensor]] = {}
    with _layer_outputs(model, outputs):
        logits = _paged_logits(model, layers, stock.sequences)
    tolerance = _TOLERANCES[model.dtype]
    errors = [_errors(*pair) for pair in zip(logits, stock.logits, strict=True)]
    worst = max(errors, key=lambda each: each.median().item())
    if bool(worst.median() <= tolerance):
        return
    raise UsageError(
        f"{type(model).__name__} computes other logits in a packed batch over a paged KV cache "
        f"than one sequence at a time (they differ by {worst.median().item():.0%} of their spread, "
        f"{_first_layer(outputs, stock, tolerance)}); results would depend on a row's neighbours. "
        f"This model is not supported"
    )


def _sequences(config: Any, max_model_len: int) -> list[IntArray]:
    """Draw token ids, none of which is special."""
    rng = np.random.default_rng(0)
    special = {
        value
        for key, value in config.to_dict().items()
        if key.endswith("token_id") and isinstance(value, int)
    }
    ordinary = np.setdiff1d(np.arange(config.vocab_size), list(special))
    return [rng.choice(ordinary, min(length, max_model_len)) for length in _LENGTHS]


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Return a model transformers' own attention for a while: eager, which every family has."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


@contextmanager
def _layer_outputs(model: torch.nn.Module, found: dict[int, list[torch.Tensor]]) -> Iterator[None]:
    """Collect [T, H] outputs of the attention modules of each layer."""

    def note(module: torch.nn.Module, inputs: object, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.dim() == 3:
            found.setdefault(module.layer_idx, []).append(first[0].float())  # type: ignore[arg-type]

    hooks = [
        module.register_forward_hook(note)
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "attention" in type(module).__name__.lower()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _paged_logits(
    model: PreTrainedModel, layers: list[LayerGeometry], sequences: Sequence[IntArray]
) -> list[torch.Tensor]:
    """Return [L, V] float32 logits of each sequence, run as the engine runs them."""
    tables, num_blocks = [], 0
    for ids in sequences:
        count = -(-len(ids) // _BLOCK_SIZE)
        tables.append(np.arange(num_blocks, num_blocks + count, dtype=np.int32))
        num_blocks += count
    device = model.device
    cache = KVCache(
        layers, num_blocks, _BLOCK_SIZE, num_swap_blocks=0, dtype=model.dtype, device=device
    )
    forward, attention = ModelForward(model), TorchAttention()

    def put(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for step in _STEPS:
        runs = [
            (row, min(count, len(ids) - begin))
            for row, (ids, begin, count) in enumerate(zip(sequences, done, step, strict=True))
            if min(count, len(ids) - begin) > 0
        ]
        if not runs:
            continue
        plan = _plan(sequences, tables, done, runs)
        every = torch.arange(plan.num_tokens, device=device)
        logits = forward(
            put(plan.token_ids), put(plan.positions), every, attention.begin(plan, cache, put)
        ).float()
        for (row, count), start in zip(runs, plan.query_starts.tolist(), strict=False):
            parts[row].append(logits[start : start + count])
            done[row] += count
    return [torch.cat(part) for part in parts]


def _plan(
    sequences: Sequence[IntArray],
    tables: Sequence[Any],
    done: Sequence[int],
    runs: Sequence[tuple[int, int]],
) -> StepPlan:
    """Make the plan of a step that runs so many tokens of some of the sequences."""
    positions = [np.arange(done[row], done[row] + count) for row, count in runs]
    lengths = np.array([count for _, count in runs])
    width = max(len(tables[row]) for row, _ in runs)
    nothing = np.zeros((0, 2), dtype=np.int64)
    none = np.zeros(0)
    return StepPlan(
        step=0,
        token_ids=np.concatenate(
            [sequences[row][at] for (row, _), at in zip(runs, positions, strict=True)]
        ),
        positions=np.concatenate(positions),
        slots=np.concatenate(
            [
                tables[row][at // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + at % _BLOCK_SIZE
                for (row, _), at in zip(runs, positions, strict=True)
            ]
        ),
        query_starts=np.concatenate(([0], np.cumsum(lengths))),
        context_lens=np.array([done[row] + count for row, count in runs]),
        block_tables=np.stack(
            [np.pad(tables[row], (0, width - len(tables[row]))) for row, _ in runs]
        ),
        samples=SampleBatch(
            rows=none.astype(np.int64),
            temperature=none,
            top_p=none,
            min_p=none,
            top_k=none.astype(np.int64),
            noise_keys=none.astype(np.uint64),
            positions=none.astype(np.int64),
        ),
        swap_out=nothing,
        swap_in=nothing,
        copies=nothing,
    )


def _errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return how far [L, N] numbers are from the expected ones, over the spread of those."""
    if found.shape != expected.shape:
        return torch.full((1,), float("inf"))
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    tiny = torch.finfo(torch.float32).tiny
    errors: torch.Tensor = (found - expected).norm(dim=-1) / spread.clamp_min(tiny)
    return errors


def _first_layer(
    outputs: dict[int, list[torch.Tensor]], stock: StockLogits, tolerance: float
) -> str:
    """Name the first layer whose attention differs."""
    for index in sorted(stock.layers):
        expected = torch.cat(stock.layers[index])
        found = outputs.get(index)
        if found is None or sum(map(len, found)) != len(expected):
            break
        ordered = _by_sequence(torch.cat(found), [len(ids) for ids in stock.sequences])
        if bool(_errors(ordered, expected).median() > tolerance):
            return f"first in the attention of layer {index}"
    return "in which layer is not known"


def _by_sequence(rows: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Bring [T, H] outputs of all steps, in the order they ran, to the order of sequences."""
    order: list[list[int]] = [[] for _ in lengths]
    at = 0
    for step in _STEPS:
        for row, count in enumerate(step):
            run = min(count, lengths[row] - len(order[row]))
            order[row].extend(range(at, at + run))
            at += run
    return rows[[place for part in order for place in part]]
