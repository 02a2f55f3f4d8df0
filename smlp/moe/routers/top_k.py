"""Switch (top-1) and GShard (top-2) routing: a softmax gate, a capacity, a load-balance loss.

Letters: ``N`` tokens, ``E`` experts, ``K`` choices of each token, ``A`` assignments.

Sources: Fedus et al., 2021 (Switch), section 2.2 and appendix A; Lepikhin et al., 2020 (GShard), algorithm 1;
Riquelme et al., 2021, section 4.1 (capacity filled by gate); Zoph et al., 2022, equation 5 (z-loss).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.moe.plan import RoutingPlan, expert_capacity
from smlp.moe.routers.routing import Routing, ScoredRouterKind, TrainedRouter, register_router
from smlp.ops.assignment import check_no_nan
from smlp.ops.rows import occurrences
from smlp.parallel.spans import ASSIGNMENT, stage

_LOSS_WEIGHTS = ("load_balance_weight", "router_z_weight")


def top_k_choices(logits_NE: Tensor, num_choices: int, noise_NE: Tensor | None = None) -> Tensor:
    """Return the experts of highest score, best first, (N, K); ties go to the lower id. If E < K there are E of them.

    Args:
        logits_NE: (N, E).
        num_choices: K, 1 or 2.
        noise_NE: added to the scores before the second choice (the Gumbel trick), but not before the first.
    """
    check_no_nan(logits_NE)
    first_N = logits_NE.argmax(dim=1)
    if min(num_choices, logits_NE.size(1)) == 1:
        return first_N.unsqueeze(1)
    rest_NE = logits_NE if noise_NE is None else logits_NE + noise_NE
    second_N = rest_NE.scatter(1, first_N.unsqueeze(1), -torch.inf).argmax(dim=1)
    return torch.stack([first_N, second_N], dim=1)


def load_balance_loss(gate_NE: Tensor, first_choice_N: Tensor) -> Tensor:
    """Return ``E * sum_i f_i * P_i``: f the shares of tokens with first choice i, P the mean gates; 1 when balanced.

    Source: Fedus et al., 2021, equations 4 to 6, without the weight. Dropped tokens count like the others.
    """
    num_tokens, num_experts = gate_NE.shape
    share_E = occurrences(first_choice_N, num_experts).to(gate_NE.dtype) / max(num_tokens, 1)
    return num_experts * (share_E * gate_NE.sum(dim=0)).sum() / max(num_tokens, 1)


def router_z_loss(logits_NE: Tensor) -> Tensor:
    """Return the mean squared logsumexp of the scores, which keeps them small (Zoph et al., 2022, equation 5)."""
    top_N1 = logits_NE.detach().amax(dim=1, keepdim=True)
    # torch.logsumexp asks whether there is any token, which a graph does not know
    logsumexp_N1 = (logits_NE - top_N1).exp().sum(dim=1, keepdim=True).log() + top_N1
    return logsumexp_N1.square().sum() / max(logits_NE.size(0), 1)


def assignment_weights(gate_NE: Tensor, plan: RoutingPlan, normalise: str) -> Tensor:
    """Return the weight of each assignment, (A,): the gate for one choice, gates that sum to one for two.

    Args:
        gate_NE: softmax of the scores, (N, E).
        plan: with ``choice_NK`` and ``rank_A``.
        normalise: ``before_drop`` divides by the gates of both choices (GShard), ``after_drop`` by those of the
            choices that were not dropped (fairscale).
    """
    assert plan.choice_NK is not None
    gate_NK = gate_NE.gather(1, plan.choice_NK)
    if gate_NK.size(1) > 1:
        divisor_NK = gate_NK
        if normalise == "after_drop":
            kept_A = gate_NK.new_ones(()) if plan.kept_A is None else plan.kept_A.to(gate_NK.dtype)
            divisor_NK = gate_NK * torch.zeros_like(gate_NK).index_put((plan.token_A, plan.rank_A), kept_A)
        gate_NK = gate_NK / divisor_NK.sum(dim=1, keepdim=True).clamp_min(torch.finfo(gate_NK.dtype).eps)
    weight_A = gate_NK[plan.token_A, plan.rank_A]
    return weight_A if plan.kept_A is None else weight_A * plan.kept_A


@dataclass(frozen=True)
class TopKSettings:
    """Settings of a gate; fields as in :class:`smlp.config.MoEConfig`."""

    #: K
    num_choices: int
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 0.0
    drop_order: str = "position"
    load_balance_weight: float = 0.01
    router_z_weight: float = 0.0
    router_jitter: float = 0.0
    second_expert: str = "random"
    gate_normalisation: str = "before_drop"


class TopKRouter(TrainedRouter):
    """Softmax gate in float32; each token's K best experts, within one capacity in training and one in evaluation.

    Args:
        embed_dim: H.
        num_experts: E, over all ranks; every rank holds the whole gate.
        settings: how it chooses.
        freeze_after: as in :class:`TrainedRouter`.
    """

    def __init__(self, embed_dim: int, num_experts: int, settings: TopKSettings, freeze_after: float = 1.0) -> None:
        super().__init__(freeze_after)
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dim))
        if not self.weight.is_meta:
            nn.init.uniform_(self.weight, -(embed_dim**-0.5), embed_dim**-0.5)

    def forward(self, x_NH: Tensor, token_ids_N: Tensor | None, plan: RoutingPlan | None = None) -> Routing:
        """Route tokens (N, H); see :class:`smlp.moe.routers.Router`."""
        settings = self.settings
        if self.training and settings.router_jitter > 0:
            # drawn in float32: bfloat16 has too few numbers near one
            noise_NH = torch.empty_like(x_NH, dtype=torch.promote_types(x_NH.dtype, torch.float32))
            x_NH = x_NH * noise_NH.uniform_(1 - settings.router_jitter, 1 + settings.router_jitter)
        logits_NE = self.scores(x_NH, self.weight)
        gate_NE = logits_NE.softmax(dim=1)
        noise = self._draw(logits_NE)
        if plan is None:
            with torch.no_grad(), stage(ASSIGNMENT):
                plan = self._decide(logits_NE, gate_NE, noise)
        aux_losses = {}
        if self.training and settings.load_balance_weight > 0:
            assert plan.choice_NK is not None
            balance = load_balance_loss(gate_NE, plan.choice_NK[:, 0])
            aux_losses["load_balance"] = settings.load_balance_weight * balance
        if self.training and settings.router_z_weight > 0:
            aux_losses["router_z"] = settings.router_z_weight * router_z_loss(logits_NE)
        weight_A = assignment_weights(gate_NE, plan, settings.gate_normalisation)
        return Routing(plan, weight_A, aux_losses, logits_NE.detach())

    def _draw(self, logits_NE: Tensor) -> Tensor | None:
        """Draw random numbers for the second choice: Gumbel noise (N, E), or U(0, 1) for each token (N,)."""
        if not self.training or self.settings.num_choices == 1 or self.settings.second_expert == "all":
            return None
        if self.settings.second_expert == "sampled":
            return -torch.empty_like(logits_NE).exponential_().log()
        return torch.rand_like(logits_NE[:, 0])

    def _decide(self, logits_NE: Tensor, gate_NE: Tensor, noise: Tensor | None) -> RoutingPlan:
        settings, num_experts = self.settings, logits_NE.size(1)
        sampled = noise if settings.second_expert == "sampled" else None
        choice_NK = top_k_choices(logits_NE, settings.num_choices, sampled)
        wanted_NK = None
        if noise is not None and sampled is None and choice_NK.size(1) > 1:
            gate_NK = gate_NE.gather(1, choice_NK)
            wanted_NK = torch.ones_like(choice_NK, dtype=torch.bool)
            wanted_NK[:, 1] = 2 * gate_NK[:, 1] / gate_NK.sum(dim=1) > noise
        factor = settings.capacity_factor if self.training else settings.eval_capacity_factor
        capacity = expert_capacity(factor, choice_NK.size(1), choice_NK.size(0), num_experts)
        priority_N = gate_NE.amax(dim=1) if settings.drop_order == "gate" else None
        return RoutingPlan.from_choices(choice_NK, num_experts, capacity, priority_N, wanted_NK)

    def limit_capacity(self, factor: float) -> None:
        """Set the capacity factor of evaluation in place; 0 drops nothing."""
        self.settings = replace(self.settings, eval_capacity_factor=factor)

    def looks_ahead(self) -> bool:
        """Return True where capacity is limited: other tokens then decide which ones are dropped."""
        factor = self.settings.capacity_factor if self.training else self.settings.eval_capacity_factor
        return factor > 0


@register_router("switch")
class Switch(ScoredRouterKind):
    """The best expert by a softmax gate (Fedus et al., 2021)."""

    takes: ClassVar[tuple[str, ...]] = (
        "capacity_factor",
        "eval_capacity_factor",
        "drop_order",
        *_LOSS_WEIGHTS,
        "router_jitter",
        "router_freeze",
    )
    title = "Switch"

    def build(self, config: ModelConfig) -> TopKRouter:
        own = [field.name for field in fields(TopKSettings) if field.name != "num_choices"]
        same_name = {name: getattr(config, name) for name in own}
        settings = TopKSettings(num_choices=config.experts_per_token, **same_name)
        return TopKRouter(config.embed_dim, config.num_experts, settings, config.router_freeze)

    def auxiliary_loss(self, config: ModelConfig) -> str | None:
        weights = {name: getattr(config, name) for name in _LOSS_WEIGHTS}
        return next((f"{name}={weight}" for name, weight in weights.items() if weight > 0), None)


@register_router("gshard")
class GShard(Switch):
    """The two best experts by a softmax gate (Lepikhin et al., 2020)."""

    takes: ClassVar[tuple[str, ...]] = (*Switch.takes, "second_expert", "gate_normalisation")
    title = "GShard"

    def experts_per_token(self, config: ModelConfig) -> int:
        return 2
