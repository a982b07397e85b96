"""What the attention kernels read of a step, as one array of integers: one upload a step.

The array has the layout of an :class:`InputShape`. A step of its own shape fills it exactly.
A shape of upper bounds fits many steps: rows and tokens past the step's own are padding
(slot -1, length 0), so that a captured graph finds its numbers at fixed addresses.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.step import StepPlan
from batchgen.kernels.triton.batch import PagedRows, SharedSegments
from batchgen.runtime.shared_prefixes import SharedRun, shared_blocks

Ints32 = npt.NDArray[np.int32]
_Array = TypeVar("_Array", Ints32, torch.Tensor)

# Every part begins at a multiple of this many integers: a launch is specialised for the
# alignment of its pointers, and must find the same in every step.
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class InputShape:
    """Upper bounds of a step, which fix launches and the places of all numbers.

    Attributes:
        num_tokens: T.
        num_rows: R.
        width: W entries of a block table.
        max_query_len: most tokens of a row. Where it is 1, every row has one token and T is R.
        max_keys: most keys of a row; fixes over how many programs they are split.
        num_segments: G shared runs of rows.
        num_places: P tokens in shared runs, each counted once a run.
        num_levels: L runs of one row, at most.
        max_segment_len: most tokens of a run.
    """

    num_tokens: int
    num_rows: int
    width: int
    max_query_len: int
    max_keys: int
    num_segments: int = 0
    num_places: int = 0
    num_levels: int = 0
    max_segment_len: int = 0


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """A step's numbers on the device.

    Attributes:
        slots: [T] where K and V go; -1 is a padded token.
        block_tables: [R, W].
        rows: the rows with all their keys.
        own_rows: the rows with the keys that no segment holds.
        segments: what rows share; None if they share nothing.
    """

    slots: torch.Tensor
    block_tables: torch.Tensor
    rows: PagedRows
    own_rows: PagedRows
    segments: SharedSegments | None


class AttentionMetadata:
    """Lays a step out in an array of :attr:`size` integers, and finds it there again.

    Args:
        shape: what the array has room for.
        block_size: tokens in a block.

    Attributes:
        shape: as given.
        size: integers of the array.
    """

    def __init__(self, shape: InputShape, block_size: int) -> None:
        self.shape = shape
        self.size = 0
        self._block_size = block_size
        self._parts: dict[str, tuple[int, int]] = {}
        segments = shape.num_segments
        for name, length in {
            "slots": shape.num_tokens,
            "query_starts": shape.num_rows + 1,
            "context_lens": shape.num_rows,
            "own_starts": shape.num_rows,
            "place_starts": segments + 1,
            "first_tokens": segments,
            "table_rows": segments,
            "segment_starts": segments,
            "segment_ends": segments,
            "token_places": shape.num_tokens * shape.num_levels,
            "block_tables": shape.num_rows * shape.width,
        }.items():
            self._parts[name] = (self.size, length)
            self.size += -(-length // _ALIGNMENT) * _ALIGNMENT

    def fits(self, plan: StepPlan) -> bool:
        """Return whether a step is within the shape; shared runs always are."""
        shape, lengths = self.shape, np.diff(plan.query_starts)
        return (
            plan.num_tokens <= shape.num_tokens
            and plan.num_rows <= shape.num_rows
            and plan.block_tables.shape[1] <= shape.width
            and int(lengths.max()) <= shape.max_query_len
            and int(plan.context_lens.max()) <= shape.max_keys
        )

    def holds(self, plan: StepPlan, runs: list[SharedRun]) -> bool:
        """Return whether there is room for all that the rows of a step share."""
        return len(self._fitting(plan, runs)) == len(runs)

    def clear(self, array: Ints32) -> None:
        """Write padding alone: [size] int32, overwritten as a whole."""
        array[:] = 0
        part = self._parts_of(array)
        part["slots"][:] = -1
        part["token_places"][:] = -1

    def take(self, narrow: "AttentionMetadata", source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a step from an array whose block tables are narrower, and all else alike.

        What the tables hold past the step's own entries stays as it is: it is not read.

        Args:
            narrow: the layout of the source.
            source: [narrow.size] int32.
            target: [size] int32, on the same device.
        """
        # Tables stand last, so that all before them is in its place.
        (at, length), (_, narrow_length) = (p._parts["block_tables"] for p in (self, narrow))
        num_rows, width = self.shape.num_rows, narrow.shape.width
        target[:at].copy_(source[:at])
        tables = target[at : at + length].view(num_rows, self.shape.width)
        tables[:, :width].copy_(source[at : at + narrow_length].view(num_rows, width))

    def fill(self, array: Ints32, plan: StepPlan, runs: list[SharedRun]) -> None:
        """Write a step that fits, and padding after it.

        Args:
            array: [size] int32, overwritten as a whole.
            plan: the step.
            runs: from :func:`batchgen.runtime.shared_prefixes.shared_runs`. If the shape has no
                room for one, its rows go over its keys alone.
        """
        assert self.fits(plan)
        runs = self._fitting(plan, runs)
        self.clear(array)
        part = self._parts_of(array)
        num_tokens, num_rows = plan.num_tokens, plan.num_rows
        part["slots"][:num_tokens] = plan.slots
        part["query_starts"][: num_rows + 1] = plan.query_starts
        part["query_starts"][num_rows + 1 :] = num_tokens
        part["context_lens"][:num_rows] = plan.context_lens
        part["own_starts"][:num_rows] = shared_blocks(runs, num_rows) * self._block_size
        tables = part["block_tables"].reshape(self.shape.num_rows, self.shape.width)
        tables[:num_rows, : plan.block_tables.shape[1]] = plan.block_tables
        self._fill_segments(part, plan, runs)

    def find(self, array: torch.Tensor) -> StepMetadata:
        """Return the step's tensors as views of [size] int32 numbers on the device."""
        shape, part = self.shape, self._parts_of(array)
        starts, lengths = part["query_starts"], part["context_lens"]
        segments = None
        if shape.num_segments:
            segments = SharedSegments(
                place_starts=part["place_starts"],
                first_tokens=part["first_tokens"],
                table_rows=part["table_rows"],
                key_starts=part["segment_starts"],
                key_ends=part["segment_ends"],
                token_places=part["token_places"].view(shape.num_tokens, shape.num_levels),
                num_places=shape.num_places,
                max_query_len=shape.max_segment_len,
            )
        return StepMetadata(
            slots=part["slots"],
            block_tables=part["block_tables"].view(shape.num_rows, shape.width),
            rows=PagedRows(starts, lengths, shape.max_query_len),
            own_rows=PagedRows(starts, lengths, shape.max_query_len, part["own_starts"]),
            segments=segments,
        )

    def _parts_of(self, array: _Array) -> dict[str, _Array]:
        return {name: array[at : at + n] for name, (at, n) in self._parts.items()}

    def _fitting(self, plan: StepPlan, runs: list[SharedRun]) -> list[SharedRun]:
        """Leave out the runs that there is no room for, and all runs within them."""
        shape, chosen = self.shape, list[SharedRun]()
        levels = np.zeros(plan.num_rows, dtype=np.int64)
        num_places = 0
        for run in runs:
            num_tokens = _tokens(plan, run)
            level = int(levels[run.first])
            stands = not run.start or any(
                outer.stop == run.start and outer.first <= run.first < outer.end for outer in chosen
            )
            if (
                stands
                and len(chosen) < shape.num_segments
                and level < shape.num_levels
                and num_tokens <= shape.max_segment_len
                and num_places + num_tokens <= shape.num_places
            ):
                chosen.append(run)
                num_places += num_tokens
                levels[run.first : run.end] += 1
        return chosen

    def _fill_segments(
        self, part: dict[str, Ints32], plan: StepPlan, runs: list[SharedRun]
    ) -> None:
        shape = self.shape
        places = part["token_places"].reshape(shape.num_tokens, shape.num_levels)
        levels = np.zeros(plan.num_rows, dtype=np.int64)
        at = 0
        for i, run in enumerate(runs):
            start, num_tokens = int(plan.query_starts[run.first]), _tokens(plan, run)
            level = levels[run.first]
            part["place_starts"][i] = at
            part["first_tokens"][i] = start
            part["table_rows"][i] = run.first
            part["segment_starts"][i] = run.start * self._block_size
            part["segment_ends"][i] = run.stop * self._block_size
            places[start : start + num_tokens, level] = np.arange(at, at + num_tokens)
            levels[run.first : run.end] += 1
            at += num_tokens
        part["place_starts"][len(runs) :] = at


def exact_inputs(
    plan: StepPlan, block_size: int, runs: list[SharedRun], max_query_len: int | None = None
) -> AttentionMetadata:
    """Lay out one step with nothing to spare.

    Args:
        plan: the step.
        block_size: tokens in a block.
        runs: what its rows share.
        max_query_len: an upper bound to use in place of the step's own.
    """
    longest = int(np.diff(plan.query_starts).max())
    levels = np.zeros(plan.num_rows, dtype=np.int64)
    for run in runs:
        levels[run.first : run.end] += 1
    lengths = [_tokens(plan, run) for run in runs]
    shape = InputShape(
        num_tokens=plan.num_tokens,
        num_rows=plan.num_rows,
        width=plan.block_tables.shape[1],
        max_query_len=longest if max_query_len is None else max_query_len,
        max_keys=int(plan.context_lens.max()),
        num_segments=len(runs),
        num_places=sum(lengths),
        num_levels=int(levels.max()),
        max_segment_len=max(lengths, default=0),
    )
    return AttentionMetadata(shape, block_size)


def _tokens(plan: StepPlan, run: SharedRun) -> int:
    """Count the tokens of a run's rows."""
    return int(plan.query_starts[run.end] - plan.query_starts[run.first])
