"""How long the generate phase still takes, said honestly before and in its tail.

Rows end when they like, so what is left has to be estimated from rows that ended and from rows
that run and have not ended yet; the mean over ended rows alone is too short, since short rows end
first. The estimate is Kaplan and Meier's (1958), with the running rows as censored. At the end a
few long rows run alone: then no throughput counts, but how long the longest of them goes on.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Costs are measured over the last so many seconds.
_WINDOW_S = 60.0
# Buckets of output lengths: neighbours differ by this factor, or by 1.
_GROWTH = 1.08
_LONGEST = 1 << 22
# Points at which the end of the longest row is looked at.
_POINTS = 96
# Tokens of an output that has none.
_LEAST_TOKENS = 1e-9
# What a step counts, a step later.
_FADING = 0.99
# Steps' worth of belief that half of a step's time does not depend on its tokens.
_BELIEF = 0.25


@dataclass(frozen=True, slots=True)
class Pace:
    """What the engine has done up to a moment.

    Attributes:
        seconds: that moment, on a clock that does not jump.
        prefill_tokens, output_tokens: computed and generated so far.
        prefill_s, decode_s: what steps took so far, by the share of their tokens.
    """

    seconds: float
    prefill_tokens: int
    output_tokens: int
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Left:
    """What is left.

    Attributes:
        prefill_tokens: prompt tokens to compute.
        waiting: requests that have not begun.
        lengths: [R] tokens that each begun request has generated.
        limits: [R] tokens that each may generate at most.
    """

    prefill_tokens: int
    waiting: int
    lengths: Sequence[int]
    limits: Sequence[int]


class Eta:
    """Estimates the seconds left; memory does not grow."""

    def __init__(self) -> None:
        self._edges = _edges()
        self._ended: FloatArray = np.zeros(len(self._edges))
        self._ended_tokens = 0
        self._paces: deque[Pace] = deque()
        self._steps = _StepCosts()

    def note_step(self, seconds: float, num_tokens: int) -> None:
        """Take a step's time, with all that happened around it, and its tokens."""
        self._steps.add(seconds, num_tokens)

    def note_output(self, num_tokens: int) -> None:
        """Take the length of an output that has ended."""
        self._ended[self._bucket(num_tokens)] += 1
        self._ended_tokens += num_tokens

    def seconds_left(self, pace: Pace, left: Left) -> float | None:
        """Estimate; None while no request has ended or no time has passed."""
        self._paces.append(pace)
        while pace.seconds - self._paces[0].seconds > _WINDOW_S and len(self._paces) > 2:
            self._paces.popleft()
        if not (left.waiting or left.lengths):
            return 0.0
        costs = _Costs.between(self._paces[0], pace)
        if costs is None or not self._ended.any():
            return None
        lengths = np.asarray(left.lengths, np.float64)
        outlook = _Outlook.of(self, lengths)
        # First the batch stays full, for as long as the waiting rows' work takes.
        full_s = left.prefill_tokens * costs.prefill_token_s
        full_s += left.waiting * outlook.mean * costs.output_token_s
        full_steps = full_s / self._steps.mean_s if self._steps.mean_s else 0.0
        # Then it empties: steps get cheaper, but not by as much as there are fewer rows.
        limits = np.asarray(left.limits, np.float64)
        steps, tokens = outlook.tail(lengths, limits, left.waiting, full_steps)
        step_s, token_s = self._steps.fixed_and_per_token()
        return float(full_s + steps * step_s + tokens * token_s)

    def _bucket(self, num_tokens: int) -> int:
        return int(np.searchsorted(self._edges, num_tokens, "right")) - 1


class _StepCosts:
    """A line through steps' times over their tokens, by least squares; old steps fade."""

    def __init__(self) -> None:
        # Weights, tokens, seconds, tokens squared, tokens times seconds.
        self._sums = np.zeros(5)

    def add(self, seconds: float, num_tokens: int) -> None:
        self._sums *= _FADING
        self._sums += (1.0, num_tokens, seconds, num_tokens**2, num_tokens * seconds)

    @property
    def mean_s(self) -> float:
        """Seconds of a step."""
        return float(self._sums[2] / self._sums[0]) if self._sums[0] else 0.0

    def fixed_and_per_token(self) -> tuple[float, float]:
        """Give what a step takes without any token, and what each token adds, in seconds."""
        weight, tokens, seconds, squares, products = self._sums.tolist()
        if not tokens:
            return 0.0, 0.0
        # Where all steps are alike, this belief alone says how the line runs.
        seconds += _BELIEF * seconds / weight / 2
        weight += _BELIEF
        slope = (weight * products - tokens * seconds) / (weight * squares - tokens**2)
        slope = min(max(0.0, slope), seconds / tokens)
        return (seconds - slope * tokens) / weight, slope


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds for a prompt token and an output token, with all that happens between steps."""

    prefill_token_s: float
    output_token_s: float

    @classmethod
    def between(cls, old: Pace, new: Pace) -> "_Costs | None":
        wall = new.seconds - old.seconds
        prefills = new.prefill_tokens - old.prefill_tokens
        outputs = new.output_tokens - old.output_tokens
        if wall <= 0 or not prefills + outputs:
            return None
        prefill_s, decode_s = new.prefill_s - old.prefill_s, new.decode_s - old.decode_s
        if prefill_s + decode_s <= 0:
            prefill_s, decode_s = float(prefills), float(outputs)
        share = wall / (prefill_s + decode_s)
        mean = wall / (prefills + outputs)
        return cls(
            share * prefill_s / prefills if prefills else mean,
            share * decode_s / outputs if outputs and decode_s else mean,
        )


class _Outlook:
    """How outputs go on, by how long they are already.

    Attributes:
        mean: tokens of an output that has not begun.
    """

    def __init__(self, edges: FloatArray, survival: FloatArray, last: float, beyond: float) -> None:
        """Take Kaplan and Meier's curve up to ``last``, and the mean remainder beyond it."""
        self._edges, self._survival = edges, survival
        self._last, self._beyond = last, beyond
        self.mean = float(self._area(np.zeros(1))[0])

    @classmethod
    def of(cls, eta: Eta, running: FloatArray) -> "_Outlook":
        ended, edges = eta._ended, eta._edges
        last = int(np.flatnonzero(ended)[-1])
        running_in = np.bincount(
            np.searchsorted(edges, running, "right") - 1, minlength=len(edges)
        )[: len(edges)]
        reached = ended[::-1].cumsum()[::-1]
        # Of the rows that run within a bucket, half have come through it, on average.
        running_reached = running_in[::-1].cumsum()[::-1] - running_in / 2
        at_risk = reached + running_reached
        hazard = np.divide(ended, at_risk, out=np.zeros_like(ended), where=at_risk > 0)
        survival = np.concatenate([[1.0], np.cumprod(1 - np.minimum(hazard, 1.0))])
        last_edge = float(edges[min(last + 1, len(edges) - 1)])
        total = float(ended.sum())
        mean = (eta._ended_tokens + float(running.sum())) / total
        # No row has ended beyond the longest that did: one more than none is the best guess.
        exposure = float(np.maximum(0.0, running - last_edge).sum())
        # Outputs of no tokens (scored choices) leave none beyond; it divides all the same.
        beyond = max(exposure + mean, _LEAST_TOKENS)
        return cls(edges[: last + 2], survival[: last + 2], last_edge, beyond)

    def tail(
        self, lengths: FloatArray, limits: FloatArray, waiting: int, full_steps: float
    ) -> tuple[float, float]:
        """Give the steps and the tokens after those with a full batch.

        Args:
            lengths: [R] tokens of the begun rows so far.
            limits: [R] tokens at most.
            waiting: rows that begin one after another in the steps with a full batch.
            full_steps: those steps.
        """
        rooms = np.maximum(0.0, limits - lengths)
        most = float(limits.max(initial=self._last + 8 * self._beyond))
        steps = np.concatenate([[0.0], np.geomspace(0.5, max(1.0, most), _POINTS)])
        later = full_steps + steps
        alive = self._at(lengths[:, None] + later) / self._at(lengths)[:, None]
        alive = np.where(later < rooms[:, None], np.minimum(alive, 1.0), 0.0)
        begun_later = np.zeros_like(steps)
        if waiting:
            spread = max(full_steps, 1.0)
            begun_later = waiting * (self._area(steps) - self._area(steps + spread)) / spread
        # Rows that have not begun are many with little chance each: their number is Poisson's.
        some_alive = 1 - np.prod(1 - alive, axis=0) * np.exp(-begun_later)
        return _integral(steps, some_alive), _integral(steps, alive.sum(axis=0) + begun_later)

    def _at(self, lengths: FloatArray) -> FloatArray:
        """Give the share of outputs that go on beyond some lengths."""
        inside = np.interp(lengths, self._edges, self._survival)
        beyond = np.exp(-np.maximum(0.0, lengths - self._last) / self._beyond)
        # A share of nothing has no remainder; what runs all the same has the one beyond.
        floor = np.where(lengths >= self._last, 1e-9, 0.0)
        shares: FloatArray = np.maximum(np.maximum(inside, floor) * beyond, 1e-12)
        return shares

    def _area(self, lengths: FloatArray) -> FloatArray:
        """Integrate the share from some lengths on."""
        edges, survival = self._edges, self._survival
        pieces = (survival[1:] + survival[:-1]) / 2 * np.diff(edges)
        behind = np.concatenate([pieces[::-1].cumsum()[::-1], [0.0]])
        here = np.clip(np.searchsorted(edges, lengths, "right") - 1, 0, len(edges) - 1)
        following = np.minimum(here + 1, len(edges) - 1)
        inside = np.clip(edges[following] - lengths, 0.0, None)
        partial = inside * (self._at(lengths) + survival[following]) / 2
        within = np.where(lengths < self._last, partial + behind[following], 0.0)
        beyond = self._at(np.maximum(lengths, self._last)) * self._beyond
        area: FloatArray = within + beyond
        return area


def _integral(steps: FloatArray, values: FloatArray) -> float:
    return float(np.sum((values[1:] + values[:-1]) / 2 * np.diff(steps)))


def _edges() -> FloatArray:
    edges = [0.0, 1.0]
    while edges[-1] < _LONGEST:
        edges.append(float(max(edges[-1] + 1, round(edges[-1] * _GROWTH))))
    return np.array(edges)
