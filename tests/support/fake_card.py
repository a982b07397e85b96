"""A card whose memory is a few numbers."""

from batchgen.runtime.memory import GIB


class FakeDeviceMemory:
    """See :class:`batchgen.runtime.memory.DeviceMemory`."""

    def __init__(self, total_gib: int, ours_gib: int, others_gib: int, peak_gib: int = 0) -> None:
        self._total, self._ours, self._others = (g * GIB for g in (total_gib, ours_gib, others_gib))
        self._peak = peak_gib * GIB
        self.calls: list[str] = []

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self._ours - self._others

    def held(self) -> int:
        return self._ours

    def in_use(self) -> int:
        self.calls.append("in_use")
        return self._ours

    def peak_in_use(self) -> int:
        self.calls.append("peak_in_use")
        return self._peak

    def begin_peak(self) -> None:
        self.calls.append("begin_peak")

    def trim(self) -> None:
        self.calls.append("trim")
