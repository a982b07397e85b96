"""Sampled tokens that stay on the device, where the next step reads them."""

import numpy as np
import torch

from batchgen.engine.step import StepPlan
from batchgen.runtime.device.api import Device

_FIRST_TOKENS = 512


class SampledTokens:
    """What the last step sampled and what this one does: two buffers that take turns."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last = self._allocate(_FIRST_TOKENS)
        self._next = self._allocate(_FIRST_TOKENS)

    def begin(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Start a step that samples ``count`` tokens.

        Returns:
            The last step's tokens, and [count] int64 for this step's.
        """
        self._last, self._next = self._next, self._last
        if len(self._next) < count:
            self._next = self._allocate(2 * count)
        return self._last, self._next[:count]

    def _allocate(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, dtype=torch.int64, device=self._device.torch_device)


def needs_feeding(plan: StepPlan) -> bool:
    """Whether a plan runs tokens that the step before is only now sampling."""
    return bool(np.any(plan.token_ids < 0))


def feed(token_ids: torch.Tensor, sampled: torch.Tensor) -> None:
    """Put sampled tokens in the place of what stands for them, on the device.

    A row that got no token (``NO_TOKEN``) has failed, but the host does not know yet: it
    runs token 0 once more, and nobody sees what comes of it.

    Args:
        token_ids: [T], changed in place; see ``StepPlan.token_ids``.
        sampled: what the step before sampled.
    """
    places = (-1 - token_ids).clamp_min_(0)
    fed = sampled.index_select(0, places).clamp_min_(0)
    token_ids.copy_(torch.where(token_ids < 0, fed, token_ids))
