"""What a whole job must cost at least: the roofline of rows, not of a kernel.

    python scripts/gpu_check_parts/prediction.py     # the headline's table of docs/gpu.md

A forward pass computes two operations for each weight and token; attention four for each head's
element and pair of tokens. Prompt tokens that rows share are computed once. The bound is the
longer of arithmetic and memory; nothing overlaps perfectly, so a job takes longer.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernel_roofline import H100, H200, LLAMA_8B, Card, Layer

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Model:
    """A llama's sizes.

    Attributes:
        layer: its attention.
        weight_bytes: of an element.
    """

    layers: int
    hidden: int
    intermediate: int
    vocab: int
    layer: Layer
    weight_bytes: int = 2

    @property
    def linear_params(self) -> int:
        """Weights that every token goes through."""
        attention = self.layer.heads + self.layer.kv_heads
        projections = self.hidden * self.layer.key_size * 2 * attention
        return self.layers * (projections + 3 * self.hidden * self.intermediate)

    @property
    def head_params(self) -> int:
        """Weights that only sampled positions go through."""
        return self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of a token, all layers."""
        return self.layers * self.layer.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Work:
    """What rows ask for, all together.

    Attributes:
        prefill_tokens: prompt tokens that are computed, shared ones once.
        output_tokens: tokens that are sampled.
        decode_tokens: of these, tokens that run through the model (a row's last does not).
        pairs: query-key pairs of all computed tokens.
        kv_tokens_read: tokens whose KV is read, a shared prefix once a step.
        steps: forward passes.
    """

    prefill_tokens: float
    output_tokens: float
    decode_tokens: float
    pairs: float
    kv_tokens_read: float
    steps: float


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds by resource."""

    arithmetic_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.arithmetic_s, self.memory_s)


def bound(model: Model, work: Work, card: Card) -> Bound:
    """Divide operations and bytes by what a card does in a second."""
    tokens = work.prefill_tokens + work.decode_tokens
    flops = (
        2 * model.linear_params * tokens
        + 2 * model.head_params * work.output_tokens
        + model.layers * model.layer.flops_per_pair * work.pairs
    )
    weights = (model.linear_params + model.head_params) * model.weight_bytes
    read = weights * work.steps + model.kv_bytes_per_token * (work.kv_tokens_read + tokens)
    return Bound(flops / card.flops_per_s, read / card.bytes_per_s)


def few_shot_work(
    rows: float, shared: int, own: int, outputs: int, *, rows_at_once: int, step_tokens: int,
    sharing: bool = True,
) -> Work:  # fmt: skip
    """Rows on one prefix; the prefix is computed and read once, or for every row.

    A row's pairs: each of its own tokens sees the prefix and what stands before it.
    """
    computed = own if sharing else shared + own
    prefill = rows * computed + (shared if sharing else 0)
    decode = rows * (outputs - 1)
    total = own + outputs - 1
    a_row = total * shared + total * (total + 1) / 2
    if not sharing:
        a_row += shared * (shared + 1) / 2
    steps = max((prefill + decode) / step_tokens, rows / rows_at_once * outputs)
    own_read = decode * (own + outputs / 2)
    read = own_read + (steps * shared if sharing else decode * shared)
    return Work(prefill, rows * outputs, decode, rows * a_row, read, steps)


LLAMA_3_8B = Model(32, 4096, 14_336, 128_256, LLAMA_8B)

# The headline: labels of ten million rows on one few-shot prefix, in a night.
ROWS = 10_000_000
SHARED, OWN, OUTPUTS = 1500, 60, 8
ROWS_AT_ONCE, STEP_TOKENS = 1024, 8192
# Shares of the data sheet's arithmetic. NanoFlow (OSDI 2025) reports 50 to 72 % for itself and
# 22 to 38 % for the engines it is compared with.
SHARES = (1.0, 0.6, 0.35)


def headline(card: Card) -> list[tuple[str, Bound]]:
    """Return the bound of the headline's job with and without sharing."""
    found = []
    for name, sharing in (("prefix computed once", True), ("prefix computed for every row", False)):
        work = few_shot_work(
            ROWS, SHARED, OWN, OUTPUTS, rows_at_once=ROWS_AT_ONCE, step_tokens=STEP_TOKENS,
            sharing=sharing,
        )  # fmt: skip
        found.append((name, bound(LLAMA_3_8B, work, card)))
    return found


def headline_table() -> str:
    """Write the headline's table, hours by card and share of the peak."""
    shares = " | ".join(f"at {share:.0%}, h" for share in SHARES)
    lines = [
        f"| card | rows | {shares} | memory, h | rows/s at 60% |",
        "|---|---|---|---|---|---|---|",
    ]
    for card in (H100, H200):
        for name, least in headline(card):
            hours = [f"{least.arithmetic_s / share / 3600:.1f}" for share in SHARES]
            rate = f"{ROWS * 0.6 / least.arithmetic_s:,.0f}"
            cells = [card.name, name, *hours, f"{least.memory_s / 3600:.1f}", rate]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(headline_table())
