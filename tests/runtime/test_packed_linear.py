"""Packed linear layers against float64, and against themselves in other batches."""

import pytest
import torch

from batchgen.runtime.packed_linear import PackedLinear, can_pack, pack_linears, packed_bytes

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="oneDNN packs on x86 CPUs only"
)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (576, 1536), (33, 7)])
def test_products_equal_float64_as_closely_as_a_plain_linear_does(inputs, outputs, bias) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(inputs, outputs, bias=bias)
    packed = PackedLinear(plain)
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
    packed = PackedLinear(torch.nn.Linear(576, 1536, bias=False))
    rows = torch.randn(300, 576)
    with torch.inference_mode():
        together = packed(rows)
        for count in (1, 2, 3, 7, 8, 9, 31, 64, 255):
            assert torch.equal(packed(rows[:count]), together[:count])
            assert torch.equal(packed(rows[-count:]), together[-count:])


def test_a_tied_weight_stays_in_the_embedding_and_plain_weights_go() -> None:
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(50, 16)
    model.head = torch.nn.Linear(16, 50, bias=False)
    model.head.weight = model.embed.weight
    model.inner = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
    pack_linears(model)
    assert isinstance(model.head, PackedLinear)
    assert isinstance(model.inner[0], PackedLinear)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight", "inner.0.bias"]
    assert packed_bytes(model) == 4 * (16 * 50 + 16 * 16)
