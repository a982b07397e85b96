"""A GPU's memory, as the driver and as torch count it; sizes in bytes."""

from typing import Protocol

import torch


class Card(Protocol):
    """Looks at one card's memory."""

    def total(self) -> int:
        """All there is."""

    def free(self) -> int:
        """What nobody holds, other processes included, as the driver counts it."""

    def held(self) -> int:
        """What torch holds in this process, in use or in hand for later."""

    def in_use(self) -> int:
        """What tensors of this process take."""

    def peak_in_use(self) -> int:
        """The most that they took since :meth:`begin_peak`."""

    def begin_peak(self) -> None:
        """Begin to watch the peak."""

    def trim(self) -> None:
        """Give back what is only in hand."""


class CudaCard:
    """See :class:`Card`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """See :meth:`Card.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """See :meth:`Card.free`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        """See :meth:`Card.held`."""
        return torch.cuda.memory_reserved(self._device)

    def in_use(self) -> int:
        """See :meth:`Card.in_use`."""
        return torch.cuda.memory_allocated(self._device)

    def peak_in_use(self) -> int:
        """See :meth:`Card.peak_in_use`."""
        return torch.cuda.max_memory_allocated(self._device)

    def begin_peak(self) -> None:
        """See :meth:`Card.begin_peak`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def trim(self) -> None:
        """See :meth:`Card.trim`."""
        torch.cuda.empty_cache()
