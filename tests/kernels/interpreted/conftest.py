"""Only for runs with TRITON_INTERPRET=1; see test_triton_interpreted.py."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.fast_interpreter import patch_once

patch_once()


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """Every new tensor is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
