"""The seam between the stock model's layers and our attention, and the forward pass over it."""

import inspect
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from batchgen.engine.step import StepPlan
from batchgen.kernels.reference import AttentionOptions
from batchgen.runtime.device.transfers import Put
from batchgen.runtime.kv_cache import KVCache

# Not "flash", "paged|" or "a/b": transformers reads a meaning into those names.
ATTENTION_NAME = "batchgen"
_SLOT = "_batchgen_attention"


class LayerAttention(Protocol):
    """The attention of one forward pass, which all layers call."""

    def attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        extra: dict[str, object],
    ) -> torch.Tensor:
        """Attend [T, Hq, D] queries of one layer; return [T, Hq, Dv].

        Args:
            layer: the calling attention module.
            query: [T, Hq, D].
            key: [T, Hkv, D] of the same tokens, RoPE applied, heads not repeated.
            value: [T, Hkv, Dv].
            options: what the layer asks for.
            extra: keywords that the layer passed beyond those.
        """


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Bridge from transformers' attention interface to :class:`LayerAttention`.

    Args:
        module: the calling layer.
        query: [1, Hq, T, D], in whatever strides the family uses.
        key: [1, Hkv, T, D].
        value: [1, Hkv, T, Dv].
        attention_mask: None, since an unknown attention name gets no mask, unless the family
            makes its own. The probe refuses those.
        scaling: factor on the scores; None is one over the root of D.
        sliding_window: window of this layer, None if it sees everything.
        softcap: soft cap on the scores.
        s_aux: attention sinks, a logit per head.
        kwargs: what else the family passes along.

    Returns:
        [1, T, Hq, Dv], and None in place of the attention weights.
    """
    slot = getattr(module, _SLOT)
    assert slot.attention is not None, "an attention layer ran outside of run_model"
    if attention_mask is not None:
        kwargs["attention_mask"] = attention_mask
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = slot.attention.attend(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionOptions(scale, sliding_window, softcap, s_aux),
        kwargs,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, attention_forward)


class AttentionBackend(Protocol):
    """A way to attend to the paged pool.

    Attributes:
        name: for users.
    """

    name: str

    def begin(self, plan: StepPlan, cache: KVCache, put: Put) -> LayerAttention:
        """Prepare what all layers of a step have in common.

        Called before the step's inputs are on the device: what depends on the values of a
        tensor is computed in :meth:`LayerAttention.attend`, or from the plan.

        Args:
            plan: the step.
            cache: the pool.
            put: uploads an array.
        """


@dataclass(slots=True)
class _Slot:
    """Where the attention layers of a model find the attention of the running forward pass.

    Not a keyword of the forward pass: some families do not hand theirs down to every layer.
    """

    attention: LayerAttention | None = None


class ModelForward:
    """The forward pass of a stock transformers model with an attention of ours.

    Args:
        model: in evaluation mode, loaded with ``attn_implementation=ATTENTION_NAME``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # One for all passes over a model: a step's and a graph's.
        self._slot: _Slot = getattr(model, _SLOT, None) or _Slot()
        for module in model.modules():
            object.__setattr__(module, _SLOT, self._slot)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

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
        kept = {"logits_to_keep": logits_at} if self._keeps_logits else {}
        self._slot.attention = attention
        try:
            output = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **kept
            )
        finally:
            self._slot.attention = None
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[logits_at]
