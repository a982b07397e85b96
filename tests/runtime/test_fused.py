"""One-pass kernels in a stock model, against its own modules."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.kernels.native.elementwise import rms_norm, rotate_, silu_mul
from batchgen.runtime.cpu.fused import can_fuse, fuse_elementwise
from tests.support.tiny_models import FAMILIES, build, save


@pytest.mark.parametrize("size", [8, 12, 48, 576])
def test_a_norm_in_one_pass_equals_float64_in_any_strides(size: int) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(3, 7, 2 * size)[..., :size] * 1e-2, torch.randn(size)
    exact = rows.double() / (rows.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    for offset in (0.0, 1.0):
        expected = exact * (weight + offset)
        torch.testing.assert_close(
            rms_norm(rows, weight, offset, 1e-5).double(), expected, atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize("size", [8, 13, 1536])
def test_a_gate_in_one_pass_equals_float64_at_both_ends(size: int) -> None:
    torch.manual_seed(0)
    both = torch.randn(5, 2 * size) * 3
    both[0, :4] = torch.tensor([-200.0, -80.0, 80.0, 200.0])
    gate, up = both[:, :size], both[:, size:]
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(silu_mul(gate, up).double(), expected, atol=1e-6, rtol=1e-6)
    gate[1, 2] = float("nan")
    assert silu_mul(gate, up).isnan().sum() == 1


@pytest.mark.parametrize("size", [4, 16, 20, 64])
def test_a_rotation_in_place_equals_float64_in_the_strides_of_a_projection(size: int) -> None:
    torch.manual_seed(0)
    tokens, heads = 6, 3
    states = torch.randn(1, tokens, 5 * heads * size)[..., : heads * size]
    states = states.view(1, tokens, heads, size).transpose(1, 2)
    cos, sin = torch.randn(1, tokens, size), torch.randn(1, tokens, size)
    low, high = states.double().chunk(2, -1)
    turned = torch.cat((-high, low), -1)
    expected = states.double() * cos[:, None] + turned * sin[:, None]
    rotate_(states, cos, sin)
    torch.testing.assert_close(states.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "norms", "gates", "rotations"),
    [
        ("llama", 7, 3, 3),
        ("qwen3", 13, 3, 3),  # norms of queries and keys, too
        ("gemma2", 13, 0, 3),  # its gate is a GELU
        ("phi3", 7, 0, 3),  # its gate and up projection are one matrix
        ("starcoder2", 0, 0, 3),
        ("gpt2", 0, 0, 0),
    ],
)
def test_what_computes_the_same_is_replaced_and_nothing_else(
    family: str, norms: int, gates: int, rotations: int
) -> None:
    model = build(FAMILIES[family]()).eval()
    assert fuse_elementwise(model) == norms + gates + rotations


def test_only_this_models_objects_change(tmp_path: Path) -> None:
    path = save("llama", tmp_path)
    fused, stock = (AutoModelForCausalLM.from_pretrained(path).eval() for _ in range(2))
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        before = stock(input_ids=ids).logits
        fuse_elementwise(fused)
        assert torch.equal(stock(input_ids=ids).logits, before)
        torch.testing.assert_close(fused(input_ids=ids).logits, before, atol=1e-5, rtol=1e-5)
    assert "forward" not in vars(stock.model.norm)
    assert "forward" in vars(fused.model.norm)


class _Scaled(torch.nn.Module):
    """Looks like an RMS norm and is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))
        self.eps = 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight / (rows.abs().mean(-1, keepdim=True) + self.eps)


def test_a_module_that_only_looks_like_a_norm_keeps_its_own_code() -> None:
    module = _Scaled()
    rows = torch.randn(3, 16)
    before = copy.deepcopy(module)(rows)
    assert fuse_elementwise(torch.nn.Sequential(module, torch.nn.LayerNorm(16, bias=False))) == 0
    assert torch.equal(module(rows), before)


def test_other_dtypes_are_left_alone() -> None:
    cpu = torch.device("cpu")
    assert can_fuse(cpu, torch.float32)
    assert not can_fuse(cpu, torch.bfloat16)
    assert not can_fuse(torch.device("cuda"), torch.float32)
