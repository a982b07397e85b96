"""One tiny forward pass that reads how a model calls its attention.

Whether a family can run on a paged pool is not read from a list of names: the pass counts the
calls of each layer, reads the geometry of its keys and values, and looks at the mask that the
model asks transformers for, at positions far beyond any short sequence.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionMaskInterface, DynamicCache, PreTrainedModel, masking_utils

from batchgen.errors import UsageError
from batchgen.kernels.reference import AttentionOptions
from batchgen.runtime.attention import ATTENTION_NAME, ModelForward
from batchgen.runtime.kv_cache import LayerGeometry
from batchgen.runtime.model_kinds import NOT_CALLED

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# What families pass to the attention function beyond its documented keywords without
# changing what it has to compute (their meaning is elsewhere, or already applied).
_HARMLESS = frozenset({
    "attention_mask", "cache_position", "dropout", "is_causal", "logits_to_keep",
    "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_ids", "position_embeddings", "return_dict", "use_cache",
})  # fmt: skip
_NUM_TOKENS = 3
# Positions and distances at which masks are compared, beside those that the window suggests.
_RANDOM_PLACES = 256
_WINDOW_KEYS = ("sliding_window", "attention_chunk_size", "local_attention_window")


# What a model's code raises that does not take what it is given.
_MODEL_ERRORS = (
    AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class ProbeFailedError(UsageError):
    """The probing pass itself raised an error."""


@dataclass(slots=True)
class _Notes:
    """An attention that computes nothing and notes how it is called."""

    calls: Counter[int] = field(default_factory=Counter)
    layers: dict[int, LayerGeometry] = field(default_factory=dict)
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        extra: dict[str, object],
    ) -> torch.Tensor:
        """Note the call; see :meth:`LayerAttention.attend`."""
        index = getattr(layer, "layer_idx", None)
        out = query.new_zeros(*query.shape[:2], value.shape[2])
        if not isinstance(index, int):
            self.problems.append("an attention layer does not know its index")
            return out
        self.calls[index] += 1
        self.layers[index] = LayerGeometry(
            num_kv_heads=key.shape[1],
            key_size=key.shape[2],
            value_size=value.shape[2],
            window=options.window,
            group=query.shape[1] // key.shape[1],
        )
        mask = extra.get("attention_mask")
        self.masks[index] = mask if isinstance(mask, torch.Tensor) else None
        self.unknown |= {
            name for name, given in extra.items() if given is not None and name not in _HARMLESS
        }
        if query.shape[1] % key.shape[1]:
            self.problems.append(
                f"{query.shape[1]} query heads are no multiple of {key.shape[1]} KV heads"
            )
        if query.shape[2] != key.shape[2] or key.shape[2] != value.shape[2]:
            self.problems.append(
                f"layer {index} has heads of {query.shape[2]} for queries, {key.shape[2]} for "
                f"keys and {value.shape[2]} for values"
            )
        causal = extra.get("is_causal", getattr(layer, "is_causal", True))
        if mask is None and causal is False:
            self.problems.append(f"layer {index} is not causal")
        return out


@torch.inference_mode()
def probe(model: PreTrainedModel, max_model_len: int) -> list[LayerGeometry]:
    """Run one tiny forward pass and read how the model calls its attention.

    Args:
        model: in evaluation mode, loaded with our attention.
        max_model_len: positions up to which its masks are looked at.

    Returns:
        Geometry of each layer.

    Raises:
        ProbeFailedError: the pass raised an error.
        UsageError: the family cannot run on a paged pool; layer and reason are named.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    notes = _Notes()
    places = torch.arange(_NUM_TOKENS, device=model.device)
    try:
        with _noted_masks() as functions:
            ModelForward(model)(torch.zeros_like(places), places, places[-1:], notes)
    except _MODEL_ERRORS as error:
        if not notes.calls:
            raise UsageError(f"{name} {NOT_CALLED}") from error
        raise ProbeFailedError(
            f"{name} does not run with a replaced attention: {type(error).__name__}: {error}"
        ) from error
    _judge(name, notes, config.num_hidden_layers)
    if not _takes_positions(model):
        raise UsageError(
            f"{name} takes no position_ids: it numbers the tokens of a batch itself, so rows that "
            f"are packed together would get each other's positions"
        )
    layers = [notes.layers[index] for index in range(config.num_hidden_layers)]
    # Most layers share a mask.
    judged: set[tuple[int, int | None]] = set()
    for index, layer in enumerate(layers):
        mask = notes.masks[index]
        if mask is not None and (id(mask), layer.window) not in judged:
            judged.add((id(mask), layer.window))
            hints = [getattr(config, key, None) for key in _WINDOW_KEYS]
            windows = [layer.window, *hints]
            positions = _places([each for each in windows if isinstance(each, int)], max_model_len)
            _judge_mask(name, index, layer, functions.get(id(mask)), positions)
    _judge_windows(name, config, layers, max_model_len)
    return layers


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model, or the base model under its head, is given positions."""
    return any(
        "position_ids" in inspect.signature(each.forward).parameters
        for each in (model, model.base_model)
    )


def _judge(name: str, notes: _Notes, num_layers: int) -> None:
    if not notes.calls:
        raise UsageError(f"{name} {NOT_CALLED}")
    again = [index for index, count in sorted(notes.calls.items()) if count > 1]
    if again:
        raise UsageError(
            f"{name} runs layer {again[0]} {notes.calls[again[0]]} times for one token, so that "
            f"layer has more than one set of keys and values; this is not supported"
        )
    missing = [str(index) for index in range(num_layers) if index not in notes.calls]
    if missing:
        raise UsageError(
            f"{name} does not call its attention in layer {', '.join(missing[:4])}: layers that "
            f"keep no KV cache of their own are not supported"
        )
    if len(notes.calls) > num_layers:
        raise UsageError(
            f"{name} has attention beyond its {num_layers} layers; this is not supported"
        )
    if notes.unknown:
        raise UsageError(
            f"{name} hands its attention {', '.join(sorted(notes.unknown))}, which batchgen "
            f"does not implement; leaving it out would give wrong results"
        )
    if notes.problems:
        raise UsageError(f"{name}: {notes.problems[0]}; this is not supported")


def _judge_windows(
    name: str, config: Any, layers: Sequence[LayerGeometry], max_model_len: int
) -> None:
    """Refuse a layer whose keys transformers' own cache drops although its attention sees them."""
    kept = DynamicCache(config=config).layers
    for index, (layer, cached) in enumerate(zip(layers, kept, strict=False)):
        window = getattr(cached, "sliding_window", None)
        if isinstance(window, int) and layer.window is None and window < max_model_len:
            raise UsageError(
                f"{name}: transformers keeps a window of {window} tokens in layer {index}, of "
                f"which its attention is not told; set model.max_model_len={window} or less"
            )


# -- masks --------------------------------------------------------------------------------


@contextmanager
def _noted_masks() -> Iterator[dict[int, MaskFunction]]:
    """Let models ask for masks as for an attention of transformers' own, and note what they ask.

    Outside of it no mask is made for our attention: that would read positions on the host in
    every step.

    Yields:
        The function of each mask that was made, by the mask's ``id``; masks that a model makes
        itself are not in it.
    """
    functions: dict[int, MaskFunction] = {}
    made: list[torch.Tensor] = []

    def make_mask(*, mask_function: MaskFunction, device: torch.device, **_: Any) -> torch.Tensor:
        mask = torch.ones((1, 1, _NUM_TOKENS, _NUM_TOKENS), dtype=torch.bool, device=device)
        made.append(mask)
        functions[id(mask)] = mask_function
        return mask

    # The class's own table: models look masks up there. The probe runs one sequence; looking for
    # several would read positions, which a model without weights does not have.
    table = AttentionMaskInterface._global_mapping
    finder = masking_utils.find_packed_sequence_indices
    table[ATTENTION_NAME] = make_mask
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield functions
    finally:
        del table[ATTENTION_NAME]
        masking_utils.find_packed_sequence_indices = finder


def _judge_mask(
    name: str,
    index: int,
    layer: LayerGeometry,
    function: MaskFunction | None,
    places: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Refuse a layer whose mask is not the one that our attention applies.

    Ours is causal, and where the attention is called with a window, that window.
    """
    if function is None:
        raise UsageError(
            f"{name}: layer {index} attends by a mask that the model makes itself; batchgen "
            f"knows the causal mask and sliding windows only"
        )
    queries, keys = places
    zero = torch.zeros((), dtype=torch.long)
    try:
        asked = torch.broadcast_to(function(zero, zero, queries, keys), keys.shape)
    except (IndexError, RuntimeError, TypeError, ValueError):
        raise UsageError(
            f"{name}: layer {index} attends by a mask that depends on more than positions; "
            f"this is not supported"
        ) from None
    distance = queries - keys
    ours = distance >= 0
    if layer.window is not None:
        ours &= distance < layer.window
    if torch.equal(asked, ours):
        return
    raise UsageError(f"{name}: layer {index} {_difference(asked, distance, layer.window)}")


def _places(windows: Sequence[int], max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [Q, 1] query positions and [Q, K] key positions below ``max_model_len``.

    Among their distances are all powers of two and the windows, each with its neighbours.
    """
    generator = torch.Generator().manual_seed(0)
    powers = 2 ** torch.arange(0, max(1, max_model_len.bit_length()))
    drawn = torch.randint(0, max_model_len, (_RANDOM_PLACES,), generator=generator)
    multiples = [times * each for each in windows for times in (1, 2, 3)]
    sizes = torch.tensor(multiples, dtype=torch.long)
    edges = torch.cat([powers, sizes, drawn])
    near = torch.cat([edges - 1, edges, edges + 1]).clamp(0, max_model_len - 1)
    queries = near[:, None]
    keys = torch.cat([queries - near[None, :], near[None, :].expand(len(near), -1)], dim=1)
    return queries, keys.clamp(0, max_model_len - 1)


def _difference(asked: torch.Tensor, distance: torch.Tensor, window: int | None) -> str:
    """Describe what a mask does that our attention would not do."""
    if asked[distance < 0].any():
        return "sees tokens that come after its own; batchgen's attention is causal"
    hidden = distance[(distance >= 0) & ~asked]
    seen = distance[asked]
    if window is None and len(hidden) and hidden.min() > seen.max():
        return (
            f"has a sliding window of {int(hidden.min())} tokens in its mask alone, of "
            f"which its attention is not told; set model.max_model_len={int(seen.max()) + 1} or "
            f"less"
        )
    known = "causal" if window is None else f"causal with a window of {window}"
    at = int(hidden.min()) if len(hidden) else int(seen.max())
    return (
        f"has a mask that is not the one that its attention is called for ({known}), for example "
        f"{at} tokens back; chunked and other masks are not supported"
    )
