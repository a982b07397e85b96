"""Logits of the paged path against transformers' eager attention, family by family."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.errors import UsageError
from batchgen.runtime.backends import AttentionName
from batchgen.runtime.kv_cache import window_of_all
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.sampling import SamplingParams
from tests.support.drive import make_attention, make_engine, make_requests, make_scheduler
from tests.support.logits_recorder import LogitsRecorder
from tests.support.tiny_models import FAMILIES, REFUSED, build, save

BLOCK = 4
BACKENDS = (AttentionName.NATIVE, AttentionName.TORCH)


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


def _worst_error(directory: Path, backend: AttentionName = AttentionName.NATIVE) -> float:
    """Run a saved model through prefill, chunks, hits and decode; compare with eager."""
    loaded = _load(directory)
    window = window_of_all(loaded.layers)
    scheduler = make_scheduler(64, BLOCK, budget=11, window=window)
    engine = make_engine(loaded, scheduler, make_attention(loaded, backend))
    recorder = LogitsRecorder(engine)
    engine._executor = recorder
    requests = make_requests(_prompts(), SamplingParams(max_tokens=6, ignore_eos=True))
    for _ in engine.run(requests):
        pass
    assert sum(request.account.hit_blocks for request in requests) > 0
    assert len(recorder.records) == 6 * len(requests)
    if window is not None:
        most = -(-(window + 11) // BLOCK) + 1
        assert max(request.account.peak_blocks for request in requests) <= most
    eager = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    worst = 0.0
    for tokens, logits in recorder.records:
        with torch.inference_mode():
            expected = eager(input_ids=torch.tensor([tokens])).logits[0, -1]
        # Where logits are large, float32 itself is no finer.
        scale = max(1.0, expected.abs().max().item())
        worst = max(worst, (expected - logits).abs().max().item() / scale)
    return worst


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_paged_logits_equal_eager_with_hits_and_chunks(
    family: str, backend: AttentionName, tmp_path: Path
) -> None:
    assert _worst_error(save(family, tmp_path), backend) < 1e-5


def test_i05_both_soft_caps_are_applied_in_prefill_and_decode(tmp_path: Path) -> None:
    save("gemma2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (1.0, 30.0)
    assert max(_worst_error(tmp_path, backend) for backend in BACKENDS) < 1e-5
    # Without the cap on attention the same weights give other logits: it is visible here.
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_logit_softcapping": None}))
    uncapped = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    capped = build(FAMILIES["gemma2"]())
    ids = torch.tensor([_prompts()[-2]])
    with torch.inference_mode():
        gap = (uncapped(input_ids=ids).logits - capped(input_ids=ids).logits).abs().max()
    assert gap > 1e-3


def test_i06_attention_sinks_join_the_softmax_in_every_path(tmp_path: Path) -> None:
    model = build(FAMILIES["gpt_oss"]())
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(5.0)
    model.save_pretrained(tmp_path)
    assert max(_worst_error(tmp_path, backend) for backend in BACKENDS) < 1e-5


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "does not call transformers' attention interface"),
        ("gpt_neo", "does not call transformers' attention interface"),
        ("mamba", "layers with a recurrent state"),
        ("deepseek_v3", "multi-head latent attention"),
    ],
)
def test_a_family_that_cannot_be_paged_is_refused_with_the_reason(
    family: str, reason: str, tmp_path: Path
) -> None:
    assert family in REFUSED
    with pytest.raises(UsageError, match=reason):
        _load(save(family, tmp_path))
