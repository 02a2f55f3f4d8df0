"""Sparse layers: chains of router, dispatcher, experts and dispatcher again.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``H`` features, ``E`` experts, ``N`` routed tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from smlp.context import ForwardContext
from smlp.errors import NaNError
from smlp.moe.dispatch import LocalDispatcher, LocalFeatureDispatcher
from smlp.moe.experts import FeedForwardExperts, SpatialExperts
from smlp.moe.plan import RoutingPlan
from smlp.moe.routers import Router


class TokenDispatcher(Protocol):
    """See :mod:`smlp.moe.dispatch`."""

    def dispatch(self, x_NH: Tensor, plan: RoutingPlan): ...

    def combine(self, y_AH: Tensor, weight_A: Tensor | None, record) -> Tensor: ...


class FeatureDispatcher(Protocol):
    """See :mod:`smlp.moe.dispatch`."""

    def dispatch(self, x_BnH: Tensor, num_experts: int): ...

    def combine(self, y: Tensor, record) -> Tensor: ...


class TokenMoE(nn.Module):
    """tMoE: feed-forward experts over tokens.

    Padding is never routed and never counted: it gets a zero update.

    Args:
        router: decides; see :mod:`smlp.moe.routers`.
        experts: the feed-forward experts of this rank.
        name: of the layer, for error messages.
        dispatcher: moves tokens; the local one by default.
    """

    def __init__(
        self,
        router: Router,
        experts: FeedForwardExperts,
        name: str,
        dispatcher: TokenDispatcher | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.name = name
        self.dispatcher = dispatcher or LocalDispatcher()

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, dict[str, Tensor]]:
        """The update (B, n, H) to add to x, and the router's auxiliary losses.

        Raises:
            NaNError: routing scores are NaN; the message names the layer.
        """
        x_NH = x_BnH.flatten(0, 1)
        if context.valid_Bn is None:
            update_NH, aux_losses = self._route(x_NH, context)
        else:
            rows = context.valid_Bn.flatten().nonzero().squeeze(1)
            routed, aux_losses = self._route(x_NH.index_select(0, rows), context)
            update_NH = torch.zeros_like(x_NH).index_copy(0, rows, routed.to(x_NH.dtype))
        return update_NH.view(x_BnH.shape), aux_losses

    def _route(self, x_NH: Tensor, context: ForwardContext) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            routing = self.router(x_NH, context.plans.get(self))
        except FloatingPointError as error:
            raise NaNError(
                f"{self.name}: {error}; if this is training, it has diverged: lower --lr or set --clip-norm"
            ) from None
        context.plans[self] = routing.plan
        inputs, record = self.dispatcher.dispatch(x_NH, routing.plan)
        outputs = self.experts(inputs, record.counts)
        return self.dispatcher.combine(outputs, routing.weight_A, record), routing.aux_losses


class FeatureMoE(nn.Module):
    """sMoE with deterministic routing: expert i gates the i-th chunk of the features (smlp.txt, section 3.2.1).

    ``z = LN(x)``; chunk i of the update is ``z_i * (tril(W_i) @ norm(z)_i + b_i)``. ``norm`` is taken over all
    features before they are cut, so that the result does not depend on where an expert lives.

    Args:
        embed_dim: H, a multiple of E.
        num_experts: E, over all ranks.
        experts: the spatial experts of this rank.
        dispatcher: moves chunks; the local one by default.
    """

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        experts: SpatialExperts,
        dispatcher: FeatureDispatcher | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embed_dim)
        self.spatial_norm = nn.LayerNorm(embed_dim)
        self.experts = experts
        self.num_experts = num_experts
        self.dispatcher = dispatcher or LocalFeatureDispatcher()

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        """The update (B, n, H) to add to x."""
        z_BnH = self.norm(x_BnH)
        seen_BmH, start = context.remember(self, self.spatial_norm(z_BnH), self.experts.max_tokens)
        chunks, record = self.dispatcher.dispatch(seen_BmH, self.num_experts)
        return z_BnH * self.dispatcher.combine(self.experts(chunks, start), record)
