"""Products and norms of a fixed number of rows, so that no row's result depends on others.

Libraries choose how they go over a product, or over a row of a norm, by the number of rows, and
each way rounds differently. Taken in pieces of one size, padded, every row is computed in the
same way in any batch; where in a piece it stands changes nothing.
"""

from collections.abc import Callable

import torch
from transformers.pytorch_utils import Conv1D

from batchgen.errors import UsageError

# Rows of a product, and elements of a piece of a norm. On a GPU: as many rows as a decode step
# has at most by default, and enough elements to fill the card.
_GPU_PIECES = (256, 1 << 20)
_CPU_PIECES = (32, 1 << 14)

Rows = Callable[[torch.Tensor], torch.Tensor]


def fix_row_counts(model: torch.nn.Module) -> None:
    """Let a model's linear layers and norms work on pieces of fixed sizes.

    What is our own on a CPU, packed products and fused norms, goes over all rows alike already.

    Raises:
        UsageError: the model has a mixture of experts, whose products have as many rows as the
            router sends them.
    """
    if any(parameter.dim() == 3 for parameter in model.parameters()):
        raise UsageError(
            f"engine.deterministic=true: {type(model).__name__} is a mixture of experts, whose "
            f"products have as many rows as all rows of a step send to an expert; set "
            f"engine.deterministic=false"
        )
    on_gpu = next(model.parameters()).device.type == "cuda"
    product_rows, norm_elements = _GPU_PIECES if on_gpu else _CPU_PIECES
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        if isinstance(module, (torch.nn.Linear, Conv1D)):
            _replace(module, lambda _: product_rows)
        elif type(module).__name__.endswith("Norm"):
            _replace(module, lambda size: max(1, norm_elements // size))


def _replace(module: torch.nn.Module, rows_of: Callable[[int], int]) -> None:
    forward: Rows = module.forward

    def in_pieces(states: torch.Tensor) -> torch.Tensor:
        return _in_micro_batches(forward, states, rows_of(states.shape[-1]))

    # An attribute of the object hides the method of its class.
    object.__setattr__(module, "forward", in_pieces)


def _in_micro_batches(forward: Rows, states: torch.Tensor, size: int) -> torch.Tensor:
    """Run [..., K] states through a function of rows, ``size`` rows at a time."""
    rows = states.reshape(-1, states.shape[-1])
    pieces = []
    for at in range(0, len(rows), size):
        piece = rows[at : at + size]
        count = len(piece)
        if count < size:
            piece = torch.cat((piece, piece.new_zeros(size - count, piece.shape[1])))
        pieces.append(forward(piece)[:count])
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out.view(*states.shape[:-1], -1)
