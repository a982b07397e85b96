"""Products of fixed row counts: rows of a step do not change each other's bits."""

from pathlib import Path

import pytest
import torch

from batchgen.errors import UsageError
from batchgen.runtime.backends import AttentionName
from batchgen.runtime.cpu.fixed_rows import fix_row_counts
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from tests.support.drive import make_attention
from tests.support.tiny_models import FAMILIES, build, save


def _load(family: str, directory: Path) -> LoadedModel:
    return load_model(
        ModelSource(str(save(family, directory))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "gpt2", "opt", "gpt_neox"])
def test_a_model_in_pieces_computes_what_it_did(family: str) -> None:
    model = build(FAMILIES[family]())
    ids = torch.arange(3, 150)[None].repeat(1, 3)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        fix_row_counts(model)
        got = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer", [torch.nn.Linear(40, 30), torch.nn.LayerNorm(40)])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(layer: torch.nn.Module) -> None:
    rows = torch.randn(700, 40, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Sequential(layer)
    fix_row_counts(model)
    with torch.inference_mode():
        whole = model(rows[None])[0]
        for first, end in ((0, 1), (3, 10), (250, 262), (0, 700)):
            assert torch.equal(model(rows[first:end]), whole[first:end])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_of_experts_is_refused(family: str) -> None:
    with pytest.raises(UsageError, match=r"engine.deterministic=true: .* mixture of experts"):
        fix_row_counts(build(FAMILIES[family]()))


def test_attention_by_torch_is_refused(tmp_path: Path) -> None:
    loaded = _load("llama", tmp_path)
    with pytest.raises(UsageError, match=r"engine.attention=torch: .* rows beside it"):
        make_attention(loaded, AttentionName.TORCH, deterministic=True)
