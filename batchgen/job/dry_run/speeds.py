"""How fast this machine has run a model, kept between runs so that a plan can say how long.

A file of JSON lines in the user's cache directory (``$XDG_CACHE_HOME/batchgen``): one line a
run, with what it measured beside the machine and the model. Nothing of a job's data is in it.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchgen.report.machine import processor
from batchgen.user_cache import cache_folder

_FILE = "speeds.jsonl"
_KEPT_LINES = 500
_USED_RUNS = 8
# Shorter runs say more about their first steps than about the machine.
_LEAST_PREFILL_TOKENS = 1_000
_LEAST_DECODE_TOKENS = 200
# Runs of one job on one machine differ by about this much.
_UNCERTAINTY = 0.15
_SIMILAR_ROWS = 2.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What a speed is true for.

    Attributes:
        machine: processor or GPU, and how many threads run the model.
        model: digest of the model's shapes; weights do not change its speed.
        dtype: of weights and KV.
        attention: the backend asked for.
    """

    machine: str
    model: str
    dtype: str
    attention: str

    @classmethod
    def of(
        cls, model_config: Any, *, device: str, gpu: str | None, threads: int, dtype: str,
        attention: str,
    ) -> "Setting":  # fmt: skip
        """Name the setting of a job.

        Args:
            model_config: transformers' configuration.
            device: ``cpu`` or ``cuda``.
            gpu: the card's name.
            threads: of the model on a CPU.
        """
        machine = f"{gpu}" if device == "cuda" else f"{processor()}, {threads} threads"
        shapes = dict(model_config.to_dict())
        for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
            shapes.pop(name, None)
        return cls(machine, digest(shapes), dtype, attention)


@dataclass(frozen=True, slots=True)
class Speed:
    """What one run measured.

    Attributes:
        job: digest of what the run's outputs depend on, for how long they are.
        prefill_tokens, prefill_s, decode_tokens, decode_s: as in ``_summary.json``.
        overhead_s: the rest of the generate phase.
        rows: mean rows of a step.
        output_share: tokens generated, of those allowed.
    """

    job: str
    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    overhead_s: float
    rows: float
    output_share: float

    @property
    def prefill_per_s(self) -> float | None:
        """Prefill tokens a second; None where the run was too short to tell."""
        enough = self.prefill_tokens >= _LEAST_PREFILL_TOKENS and self.prefill_s > 0
        return self.prefill_tokens / self.prefill_s if enough else None

    @property
    def decode_per_s(self) -> float | None:
        """Decoded tokens a second; None where the run was too short to tell."""
        enough = self.decode_tokens >= _LEAST_DECODE_TOKENS and self.decode_s > 0
        return self.decode_tokens / self.decode_s if enough else None

    @property
    def overhead(self) -> float:
        """Time beside the model, as a share of the model's."""
        busy = self.prefill_s + self.decode_s
        return self.overhead_s / busy if busy > 0 else 0.0


class SpeedBook:
    """The stored speeds; a book that cannot be read or written is an empty one."""

    def __init__(self, folder: Path | None = None) -> None:
        """Open the user's book, or the one in a folder."""
        self.path = (folder or cache_folder()) / _FILE

    def add(self, setting: Setting, speed: Speed) -> None:
        """Store a run's speed, unless it was too short to tell any."""
        if speed.prefill_per_s is None and speed.decode_per_s is None:
            return
        line = json.dumps({**asdict(setting), **asdict(speed), "time": round(time.time())})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # One write of a line at the end: runs that end at once do not tear each other's.
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            self._shorten()
        except OSError:
            # A full or read-only cache must not fail a finished run.
            return

    def of(self, setting: Setting) -> list[Speed]:
        """Return what the last runs in this setting measured, oldest first."""
        wanted = asdict(setting)
        found = [
            _speed(entry)
            for entry in map(_entry, self._lines())
            if entry and all(entry.get(name) == value for name, value in wanted.items())
        ]
        return [speed for speed in found if speed is not None][-_USED_RUNS:]

    def _lines(self) -> list[str]:
        try:
            return self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []

    def _shorten(self) -> None:
        lines = self._lines()
        if len(lines) <= 2 * _KEPT_LINES:
            return
        shorter = self.path.with_name(f"{_FILE}.{os.getpid()}")
        shorter.write_text("\n".join(lines[-_KEPT_LINES:]) + "\n", encoding="utf-8")
        shorter.replace(self.path)


@dataclass(frozen=True, slots=True)
class Work:
    """What a job asks of the model.

    Attributes:
        job: as :attr:`Speed.job`.
        prefill_tokens: to compute.
        requests: of which each decodes all but its first token.
        least_output_tokens, most_output_tokens: of all requests together.
        rows: requests that run at once.
    """

    job: str
    prefill_tokens: int
    requests: int
    least_output_tokens: int
    most_output_tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long the generate phase will take.

    Attributes:
        low_s, high_s: the range; no upper end where a part of it is not known.
        prefill_low_s, prefill_high_s: of that, the prompts; None where not known.
        decode_low_s, decode_high_s: of that, the outputs behind their first tokens, likewise.
        runs: runs that it rests on.
        basis: what makes the range, in words.
        missing: what is not known and why, in words; None where all is.
    """

    low_s: float
    high_s: float | None
    prefill_low_s: float | None
    prefill_high_s: float | None
    decode_low_s: float | None
    decode_high_s: float | None
    runs: int
    basis: str
    missing: str | None


_Range = tuple[float, float]


def estimate(work: Work, speeds: Sequence[Speed]) -> Estimate | None:
    """Return how long a job will take, as far as runs in this setting tell; None where none does.

    The slowest and the fastest of the stored runs, and 15% beyond them, make the range; decode
    speed is taken from runs with about as many rows at once. How much is generated is what
    runs of the same job generated, else anything from the least to the most that is allowed.
    """
    least, most, said = _outputs(work, speeds)
    overhead = 1 + max(0.0, min((speed.overhead for speed in speeds), default=0.0))
    prefill = _seconds(
        (work.prefill_tokens, work.prefill_tokens),
        [speed.prefill_per_s for speed in speeds],
        overhead,
    )
    decode = _seconds(
        (max(0, least - work.requests), max(0, most - work.requests)),
        [speed.decode_per_s for speed in _with_similar_rows(speeds, work.rows)],
        overhead,
    )
    if not speeds or (prefill is None and decode in (None, (0.0, 0.0))):
        return None
    runs = f"{len(speeds)} stored run{'s' * (len(speeds) > 1)} of this model on this machine"
    known = [part for part in (prefill, decode) if part is not None]
    missing = None
    if prefill is None:
        missing = f"prompts: no stored run computed {_LEAST_PREFILL_TOKENS:,} tokens of them"
    elif decode is None:
        missing = f"outputs: no stored run decoded {_LEAST_DECODE_TOKENS:,} tokens"
    return Estimate(
        low_s=sum(low for low, _ in known),
        high_s=None if missing else sum(high for _, high in known),
        prefill_low_s=prefill and prefill[0],
        prefill_high_s=prefill and prefill[1],
        decode_low_s=decode and decode[0],
        decode_high_s=decode and decode[1],
        runs=len(speeds),
        basis=runs if decode is None else f"{runs}; {said}",
        missing=missing,
    )


def _seconds(
    tokens: tuple[int, int], rates: Sequence[float | None], overhead: float
) -> _Range | None:
    """Return the least and the most time for so many tokens; None where no rate is known."""
    known = [rate for rate in rates if rate]
    if not max(tokens):
        return 0.0, 0.0
    if not known:
        return None
    low, high = tokens[0] / max(known), tokens[1] / min(known)
    return overhead * (1 - _UNCERTAINTY) * low, overhead * (1 + _UNCERTAINTY) * high


def _outputs(work: Work, speeds: Sequence[Speed]) -> tuple[int, int, str]:
    shares = [speed.output_share for speed in speeds if speed.job == work.job]
    if work.least_output_tokens == work.most_output_tokens:
        return work.least_output_tokens, work.most_output_tokens, "outputs have one length"
    if not shares:
        return work.least_output_tokens, work.most_output_tokens, "outputs of any allowed length"
    low = int(work.most_output_tokens * min(shares) * (1 - _UNCERTAINTY))
    high = int(work.most_output_tokens * max(shares) * (1 + _UNCERTAINTY))
    return (
        max(low, work.least_output_tokens),
        min(high, work.most_output_tokens),
        "outputs as long as in earlier runs of this job",
    )


def _with_similar_rows(speeds: Sequence[Speed], rows: int) -> list[Speed]:
    told = [speed for speed in speeds if speed.decode_per_s]
    if not told:
        return []

    def distance(speed: Speed) -> float:
        pair = sorted((max(1.0, speed.rows), float(max(1, rows))))
        return pair[1] / pair[0]

    similar = [speed for speed in told if distance(speed) <= _SIMILAR_ROWS]
    return similar or [min(told, key=distance)]


def digest(value: Any) -> str:
    """Return a short digest of a value, the same in every process."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _entry(line: str) -> Mapping[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _speed(entry: Mapping[str, Any]) -> Speed | None:
    try:
        values = {name: kind(entry[name]) for name, kind in Speed.__annotations__.items()}
    except (KeyError, TypeError, ValueError):
        return None
    return Speed(**values)
