"""sMoE: experts that mix positions, each for its share of the features.

Letters: ``B`` sequences, ``n`` new tokens, ``m`` all tokens up to now, ``H`` features, ``E`` experts, ``P`` prefix.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from smlp.errors import NaNError, UserError
from smlp.moe.dispatch import FeatureDispatcher, LocalFeatureDispatcher
from smlp.moe.experts import SpatialExperts
from smlp.moe.plan import RoutingPlan
from smlp.moe.routers import FeatureRouter
from smlp.nn.state import ForwardContext, Observation
from smlp.ops import permuted_columns
from smlp.parallel.spans import EXPERTS, GATE, PERMUTE, stage_of


class FeatureMoE(nn.Module):
    """sMoE with deterministic routing: expert i has the i-th chunk of the features (Yu et al., 2022, section 3.2.1).

    ``z = LN(x)``; chunk i of the update is ``z_i * m_i`` with ``m_i = tril(W_i) @ norm(z)_i + b_i``, as in gMLP's
    gating unit (``gated``), or ``m_i`` alone (``linear``: equation 2 and Figure 2 of Yu et al., 2022), or ``z_i + m_i``
    (``additive``). ``norm`` is taken over all features before they are cut, so that the result does not depend on
    where an expert lives.

    Args:
        embed_dim: H, a multiple of E.
        num_experts: E, over all ranks.
        experts: the spatial experts of this rank.
        dispatcher: moves chunks; the local one by default.
        name: of the layer, for error messages and reports.
        kind: "gated", "linear" or "additive".
    """

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        experts: SpatialExperts,
        dispatcher: FeatureDispatcher | None = None,
        name: str = "sMoE",
        kind: str = "gated",
    ) -> None:
        super().__init__()
        self.name = name
        self.norm = nn.LayerNorm(embed_dim)
        self.spatial_norm = nn.LayerNorm(embed_dim)
        self.experts = experts
        self.num_experts = num_experts
        self.kind = kind
        self.dispatcher = dispatcher or LocalFeatureDispatcher()

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        """Return the update (B, n, H) to add to x."""
        z_BnH = self.norm(x_BnH)
        seen_BmH, start = context.remember(self, self.spatial_norm(z_BnH), self.experts.max_tokens)
        mixed_BnH = self._mix(seen_BmH, start)
        return self._combine(z_BnH, mixed_BnH)

    def _combine(self, z_BnH: Tensor, mixed_BnH: Tensor) -> Tensor:
        """Combine the features with the outputs of their experts into the update."""
        if self.kind == "gated":
            return z_BnH * mixed_BnH
        return z_BnH + mixed_BnH if self.kind == "additive" else mixed_BnH

    def _mix(self, seen_BmH: Tensor, start: int) -> Tensor:
        """Send each chunk of the features through its expert: (B, m, H) to (B, m - start, H)."""
        with stage_of(self.name, PERMUTE):
            chunks, record = self.dispatcher.dispatch(seen_BmH, self.num_experts, start)
        with stage_of(self.name, EXPERTS):
            outputs = self.experts(chunks, record.start)
        with stage_of(self.name, PERMUTE):
            return self.dispatcher.combine(outputs, record)


class RoutedFeatureMoE(FeatureMoE):
    """sMoE in which the features of each sequence choose their experts (Yu et al., 2022, section 3.2.2 and appendix B).

    Each feature, seen as a vector over positions, goes to one expert, each expert getting H/E of them; the update of
    feature j is ``p_j * z_j * (tril(W) @ norm(z)_j + b)`` with its expert's W and b and the softmax probability p_j;
    for the other kinds, ``p_j`` times their update.
    Experts are as wide as the positions after the prefix, on which alone they act; the prefix passes through.

    Args:
        embed_dim, num_experts, experts: as in :class:`FeatureMoE`; the experts' context is T - P.
        router: reads the prefix (partial), or all T positions (leaky: it sees the tokens to be predicted).
        prefix_tokens: P.
        name: of the layer, for error messages and reports.
        dispatcher, kind: as in :class:`FeatureMoE`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        experts: SpatialExperts,
        router: FeatureRouter,
        prefix_tokens: int,
        name: str,
        dispatcher: FeatureDispatcher | None = None,
        kind: str = "gated",
    ) -> None:
        super().__init__(embed_dim, num_experts, experts, dispatcher, name, kind)
        self.router = router
        self.prefix_tokens = prefix_tokens
        self.max_tokens = prefix_tokens + experts.max_tokens

    @property
    def is_leaky(self) -> bool:
        """Return whether positions after the prefix take part in the routing."""
        return self.router.weight.size(1) > self.prefix_tokens

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        """Return the update (B, n, H) to add to x; zeros at the prefix.

        Raises:
            UserError: incremental decoding of the leaky kind, which needs the future.
            NaNError: routing scores are NaN; the message names the layer.
        """
        if context.state is not None and self.is_leaky:
            raise UserError(
                f"{self.name}: leaky routing reads the whole sequence, so it cannot generate text token by token"
            )
        z_BnH = self.norm(x_BnH)
        u_BnH = self.spatial_norm(z_BnH)
        if context.valid_Bn is not None:
            u_BnH = u_BnH * context.valid_Bn.unsqueeze(2)
        seen_BmH, start = context.remember(self, u_BnH, self.max_tokens)
        after_BmH = seen_BmH[:, self.prefix_tokens :]
        first = max(start - self.prefix_tokens, 0)
        num_outputs = after_BmH.size(1) - first
        if num_outputs == 0:
            # Nothing to do for this rank's sequences, but perhaps for other ranks'.
            return z_BnH * 0 + F.pad(self._mix(after_BmH, first), (0, 0, z_BnH.size(1), 0))
        expert_BH, probability_BH = self._choose(seen_BmH, context)
        with stage_of(self.name, PERMUTE):
            order_BH = expert_BH.argsort(dim=1, stable=True)
            place_BH = order_BH.argsort(dim=1)
            sorted_BmH = permuted_columns(after_BmH, order_BH, place_BH)
        mixed_BqH = self._mix(sorted_BmH, first)
        with stage_of(self.name, PERMUTE):
            mixed_BqH = permuted_columns(mixed_BqH, place_BH, order_BH)
        num_before = z_BnH.size(1) - num_outputs
        mixed_BqH = self._combine(z_BnH[:, num_before:], mixed_BqH)
        update_BqH = mixed_BqH * probability_BH.to(z_BnH.dtype).unsqueeze(1)
        return F.pad(update_BqH, (0, 0, num_before, 0))

    def _choose(self, seen_BmH: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return experts and their probabilities, (B, H) each, decided once for each sequence."""
        if context.state is not None:
            experts, probabilities = (context.state.kept((self, name)) for name in ("experts", "probabilities"))
            if experts is not None and probabilities is not None:
                return experts, probabilities
        v_BHL = seen_BmH[:, : self.router.weight.size(1)].transpose(1, 2)
        try:
            with stage_of(self.name, GATE):
                expert_BH, probability_BH, logits_BHE = self.router(v_BHL, context.plans.get(self))
        except FloatingPointError as error:
            raise NaNError.in_layer(self.name, error) from None
        context.plans[self] = expert_BH
        if context.observe:
            plan = RoutingPlan.from_experts(expert_BH.flatten(), self.num_experts)
            context.observed(self, Observation(plan, logits_BHE.detach().flatten(0, 1)))
        if context.state is not None:
            context.state.keep((self, "experts"), expert_BH)
            context.state.keep((self, "probabilities"), probability_BH)
        return expert_BH, probability_BH
