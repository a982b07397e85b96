"""Taking a model's liking for some labels out of their scores.

A model prefers some labels whatever the row says. An offset for each choice is added to its
log-probability; the sum is normalised again. The offsets come from prompts without content
(Zhao et al. 2021, "Calibrate Before Use"), or are those at which the labels of all rows have
given shares.
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Sweeps over the choices; two choices need one, ten about ten.
_MOST_SWEEPS = 100


def normalised(log_probabilities: FloatArray, offsets: FloatArray | float = 0.0) -> FloatArray:
    """Return [N, C] probabilities over the choices, with [C] offsets added to the logarithms."""
    shifted = log_probabilities + offsets
    # A row in which every choice is impossible says nothing: all are alike.
    highest = shifted.max(axis=-1, keepdims=True)
    shifted = np.where(np.isneginf(highest), 0.0, shifted - np.maximum(highest, -1e300))
    weights = np.exp(shifted)
    result: FloatArray = weights / weights.sum(axis=-1, keepdims=True)
    return result


def content_free_offsets(log_probabilities: FloatArray) -> FloatArray:
    """Return [C] offsets that make the choices equally likely after [P, C] empty prompts."""
    mean = normalised(log_probabilities).mean(axis=0)
    logarithms = np.log(np.maximum(mean, np.finfo(np.float64).tiny))
    offsets: FloatArray = logarithms.mean() - logarithms
    return offsets


def prior_offsets(log_probabilities: FloatArray, shares: FloatArray) -> FloatArray:
    """Return [C] offsets with which the likeliest choices of [N, C] rows have [C] shares.

    One choice after the other gets the offset at which it wins its share against the others
    as they stand, until nothing moves. For two choices that is the threshold at the quantile
    of their distance: at equal shares, the median. Rows with equal scores are not parted.
    """
    scores = np.maximum(log_probabilities, -1e6)
    offsets = np.zeros(scores.shape[1])
    if not len(scores):
        return offsets
    for _ in range(_MOST_SWEEPS):
        before = offsets.copy()
        for choice, share in enumerate(shares):
            shifted = scores + offsets
            shifted[:, choice] = -np.inf
            # The offset at which this choice draws level in each row.
            needed = shifted.max(axis=1) - scores[:, choice]
            offsets[choice] = np.quantile(needed, share, method="median_unbiased")
        offsets -= offsets.mean()
        if np.abs(offsets - before).max() < 1e-9:
            break
    return offsets
