"""Tile shapes of the attention kernel, per device and shape.

A table of our own: Triton's autotuner does not work in the interpreter, and a choice by
measurement would make results depend on the moment.
"""

from typing import NamedTuple

import torch

from batchgen.kernels.triton.launch import next_power_of_2

# What a product of matrices takes at least along each axis.
LEAST_SIDE = 16
# Key tiles that a split gets at least: below that, joining costs more than it saves.
_LEAST_TILES_A_SPLIT = 4
_MOST_SPLITS = 32
# A tile of few queries that has more rows than this is one of many.
_MOST_FEW_ROWS = 32

# Rows of a tile whose results may not depend on the batch.
_MOST_FIXED_ROWS = 64


class AttentionTile(NamedTuple):
    """What one program of the attention kernel works on at a time.

    Attributes:
        rows: query vectors: some tokens times the heads that share a key/value head.
        keys: tokens of the pool.
        warps, stages: see :class:`batchgen.kernels.triton.launch.Launch`.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# The largest head that a tile holds in registers.
LARGEST_HEAD = 256

# An upper bound of a row's tokens that always gives the tile of many queries.
MANY_QUERIES = 1 << 30

# (least capability, element bytes, most padded head size) -> tile of many queries (prefill,
# chunks, shared prefixes) and tile of few (decode, whose rows are a group's heads). Keys
# are loaded two stages behind their block's number: a decode tile needs five stages to have a
# second one in flight. Capability 0 is the interpreter, and what is older than the others.
_TILES: dict[tuple[int, int, int], tuple[AttentionTile, AttentionTile]] = {
    (0, 2, 256): (AttentionTile(32, 32, 4, 1), AttentionTile(16, 32, 4, 1)),
    (0, 4, 256): (AttentionTile(32, 32, 4, 1), AttentionTile(16, 32, 4, 1)),
    (80, 2, 64): (AttentionTile(128, 64, 8, 3), AttentionTile(16, 128, 4, 5)),
    (80, 2, 128): (AttentionTile(128, 64, 8, 3), AttentionTile(16, 64, 4, 5)),
    (80, 2, 256): (AttentionTile(64, 32, 8, 2), AttentionTile(16, 32, 4, 5)),
    (80, 4, 64): (AttentionTile(32, 32, 8, 2), AttentionTile(16, 32, 4, 3)),
    # With four warps the launch over a shared prefix that leaves its sums spills 16 bytes.
    (80, 4, 128): (AttentionTile(16, 32, 8, 2), AttentionTile(16, 16, 4, 3)),
    (80, 4, 256): (AttentionTile(16, 16, 4, 2), AttentionTile(16, 16, 4, 3)),
    (90, 2, 64): (AttentionTile(128, 128, 8, 3), AttentionTile(16, 128, 4, 5)),
    (90, 2, 128): (AttentionTile(128, 64, 8, 3), AttentionTile(16, 64, 4, 5)),
    # 64 keys spill there, not from 10.0 on.
    (90, 2, 256): (AttentionTile(64, 32, 8, 2), AttentionTile(16, 32, 4, 5)),
    (100, 2, 256): (AttentionTile(64, 64, 8, 2), AttentionTile(16, 32, 4, 5)),
}
# A multiple of every tile's keys.
MOST_KEYS = max(tile.keys for both in _TILES.values() for tile in both)
# Consumer cards of this capability and above have 100 KiB of shared memory, as those of 8.6.
_SMALL_MEMORY = 120


def attention_tile(
    capability: int, dtype: torch.dtype, head_size: int, group: int, max_query_len: int
) -> AttentionTile:
    """Choose a tile; a model meets two of them, so that few variants are compiled.

    Args:
        capability: see :func:`batchgen.kernels.triton.launch.device_capability`.
        dtype: of the query.
        head_size: the larger of key and value size.
        group: query heads to a key/value head.
        max_query_len: an upper bound of a row's tokens.
    """
    assert head_size <= LARGEST_HEAD
    if capability >= _SMALL_MEMORY:
        capability = 80
    size = next_power_of_2(head_size, LEAST_SIDE)
    fitting = [
        key
        for key in _TILES
        if key[0] <= capability and key[1] == dtype.itemsize and key[2] >= size
    ]
    # The smallest head that is large enough, then the newest card.
    many, few = _TILES[max(fitting, key=lambda key: (-key[2], key[0]))]
    rows = next_power_of_2(group, few.rows)
    if max_query_len * group <= rows <= _MOST_FEW_ROWS:
        return few._replace(rows=rows)
    return many


def fixed_order_tile(
    capability: int, dtype: torch.dtype, head_size: int, group: int
) -> AttentionTile:
    """Choose the tile of all launches where a result may not depend on the batch.

    It is that of many queries with fewer of them: decode fills few, and a launch that takes up
    sums needs registers for them.

    Args:
        capability, dtype, head_size, group: see :func:`attention_tile`.
    """
    many = attention_tile(capability, dtype, head_size, group, MANY_QUERIES)
    return many._replace(rows=min(many.rows, _MOST_FIXED_ROWS))


def num_splits(num_programs: int, max_keys: int, tile: AttentionTile, processors: int) -> int:
    """Choose over how many programs the keys of a row are split, a power of two.

    Args:
        num_programs: programs of a launch without a split.
        max_keys: most keys of a row.
        tile: the launch's tile.
        processors: multiprocessors of the device.
    """
    splits = 1
    tiles = -(-max_keys // tile.keys)
    while (
        splits < _MOST_SPLITS
        and num_programs * splits < 2 * processors
        and tiles >= 2 * splits * _LEAST_TILES_A_SPLIT
    ):
        splits *= 2
    return splits
