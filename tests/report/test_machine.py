"""What the driver says of a card's memory."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen.report.machine import nvml_memory


class _Error(Exception):
    """What the driver's library raises."""


def _driver(cards: dict[str, int], *, is_there: bool = True) -> Any:
    """Cards by their names for good, with what each has in use."""

    def begin() -> None:
        if not is_there:
            raise _Error

    def find(uuid: str) -> str:
        if uuid not in cards:
            raise _Error
        return uuid

    return SimpleNamespace(
        NVMLError=_Error,
        nvmlInit=begin,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=find,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=cards[handle], total=80),
        nvmlDeviceGetName=lambda handle: f"card {handle}",
    )


def test_memory_is_that_of_the_very_card_whatever_number_the_process_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = {"GPU-aa": 11, "GPU-bb": 22, "MIG-cc": 33}
    monkeypatch.setitem(sys.modules, "pynvml", _driver(cards))
    assert nvml_memory("bb") == {"name": "card GPU-bb", "used_bytes": 22, "total_bytes": 80}
    # A part of a card has a name of its own.
    assert nvml_memory("cc") == {"name": "card MIG-cc", "used_bytes": 33, "total_bytes": 80}


def test_without_a_driver_or_the_card_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _driver({"GPU-aa": 11}))
    assert nvml_memory("bb") is None
    monkeypatch.setitem(sys.modules, "pynvml", _driver({"GPU-aa": 11}, is_there=False))
    assert nvml_memory("aa") is None
