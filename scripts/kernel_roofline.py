"""Count what each kernel must move and compute, and the time that implies on a card.

    python scripts/kernel_roofline.py

The counts are lower bounds: every byte of keys and values is read once by each row (once by
all its rows for a shared prefix), every query and result once; rereads are the caches' work. A
kernel cannot take less time than the slowest of its three resources: memory, tensor cores, and
the special functions that compute exponentials. scripts/gpu_check.py measures against this.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A GPU's peaks, from its data sheet; half precision without sparsity.

    Attributes:
        exponentials_per_s: 16 a clock and multiprocessor (FlashAttention-3, section 3.1).
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    exponentials_per_s: float


H100 = Card("H100 SXM", 3.35e12, 989e12, 3.9e12)
H200 = Card("H200 SXM", 4.8e12, 989e12, 3.9e12)


@dataclass(frozen=True)
class Layer:
    """One layer's attention; ``value_size`` equals ``key_size`` in most families."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    element_bytes: int = 2
    kv_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in the pool."""
        return self.kv_heads * (self.key_size + self.value_size) * self.kv_bytes

    @property
    def query_bytes_per_token(self) -> int:
        """Bytes of a token's queries and results."""
        return self.heads * (self.key_size + self.value_size) * self.element_bytes

    @property
    def part_bytes_per_token(self) -> int:
        """Bytes of a token's result as one float32 part, with its log-sum-exp."""
        return self.heads * (self.value_size + 1) * 4

    @property
    def flops_per_pair(self) -> int:
        """Multiplications and additions of one query with one key, over all heads."""
        return 2 * self.heads * (self.key_size + self.value_size)


@dataclass(frozen=True)
class Cost:
    """What a launch moves and computes."""

    bytes: int
    flops: int = 0
    exponentials: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """Sum up launches one after another."""
        return Cost(
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.exponentials + other.exponentials,
        )

    def seconds(self, card: Card) -> float:
        """The least time on a card: that of the resource that is busy longest."""
        return max(self._times(card).values())

    def bound(self, card: Card) -> str:
        """Name that resource."""
        times = self._times(card)
        return max(times, key=lambda name: times[name])

    def _times(self, card: Card) -> dict[str, float]:
        return {
            "memory": self.bytes / card.bytes_per_s,
            "tensor cores": self.flops / card.flops_per_s,
            "exponentials": self.exponentials / card.exponentials_per_s,
        }


def store_kv(layer: Layer, num_tokens: int) -> Cost:
    """K and V of ``num_tokens`` are read and written; slots take 8 bytes a token and head."""
    read = layer.kv_heads * (layer.key_size + layer.value_size) * layer.element_bytes
    return Cost(num_tokens * (read + layer.kv_bytes_per_token + 8 * layer.kv_heads))


def attention(layer: Layer, rows: Sequence[tuple[int, int]], num_splits: int = 1) -> Cost:
    """Causal attention of rows of (context, queries): prefill, chunks and decode.

    A row's keys and values are read once. Of n queries at the end of C keys, query i sees
    C - n + i + 1: n (C - n) + n (n + 1) / 2 pairs. With splits, results are float32 parts that
    are written here and read by :func:`join`.
    """
    num_queries = sum(n for _, n in rows)
    num_keys = sum(context for context, _ in rows)
    pairs = sum(n * (context - n) + n * (n + 1) // 2 for context, n in rows)
    results = layer.query_bytes_per_token
    if num_splits > 1:
        queries = layer.heads * layer.key_size * layer.element_bytes
        results = queries + num_splits * layer.part_bytes_per_token
    return Cost(
        num_keys * layer.kv_bytes_per_token + num_queries * results,
        pairs * layer.flops_per_pair,
        pairs * layer.heads,
    )


def shared_prefix(layer: Layer, prefix_tokens: int, num_queries: int, num_splits: int = 1) -> Cost:
    """Attention of ``num_queries`` tokens to the whole of one prefix, read once for all."""
    queries = layer.heads * layer.key_size * layer.element_bytes
    pairs = prefix_tokens * num_queries
    return Cost(
        prefix_tokens * layer.kv_bytes_per_token
        + num_queries * (queries + num_splits * layer.part_bytes_per_token),
        pairs * layer.flops_per_pair,
        pairs * layer.heads,
    )


def join(layer: Layer, num_tokens: int, num_parts: int) -> Cost:
    """``num_parts`` float32 parts of each token are read, one result is written."""
    result = layer.heads * layer.value_size * layer.element_bytes
    return Cost(num_tokens * (num_parts * layer.part_bytes_per_token + result))


def move_blocks(layer: Layer, num_layers: int, block_size: int, num_blocks: int) -> Cost:
    """Blocks of all layers are read and written: a copy, a gather or a scatter."""
    return Cost(2 * num_blocks * block_size * num_layers * layer.kv_bytes_per_token)


# Llama-3-8B: 32 layers, 32 query heads on 8 key/value heads of 128, bfloat16.
LLAMA_8B = Layer(32, 8, 128, 128)

# Name and cost of each kernel at the shape that its name states, for one layer of LLAMA_8B.
STATED: dict[str, Cost] = {
    "store_kv, 8,192 tokens": store_kv(LLAMA_8B, 8192),
    "decode, 256 rows of 2,048": attention(LLAMA_8B, [(2048, 1)] * 256),
    "decode, 8 rows of 32,768 in 8 splits": attention(LLAMA_8B, [(32768, 1)] * 8, 8)
    + join(LLAMA_8B, 8, 8),
    "prefill, 4 rows of 2,048": attention(LLAMA_8B, [(2048, 2048)] * 4),
    "chunk, 2,048 queries at the end of 16,384": attention(LLAMA_8B, [(16384, 2048)]),
    "decode, 256 rows on a prefix of 1,500 with 60 own, not shared": attention(
        LLAMA_8B, [(1560, 1)] * 256
    ),
    "decode, 256 rows on a prefix of 1,500 with 60 own, shared": attention(
        LLAMA_8B, [(60, 1)] * 256
    )
    + shared_prefix(LLAMA_8B, 1500, 256, 2)
    + join(LLAMA_8B, 256, 3),
    "join of 8 parts, 256 tokens": join(LLAMA_8B, 256, 8),
    "copy of 64 blocks of 16, 32 layers": move_blocks(LLAMA_8B, 32, 16, 64),
}


def main() -> None:
    """Print the table."""
    print("| kernel, one layer of Llama-3-8B in bf16 | MB | GFLOP | H100, us | H200, us | bound |")
    print("|---|---|---|---|---|---|")
    for name, cost in STATED.items():
        times = [f"{cost.seconds(card) * 1e6:.1f}" for card in (H100, H200)]
        cells = [name, f"{cost.bytes / 1e6:.1f}", f"{cost.flops / 1e9:.1f}", *times]
        print("| " + " | ".join([*cells, cost.bound(H100)]) + " |")


if __name__ == "__main__":
    main()
