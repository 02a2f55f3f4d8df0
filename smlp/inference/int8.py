"""Weights and products in int8, for scoring and writing on a CPU.

Weights have a scale for each output, activations one for each token: the largest absolute value over 127. So no result
depends on later tokens or on what else is in a batch. (``torch.ao.quantization.quantize_dynamic`` has one scale for all
tokens of a batch, and finds no module here.) Embeddings, the product with them at the end, spatial weights, routers and
norms stay as they are.

Letters: ``R`` rows, ``I`` inputs, ``O`` outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smlp.moe.experts import FeedForwardExperts
from smlp.nn.blocks import MaskedBlock, TokenMixing
from smlp.nn.layers import Linear, MaskedLinear
from smlp.ops import ACTIVATION_FUNCTIONS

_LARGEST = 127


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and the scales (..., 1) of the rows of a tensor: ``x`` is about their product."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / _LARGEST
    return (x / scale).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scale  # a scale in 16 bits is rounded


def int8_product(x: Tensor, weight_OI: Tensor, scale_O1: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return ``W x + b``, (..., I) to (..., O): products of int8 values are summed exactly, in int32.

    The sums are scaled in float32 at least: those of thousands of inputs are beyond float16.

    Args:
        x: in floating point.
        weight_OI, scale_O1: of :func:`quantized`.
        bias_O: in floating point.
    """
    x_RI, row_scale_R1 = quantized(x.reshape(-1, x.size(-1)))
    wide = torch.promote_types(x.dtype, torch.float32)
    y_RO = torch._int_mm(x_RI, weight_OI.t()) * row_scale_R1.to(wide) * scale_O1.t()
    return (y_RO if bias_O is None else y_RO + bias_O).to(x.dtype).view(*x.shape[:-1], len(weight_OI))


class Int8Linear(nn.Module):
    """A linear map with int8 weights, one scale for each output.

    Args:
        weight_OI, bias_O: in floating point.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        for name, value in zip(("weight", "scale"), quantized(weight_OI), strict=True):
            self.register_buffer(name, value)
        self.register_buffer("bias", None if bias_O is None else bias_O.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        return int8_product(x, self.weight, self.scale, self.bias)


class Int8Experts(nn.Module):
    """Feed-forward experts with int8 weights, as :class:`smlp.moe.experts.FeedForwardExperts`."""

    def __init__(self, experts: FeedForwardExperts) -> None:
        super().__init__()
        self.expert_ids = experts.expert_ids
        self.activation = ACTIVATION_FUNCTIONS[experts.activation]
        self.norm_weight, self.norm_bias = experts.norm_weight, experts.norm_bias
        self.first = nn.ModuleList(map(Int8Linear, experts.w1, experts.b1))
        self.second = nn.ModuleList(map(Int8Linear, experts.w2, experts.b2))

    def forward(self, x_AH: Tensor, counts: Sequence[int]) -> Tensor:
        """Map (A, H), sorted by expert with ``counts`` tokens each, to (A, H)."""
        outputs = []
        for expert, x_nH in enumerate(x_AH.split(list(counts))):
            if len(x_nH) == 0:
                continue
            if self.norm_weight is not None and self.norm_bias is not None:
                x_nH = F.layer_norm(x_nH, x_nH.shape[1:], self.norm_weight[expert], self.norm_bias[expert])
            outputs.append(self.second[expert](self.activation(self.first[expert](x_nH))))
        return torch.cat(outputs) if outputs else x_AH


@torch.no_grad()
def quantize(model: nn.Module) -> None:
    """Turn the linear maps and the feed-forward experts of a model into int8, in place; it can then not be trained.

    Blocks that use a part of a matrix for shorter inputs keep it as it is.
    """
    for parent in [module for module in model.modules() if not isinstance(module, TokenMixing | MaskedBlock)]:
        for name, child in parent.named_children():
            if type(child) is Linear:
                setattr(parent, name, Int8Linear(child.weight, child.bias))
            elif isinstance(child, MaskedLinear):
                setattr(parent, name, Int8Linear(child.matrix(), child.bias))
            elif isinstance(child, FeedForwardExperts):
                setattr(parent, name, Int8Experts(child))
