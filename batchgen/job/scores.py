"""Scored rows: one request for each node of the choices' token tree, one result of them all."""

from collections.abc import Sequence
from typing import Any

from batchgen.engine.request import Request
from batchgen.structured.calibration import FloatArray, normalised
from batchgen.structured.choices import ChoiceTree

_ADDED = (
    "hit_blocks",
    "new_blocks",
    "freed_blocks",
    "num_preemptions",
    "swapped_out_blocks",
    "swapped_in_blocks",
    "recomputed_tokens",
)


def log_probabilities(tree: ChoiceTree, requests: Sequence[Request]) -> FloatArray:
    """Give [C] log-probabilities of the choices from the ended requests of all nodes."""
    scores = [request.scores for request in requests if request.scores is not None]
    return tree.log_probabilities(scores)


def label_columns(tree: ChoiceTree, requests: Sequence[Request]) -> dict[str, Any]:
    """Give the label of a :class:`~batchgen.data.output.schema.RowResult`; not calibrated."""
    logarithms = log_probabilities(tree, requests)
    scores = normalised(logarithms[None])[0]
    best = int(scores.argmax())
    return {
        "label": tree.choices[best],
        "label_score": float(scores[best]),
        "label_scores": tuple(zip(tree.choices, scores.tolist(), strict=True)),
        "label_logprobs": tuple(zip(tree.choices, logarithms.tolist(), strict=True)),
    }


def joined(requests: Sequence[Request]) -> Request:
    """Give the prompt's own request, with what the other nodes' requests took added to it."""
    prompt = requests[0]
    accounts = [request.account for request in requests]
    for name in _ADDED:
        setattr(prompt.account, name, sum(getattr(account, name) for account in accounts))
    prompt.account.peak_blocks = max(account.peak_blocks for account in accounts)
    prompt.timeline.finished = max(request.timeline.finished or 0.0 for request in requests)
    prompt.error = next((each.error for each in requests if each.error is not None), None)
    return prompt
