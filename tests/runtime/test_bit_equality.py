"""On a CPU a row's logits are the same to the bit, whatever runs beside it and where."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.runtime.backends import AttentionName
from batchgen.runtime.cpu.fixed_rows import fix_row_counts
from batchgen.runtime.kv_cache import window_of_all
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.runtime.shared_prefixes import SharedPrefix
from batchgen.sampling import SamplingParams
from tests.support.drive import make_attention, make_engine, make_requests, make_scheduler
from tests.support.logits_recorder import LogitsRecorder
from tests.support.tiny_models import save

NEW_TOKENS = 5
# What must not matter: sizes of block, step and batch, the cache, sharing, and threads.
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"block_size": 16, "budget": 300},
    {"block_size": 3, "budget": 7, "max_num_seqs": 2},
    {"prefix_caching": False, "sharing": SharedPrefix.OFF},
    {"max_num_seqs": 1, "threads": 1},
)


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 199, 70).tolist()
    own = [rng.integers(3, 199, n).tolist() for n in (1, 2, 9, 40, 0)]
    return [*[shared + tail for tail in own], shared[:33], rng.integers(3, 199, 20).tolist()]


def _logits(
    loaded: LoadedModel,
    *,
    block_size: int = 4,
    budget: int = 50,
    max_num_seqs: int = 64,
    prefix_caching: bool = True,
    sharing: SharedPrefix = SharedPrefix.AUTO,
    threads: int = 2,
) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the logits after each sequence of tokens that came up."""
    scheduler = make_scheduler(
        2000 // block_size,
        block_size,
        budget=budget,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
        window=window_of_all(loaded.layers),
    )
    engine = make_engine(
        loaded, scheduler, make_attention(loaded, AttentionName.NATIVE, sharing=sharing)
    )
    recorder = LogitsRecorder(engine)
    engine._executor = recorder
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        for _ in engine.run(make_requests(_prompts(), params)):
            pass
    finally:
        torch.set_num_threads(before)
    return {tuple(tokens): logits for tokens, logits in recorder.records}


# GPT-2's products are torch's addmm, which engine.deterministic pads. Not so mixtures of
# experts, where an expert's product has as many rows as the router sends it.
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "phi3", "gpt2"])
def test_logits_are_equal_to_the_bit_in_any_batch(family: str, tmp_path: Path) -> None:
    loaded = load_model(
        ModelSource(str(save(family, tmp_path))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )
    if family == "gpt2":
        fix_row_counts(loaded.model)
    runs = [_logits(loaded, **setting) for setting in SETTINGS]
    assert len(runs[0]) == NEW_TOKENS * len(_prompts())
    for setting, run in zip(SETTINGS[1:], runs[1:], strict=True):
        assert run.keys() == runs[0].keys(), setting
        gaps = {len(k): (run[k] - runs[0][k]).abs().max().item() for k in run}
        assert all(torch.equal(run[key], runs[0][key]) for key in run), (setting, gaps)
