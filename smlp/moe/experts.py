"""Experts: stacked weights of the experts that live on this rank, each named by its global id.

The initial values of an expert do not depend on the rank on which it lives (:func:`smlp.nn.layers.uniform_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from smlp.nn.layers import SpatialWeights, uniform_rows
from smlp.ops import expert_feed_forward


def xavier_bound(fan_in: int, fan_out: int) -> float:
    """Return Xavier's uniform bound, for one expert at a time."""
    return math.sqrt(6.0 / (fan_in + fan_out))


class FeedForwardExperts(nn.Module):
    """Feed-forward experts: ``w2 act(w1 x + b1) + b2``.

    Those of BASE and of sMLP's tMoE each have a layer norm of their own, and ``w2`` starts at zero, so that the layer
    starts as the identity (Lewis et al., 2021; Yu et al., 2022, section 3.1). Those of the other routers start with
    Xavier's values, as a dense feed-forward network does.

    Args:
        embed_dim, ffn_dim: H, F.
        expert_ids: global ids of the experts on this rank.
        activation: "gelu", "relu" or "swish".
        as_in_base: with own norms and ``w2 = 0``.
    """

    #: whether they take counts as a tensor, in a graph of ``torch.compile``
    fits_graphs = True

    def __init__(
        self, embed_dim: int, ffn_dim: int, expert_ids: Sequence[int], activation: str, as_in_base: bool = True
    ) -> None:
        super().__init__()
        num_local, bound = len(expert_ids), xavier_bound(embed_dim, ffn_dim)
        self.expert_ids = expert_ids  # a range stays one: a file may say a billion, and its weights are read later
        self.activation = activation
        self.norm_weight = nn.Parameter(torch.ones(num_local, embed_dim)) if as_in_base else None
        self.norm_bias = nn.Parameter(torch.zeros(num_local, embed_dim)) if as_in_base else None
        self.w1 = uniform_rows(expert_ids, ffn_dim, embed_dim, bound=bound)
        self.b1 = nn.Parameter(torch.zeros(num_local, ffn_dim))
        if as_in_base:
            self.w2 = nn.Parameter(torch.zeros(num_local, embed_dim, ffn_dim))
        else:
            self.w2 = uniform_rows(expert_ids, embed_dim, ffn_dim, bound=bound)
        self.b2 = nn.Parameter(torch.zeros(num_local, embed_dim))

    def forward(self, x_AH: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        """Map (A, H), sorted by expert with ``counts`` tokens each, to (A, H)."""
        norm = None
        if self.norm_weight is not None and self.norm_bias is not None:
            norm = (self.norm_weight, self.norm_bias)
        return expert_feed_forward(x_AH, counts, norm, self.w1, self.b1, self.w2, self.b2, self.activation)


class SpatialExperts(SpatialWeights):
    """Experts of the sMoE: each projects the positions of its features by a T x T matrix and a bias of length T.

    Args:
        max_tokens: T.
        expert_ids: global ids of the experts on this rank.
        weight_bound, bias_init, is_toeplitz, average, num_all: as in :class:`smlp.nn.layers.SpatialWeights`.
    """

    def __init__(
        self,
        max_tokens: int,
        expert_ids: Sequence[int],
        weight_bound: float,
        bias_init: float,
        is_toeplitz: bool = False,
        average: float = 0.0,
        num_all: int | None = None,
    ) -> None:
        super().__init__(
            max_tokens, expert_ids, weight_bound, bias_init, is_toeplitz=is_toeplitz, average=average, num_all=num_all
        )
        self.expert_ids = expert_ids

    def forward(self, x_Bnec: Tensor, start: int = 0) -> Tensor:
        """Map (B, n, e, c) to (B, n - start, e, c): chunk i through expert i, at positions start .. n-1."""
        return self.project(x_Bnec, start)


def expert_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Sequence[int]]]:
    """Yield, for each parameter of experts, its name in the state dict, itself, and the experts' global ids (axis 0).

    The experts of a layer are a module with ``expert_ids``. Routers, norms of whole layers, and the heads of a spatial
    gating unit are no experts: every rank has them.
    """
    for path, experts in module.named_modules():
        if hasattr(experts, "expert_ids"):
            for name, parameter in experts.named_parameters(prefix=path):
                yield name, parameter, experts.expert_ids
