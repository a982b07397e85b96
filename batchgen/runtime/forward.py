"""The model's forward pass over packed tokens, as a step and a graph call it."""

import torch
from transformers import PreTrainedModel

from batchgen.runtime.attention import LayerAttention


class ModelForward:
    """A stock transformers model, whose attention is :mod:`batchgen.runtime.attention`'s.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_at: torch.Tensor,
        attention: LayerAttention,
    ) -> torch.Tensor:
        """Run T tokens.

        Args:
            token_ids, positions: [T] int64.
            logits_at: [n] int64 places in T.
            attention: of this step.

        Returns:
            [n, V] logits in the model's dtype.
        """
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_at,
            paged=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
