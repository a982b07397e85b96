"""Packed linear layers against float64, and against themselves in other batches."""

import pytest
import torch

from batchgen.runtime.cpu.packed_linear import (
    PackedLinear,
    PackedProduct,
    can_pack,
    pack_linears,
    packed_bytes,
)

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="oneDNN packs on x86 CPUs only"
)


def _pack(linear: torch.nn.Linear) -> PackedLinear:
    return PackedLinear(linear, PackedProduct([linear]))


class _Block(torch.nn.Module):
    """Two layers of one input, one of another, as in a gated network."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(576, 1536, bias=bias)
        self.up = torch.nn.Linear(576, 192, bias=False)
        self.down = torch.nn.Linear(1536, 576, bias=bias)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(self.gate(rows)), self.up(rows)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (576, 1536), (33, 7)])
def test_products_equal_float64_as_closely_as_a_plain_linear_does(inputs, outputs, bias) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(inputs, outputs, bias=bias)
    packed = _pack(plain)
    rows = torch.randn(2, 37, inputs)
    with torch.inference_mode():
        exact = torch.nn.functional.linear(
            rows.double(), plain.weight.double(), plain.bias.double() if bias else None
        )
        worst = (packed(rows) - exact).abs().max()
        of_plain = (plain(rows) - exact).abs().max()
    assert packed(rows).shape == (2, 37, outputs)
    assert worst <= max(4 * of_plain, 1e-6)


def test_a_rows_result_is_the_same_to_the_bit_in_any_batch() -> None:
    torch.manual_seed(1)
    packed = _pack(torch.nn.Linear(576, 1536, bias=False))
    rows = torch.randn(300, 576)
    with torch.inference_mode():
        together = packed(rows)
        for count in (1, 2, 3, 7, 8, 9, 31, 64, 255):
            assert torch.equal(packed(rows[:count]), together[:count])
            assert torch.equal(packed(rows[-count:]), together[-count:])


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_are_one_product_and_equal_themselves_alone(bias: bool) -> None:
    torch.manual_seed(2)
    block = _Block(bias).eval()
    alone = [_pack(block.gate), _pack(block.up), _pack(block.down)]
    pack_linears(block, lambda: block(torch.zeros(3, 576)))
    assert block.gate.product is block.up.product
    assert block.down.product is not block.up.product
    with torch.inference_mode():
        for count in (1, 5, 64):
            rows = torch.randn(count, 576)
            down, up = block(rows)
            assert torch.equal(down, alone[2](alone[0](rows)))
            assert torch.equal(up, alone[1](rows))


def test_a_joint_product_follows_its_input_when_the_layers_get_different_ones() -> None:
    torch.manual_seed(3)
    block = _Block(bias=True).eval()
    alone = [_pack(block.gate), _pack(block.up)]
    pack_linears(block, lambda: block(torch.zeros(3, 576)))
    first, second = torch.randn(4, 576), torch.randn(4, 576)
    with torch.inference_mode():
        assert torch.equal(block.gate(first), alone[0](first))
        assert torch.equal(block.up(second), alone[1](second))
        assert torch.equal(block.gate(second), alone[0](second))
        assert torch.equal(block.up(first), alone[1](first))


def test_a_tied_weight_stays_in_the_embedding_and_plain_weights_go() -> None:
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(50, 16)
    model.head = torch.nn.Linear(16, 50, bias=False)
    model.head.weight = model.embed.weight
    model.inner = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
    pack_linears(model, lambda: model.head(model.inner(model.embed(torch.tensor([3])))))
    assert isinstance(model.head, PackedLinear)
    assert isinstance(model.inner[0], PackedLinear)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]
    assert packed_bytes(model) == 4 * (16 * 50 + 16 * 16 + 16)
