"""Linear layers with their weights packed for the CPU's matrix kernels.

torch hands an fp32 ``linear`` to a library that packs the weights anew in every call; at
the few hundred rows of a step that costs more than a third of it. oneDNN multiplies with
weights that were packed once. Its kernels also go over a row's products in one order
whatever the number of rows, so that a row's result depends on no neighbour (a plain
``linear`` changes its last bits with the number of rows).
"""

import platform

import torch

# The packed layout is chosen for about this many rows; any other number works.
_ROWS = 256


class PackedLinear(torch.nn.Module):
    """A float32 ``torch.nn.Linear`` for inference on a CPU; its plain weights are gone.

    Attributes:
        in_features, out_features: as in ``torch.nn.Linear``.
        bias: [N] or None.
        packed_bytes: memory of the packed weights.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed_bytes = linear.weight.nbytes
        self.bias = linear.bias
        weight = linear.weight.detach()
        # A plain attribute: the opaque layout cannot be moved, cast or saved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [..., K] rows; give [..., N]."""
        flat = rows.reshape(-1, self.in_features)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            flat, self._packed, self.bias, "none", [], ""
        )
        return out.view(*rows.shape[:-1], self.out_features)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights are to be had here: float32 on an x86 CPU with oneDNN."""
    return (
        device.type == "cpu"
        and dtype is torch.float32
        and platform.machine() in {"x86_64", "AMD64"}
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )


def pack_linears(model: torch.nn.Module) -> None:
    """Replace every linear layer of a model by a packed one.

    A weight that another module uses too (a tied embedding) stays there as it is, and its
    packed copy is memory on top.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(parent, name, PackedLinear(child))


def packed_bytes(model: torch.nn.Module) -> int:
    """Count the bytes of all packed weights."""
    return sum(m.packed_bytes for m in model.modules() if isinstance(m, PackedLinear))
