"""Blocks on their way to the CPU pool and back, on a stream of their own: the link.

A block leaves the pool while the model computes: the link gathers it into a staging buffer and
copies that to pinned memory. Only what writes to the block afterwards waits for it, and blocks
that the very next step writes go first, so that it rarely waits long. A block comes back in
time for the step that runs it: the link fills a staging buffer while the step before still
computes, and the compute stream scatters it at the head of its own step.

The fences, each an event::

    compute   ... step n-1 ──●                  ┌── what writes to the blocks
    link                     └─ gather, to host ─●

    link      from host ──●               ┌──── fills this staging buffer again
    compute               └── scatter ────●

The CPU pool needs none: only the link touches it, in order.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from batchgen.engine.step import IntArray, StepPlan
from batchgen.runtime.device.api import Device, Event
from batchgen.runtime.device.transfers import Put, Uploads
from batchgen.runtime.kv_cache import BlockMoves

# Bytes of a staging buffer, and how many take turns: what a step brings back beyond that
# cannot be on its way before the step begins.
_STAGING_BYTES = 32 << 20
_NUM_STAGING = 4
# Blocks whose copy is timed: enough to fill the link.
_MEASURED_BLOCKS = 8


def staging_bytes(num_swap_blocks: int, bytes_per_block: int) -> int:
    """Bytes of all staging buffers, which lie on the device."""
    return _NUM_STAGING * _staging_blocks(num_swap_blocks, bytes_per_block) * bytes_per_block


def _staging_blocks(num_swap_blocks: int, bytes_per_block: int) -> int:
    return min(num_swap_blocks, max(1, _STAGING_BYTES // bytes_per_block))


@dataclass(slots=True)
class _Staging:
    """A staging buffer.

    Attributes:
        rows: [blocks, bytes of a block] uint8 on the device.
        filled: the link has written what the compute stream is to scatter.
        scattered: the compute stream has read that.
    """

    rows: torch.Tensor
    filled: Event
    scattered: Event


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Blocks whose way out has begun, and the event after it."""

    blocks: IntArray
    sent: Event


@dataclass(frozen=True, slots=True)
class Returning:
    """Blocks that come back together.

    Attributes:
        places: [n] rows of the CPU pool.
        blocks: [n] int64 on the device; there when the step's work runs.
    """

    places: IntArray
    blocks: torch.Tensor


class SwapLink:
    """The way between the pool and the CPU pool.

    Args:
        device: the pool's.
        moves: moves the pool's blocks.
        cpu_pool: [C, moves.staging_bytes] uint8 in pinned memory.
        staging_blocks: blocks in a staging buffer; None takes what fits 32 MiB.
    """

    def __init__(
        self,
        device: Device,
        moves: BlockMoves,
        cpu_pool: torch.Tensor,
        staging_blocks: int | None = None,
    ) -> None:
        self._device = device
        self._moves = moves
        self._cpu_pool = cpu_pool
        self._link = device.new_stream()
        self._uploads = Uploads(device, self._link)
        self._written = device.new_event()
        self._leaving: list[_Leaving] = []
        blocks = staging_blocks or _staging_blocks(len(cpu_pool), moves.staging_bytes)
        self._staging = [self._new_staging(blocks) for _ in range(_NUM_STAGING)]
        self._turn = 0

    @property
    def is_sending(self) -> bool:
        """Whether blocks are on their way out, so that who writes to them has to wait."""
        while self._leaving and self._leaving[0].sent.is_done():
            self._leaving.pop(0)
        return bool(self._leaving)

    def send(self, copies: IntArray, first: IntArray) -> None:
        """Enqueue the way out of [N, 2] (pool block, CPU block), after all work so far.

        Args:
            copies: no place in the CPU pool twice.
            first: blocks that are to be sent before the others.
        """
        if not len(copies):
            return
        copies = copies[np.argsort(~np.isin(copies[:, 0], first), kind="stable")]
        self._device.compute.record(self._written)
        self._link.wait_for(self._written)
        # Block numbers of the link's own: a step's are gone when the next step's arrive.
        self._uploads.begin()
        pieces = [(piece, self._uploads.put(piece[:, 0])) for piece in self._pieces(copies)]
        self._uploads.send()
        for piece, blocks in pieces:
            self._send_piece(piece, blocks)

    def guard(self, blocks: IntArray) -> None:
        """Let later work of the compute stream, which writes to blocks, wait for their copies."""
        for at in reversed(range(len(self._leaving))):
            if np.isin(self._leaving[at].blocks, blocks).any():
                self._device.compute.wait_for(self._leaving[at].sent)
                # The link works in order: what it sent before is waited for, too.
                del self._leaving[: at + 1]
                return

    def prepare_return(self, copies: IntArray, put: Put) -> list[Returning]:
        """Upload where [N, 2] (CPU block, pool block) go, in pieces of a staging buffer."""
        return [Returning(piece[:, 0], put(piece[:, 1])) for piece in self._pieces(copies)]

    def fetch(self, returning: list[Returning]) -> None:
        """Enqueue the way back, before the compute stream's later work."""
        for piece in returning:
            self._fetch_piece(piece)

    def measure_s_per_block(self) -> float:
        """Time the way out, in seconds a block; 0 where there is no CPU pool.

        Block 0 is copied as it is: the pool is empty when this is called.
        """
        count = min(len(self._staging[0].rows), _MEASURED_BLOCKS)
        if not count:
            return 0.0
        copies = np.stack((np.zeros(count, dtype=np.int64), np.arange(count)), axis=1)
        # The first time pays for what is set up then.
        seconds = [self._time_send(copies) for _ in range(2)]
        return seconds[1] / count

    def _time_send(self, copies: IntArray) -> float:
        started = time.perf_counter()
        self.send(copies, first=copies[:0, 0])
        self._leaving[-1].sent.wait()
        return time.perf_counter() - started

    def _send_piece(self, piece: IntArray, blocks: torch.Tensor) -> None:
        staging = self._next_staging()
        rows = staging.rows[: len(piece)]
        self._link.wait_for(staging.scattered)

        @torch.inference_mode()
        def move() -> None:
            self._moves.gather(blocks, rows)
            for first, place, count in _stretches(piece[:, 1]):
                target = self._cpu_pool[place : place + count]
                target.copy_(rows[first : first + count], non_blocking=True)

        self._link.run(move)
        sent = self._device.new_event()
        self._link.record(sent)
        self._leaving.append(_Leaving(piece[:, 0], sent))

    def _fetch_piece(self, piece: Returning) -> None:
        staging = self._next_staging()
        rows = staging.rows[: len(piece.places)]
        self._link.wait_for(staging.scattered)

        @torch.inference_mode()
        def fill() -> None:
            for first, place, count in _stretches(piece.places):
                source = self._cpu_pool[place : place + count]
                rows[first : first + count].copy_(source, non_blocking=True)

        @torch.inference_mode()
        def scatter() -> None:
            self._moves.scatter(rows, piece.blocks)

        self._link.run(fill)
        self._link.record(staging.filled)
        self._device.compute.wait_for(staging.filled)
        self._device.compute.run(scatter)
        self._device.compute.record(staging.scattered)

    def _new_staging(self, num_blocks: int) -> _Staging:
        rows = self._link.allocate(num_blocks * self._moves.staging_bytes)
        rows = rows.view(num_blocks, self._moves.staging_bytes)
        return _Staging(rows, self._device.new_event(), self._device.new_event())

    def _next_staging(self) -> _Staging:
        self._turn = (self._turn + 1) % _NUM_STAGING
        return self._staging[self._turn]

    def _pieces(self, copies: IntArray) -> Iterator[IntArray]:
        size = max(1, len(self._staging[0].rows))
        for at in range(0, len(copies), size):
            yield copies[at : at + size]


def written_blocks(plan: StepPlan, block_size: int) -> IntArray:
    """List the blocks that a step writes to, be it by its model, its copies or what comes back."""
    slots = np.unique(plan.slots // block_size)
    return np.concatenate([slots, plan.copies[:, 1], plan.swap_in[:, 1]])


def _stretches(places: IntArray) -> Iterator[tuple[int, int, int]]:
    """Cut places into stretches that lie together: (first row, first place, how many)."""
    starts = np.flatnonzero(np.diff(places, prepend=places[0] - 2) != 1)
    ends = np.append(starts[1:], len(places))
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield first, int(places[first]), end - first
