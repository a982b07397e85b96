"""Linear layers with their weights packed for the CPU's matrix kernels.

torch hands an fp32 ``linear`` to a library that packs the weights anew in every call; at
the few hundred rows of a step that costs more than a third of it. oneDNN multiplies with
weights that were packed once. Its kernels also go over a row's products in one order
whatever the number of rows, so that a row's result depends on no neighbour (a plain
``linear`` changes its last bits with the number of rows).

Layers that a model gives the very same tensor (query, key and value; gate and up) are one
product: wider products are faster, and each output is the same to the bit.
"""

import platform
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch

# The packed layout is chosen for about this many rows; any other number works.
_ROWS = 256

Linears = Sequence[torch.nn.Linear]


class PackedProduct:
    """The product of rows with the packed weights of some linear layers, side by side.

    Args:
        linears: layers with as many inputs each.

    Attributes:
        in_features: K.
        packed_bytes: memory of the packed weights, biases included.
    """

    def __init__(self, linears: Linears) -> None:
        self.in_features = linears[0].in_features
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._bias = _joint_bias(linears)
        self.packed_bytes = weight.nbytes + (0 if self._bias is None else self._bias.nbytes)
        self._num_parts = len(linears)
        # The last product, until every layer has taken its part of it.
        self._rows: torch.Tensor | None = None
        self._out: torch.Tensor | None = None
        self._left = 0

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [..., K] rows; return [..., N], computed once for the layers it is for."""
        if self._out is None or rows is not self._rows:
            self._rows, self._out = rows, self._multiply(rows)
            self._left = self._num_parts
        out = self._out
        self._left -= 1
        if not self._left:
            self._rows = self._out = None
        return out

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, self.in_features)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            flat, self._packed, self._bias, "none", [], ""
        )
        return out.view(*rows.shape[:-1], -1)


class PackedLinear(torch.nn.Module):
    """A float32 ``torch.nn.Linear`` for inference on a CPU; its plain weights are gone.

    Args:
        linear: the layer it replaces.
        product: the product that it is a part of.
        first: where in the product its outputs begin.

    Attributes:
        in_features, out_features: as in ``torch.nn.Linear``.
        product: as above.
        weight: shape and dtype of the weight, which some models' code looks at; no numbers.
    """

    def __init__(self, linear: torch.nn.Linear, product: PackedProduct, first: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.detach().to("meta")
        # A plain attribute: the opaque layout cannot be moved, cast or saved.
        self.product = product
        self._first = first

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [..., K] rows; return [..., N], a view where the product has other parts."""
        return self.product.of(rows).narrow(-1, self._first, self.out_features)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights are to be had here: float32 on an x86 CPU with oneDNN."""
    return (
        device.type == "cpu"
        and dtype is torch.float32
        and platform.machine() in {"x86_64", "AMD64"}
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )


def pack_linears(model: torch.nn.Module, run: Callable[[], object]) -> None:
    """Replace every plain float32 linear layer of a model by a packed one.

    A weight that another module uses too (a tied embedding) stays there as it is, and its
    packed copy is memory on top.

    Args:
        model: as it was loaded.
        run: runs the model once; which layers share their input is seen in that pass.
    """
    shared, ran = _layers_of_one_input(model, run)
    for parent in list(model.modules()):
        # A layer that its parent does not call while it runs is one whose weight it reads.
        children = {
            name: child
            for name, child in parent.named_children()
            if _is_plain(child) and (child in ran or parent not in ran)
        }
        while children:
            first = next(iter(children.values()))
            group = next((group for group in shared if first in group), [first])
            names = [name for name, child in children.items() if child in group]
            _replace(parent, {name: children.pop(name) for name in names})
    # Weights are read in place from the checkpoint's file: a single one of them that stays
    # there would keep all of its pages.
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()


def _is_plain(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether a layer is torch's own linear layer over plain float32 parameters.

    Layers of a quantizer or an adapter compute something else with their weights.
    """
    return type(module) is torch.nn.Linear and all(
        type(each) is torch.nn.Parameter and each.dtype is torch.float32
        for each in module.parameters()
    )


def _replace(parent: torch.nn.Module, linears: dict[str, torch.nn.Linear]) -> None:
    product = PackedProduct(list(linears.values()))
    first = 0
    for name, linear in linears.items():
        setattr(parent, name, PackedLinear(linear, product, first))
        first += linear.out_features


def _layers_of_one_input(
    model: torch.nn.Module, run: Callable[[], object]
) -> tuple[list[list[torch.nn.Linear]], set[torch.nn.Module]]:
    """Run a model and group its linear layers by the tensor that they were given.

    Returns:
        The groups, and all modules that ran.
    """
    ran: set[torch.nn.Module] = set()
    # The tensors are held: a later one cannot have an earlier one's address.
    seen: list[tuple[torch.Tensor, torch.nn.Linear]] = []

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        ran.add(module)
        if _is_plain(module):
            seen.append((inputs[0], module))

    hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[int, list[torch.nn.Linear]] = {}
    for rows, layer in seen:
        groups.setdefault(id(rows), []).append(layer)
    return list(groups.values()), ran


def _joint_bias(linears: Linears) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )


def packed_bytes(model: torch.nn.Module) -> int:
    """Count the bytes of all packed weights."""
    products = {m.product for m in model.modules() if isinstance(m, PackedLinear)}
    return sum(product.packed_bytes for product in products)
