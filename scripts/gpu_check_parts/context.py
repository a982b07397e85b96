"""What every part is given: a device, a size, a deadline, and somewhere to report to."""

import gc
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from gpu_check_parts.outcome import Check, Figure, LeftOut, Record

T = TypeVar("T")

# Whether something is right, and what to say of it.
Verdict = tuple[bool, str]


class Context:
    """A part's surroundings.

    Args:
        device: where everything runs.
        dry_run: shrink every shape until it takes no time.
        seed: of all random inputs.
        seconds: until when the part should be done, from now.
        emit: takes each record as soon as there is one.
        lane, lanes: this process's share of the part; see :meth:`mine`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        dry_run: bool,
        seed: int,
        seconds: float,
        emit: Callable[[Record], None],
        lane: int = 0,
        lanes: int = 1,
    ) -> None:
        self.device = device
        self.dry_run = dry_run
        self.seed = seed
        self._deadline = time.monotonic() + seconds
        self._emit = emit
        self._lane = lane
        self._lanes = lanes

    @property
    def seconds_left(self) -> float:
        """Seconds until the part should be done."""
        return self._deadline - time.monotonic()

    def choose(self, full: T, small: T) -> T:
        """Return the size for a GPU, or that for a dry run."""
        return small if self.dry_run else full

    def generator(self, name: str) -> torch.Generator:
        """Make what draws the inputs of one check: the same ones, whatever else runs."""
        seed = self.seed + zlib.crc32(name.encode())
        return torch.Generator(self.device).manual_seed(seed)

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Report whether something is right."""
        self._emit(Check(name, passed, detail))

    def figure(
        self, name: str, value: float, unit: str, predicted: float | None = None, note: str = ""
    ) -> None:
        """Report something measured."""
        self._emit(Figure(name, value, unit, predicted, note))

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Report an exception as a failed check and go on."""
        try:
            yield
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
            self.check(name, False, f"{type(error).__name__} at {place}: {error}")
        finally:
            # Models and pools of one attempt must not stand in the way of the next.
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's share of what the part's processes do side by side."""
        return items[self._lane :: self._lanes]

    def in_time(self, items: Iterable[T], name: Callable[[T], str]) -> Iterator[T]:
        """Go through items as long as there is time, and report those that are left out."""
        for item in items:
            if self.seconds_left > 0:
                yield item
            else:
                self._emit(LeftOut(name(item)))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
