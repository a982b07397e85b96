"""The row counts that decode graphs are captured for, and what each has room for."""

from batchgen.runtime.paged_inputs import InputShape

# Beyond this many rows a step is bound by the device, which a graph makes no faster.
MOST_GRAPH_ROWS = 512
# Runs of rows with a common prefix in a graph of one level: more would make its launch over
# them larger than the work of a step that has few.
_FEW_RUNS = 4


def ladder(max_rows: int) -> list[int]:
    """Give the rungs up to the first that holds all rows, or the most that a graph has.

    From 16 rows on no step is padded by more than a quarter.
    """
    max_rows = min(max_rows, MOST_GRAPH_ROWS)
    rungs = [1]
    while rungs[-1] < max_rows:
        last = rungs[-1]
        # 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ...
        power = 1 << (last.bit_length() - 1)
        rungs.append(last + max(1, power // 4 if last >= 16 else min(power, 4)))
    rungs[-1] = max_rows
    return rungs


def graph_shapes(num_rows: int, width: int, max_keys: int, *, shares: bool) -> list[InputShape]:
    """Give what graphs of some rows have room for: the first that holds a step takes it.

    Without shared prefixes; with few of them, one a row; with any number, two a row.

    Args:
        num_rows: of a rung.
        width: entries of a block table.
        max_keys: most tokens of a row.
        shares: whether prefixes may be shared at all.
    """
    shapes = [InputShape(num_rows, num_rows, width, 1, max_keys)]
    levels = {1: min(_FEW_RUNS, num_rows // 2), 2: num_rows} if shares and num_rows > 1 else {}
    for num_levels, num_segments in levels.items():
        shape = InputShape(
            num_tokens=num_rows,
            num_rows=num_rows,
            width=width,
            max_query_len=1,
            max_keys=max_keys,
            num_segments=num_segments,
            num_places=num_levels * num_rows,
            num_levels=num_levels,
            max_segment_len=num_rows,
        )
        shapes.append(shape)
    return shapes
