"""Logits of the paged path against transformers' eager attention, family by family."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.loop import Engine
from batchgen.errors import UsageError
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.sampling import SamplingParams
from tests.drive import make_engine, make_requests, make_scheduler
from tests.tiny_models import FAMILIES, REFUSED, build, save

BLOCK = 4


def _prompts() -> list[list[int]]:
    """Prompts with shared prefixes, around block borders, longer than a chunk."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 199, 21).tolist()
    own = [rng.integers(3, 199, n).tolist() for n in (1, 3, 4, 5, 30)]
    return [shared[:1], shared[:4], *[shared + tail for tail in own], shared]


def _load(directory: Path) -> LoadedModel:
    return load_model(
        ModelSource(str(directory)),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )


class _LogitsRecorder:
    """Keeps the logits of every sampled position beside the tokens that led to it."""

    def __init__(self, engine: Engine) -> None:
        self.records: list[tuple[list[int], torch.Tensor]] = []
        self._checked = engine._executor

    def execute(self, plan: Any) -> list[int | None]:
        tokens = self._checked.execute(plan)
        # The same plan again: writing the same K and V to the same slots changes nothing.
        logits = self._checked._executor.logits(plan)
        for entry, row in zip(plan.samples, logits, strict=True):
            self.records.append((list(entry.token_ids), row.clone()))
        return tokens


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_paged_logits_equal_eager_with_hits_and_chunks(family: str, tmp_path: Path) -> None:
    loaded = _load(save(family, tmp_path))
    scheduler = make_scheduler(64, BLOCK, budget=11)
    engine = make_engine(loaded, scheduler)
    recorder = _LogitsRecorder(engine)
    engine._executor = recorder
    requests = make_requests(_prompts(), SamplingParams(max_tokens=6, ignore_eos=True))
    for _ in engine.run(requests):
        pass
    assert sum(request.account.hit_blocks for request in requests) > 0
    assert len(recorder.records) == 6 * len(requests)
    eager = build(FAMILIES[family]())
    worst = 0.0
    for tokens, logits in recorder.records:
        with torch.inference_mode():
            expected = eager(input_ids=torch.tensor([tokens])).logits[0, -1]
        worst = max(worst, (expected - logits).abs().max().item())
    assert worst < 1e-5


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "does not call transformers' attention interface"),
        ("gpt_neo", "does not call transformers' attention interface"),
        ("mamba", "linear_attention, whose state is not a KV cache"),
        ("deepseek_v3", "multi-head latent attention"),
    ],
)
def test_a_family_that_cannot_be_paged_is_refused_with_the_reason(
    family: str, reason: str, tmp_path: Path
) -> None:
    assert family in REFUSED
    with pytest.raises(UsageError, match=reason):
        _load(save(family, tmp_path))
