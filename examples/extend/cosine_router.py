"""A router in one file: a token goes to the expert whose direction is nearest to its own, whatever its length.

    export SMLP_PLUGINS=examples/extend/cosine_router.py
    smlp train data-bin --arch cosine_lm_tiny --cosine-temperature 0.2

docs/extending.md explains the interfaces. Letters: N tokens, H features, E experts, A assignments of tokens to experts.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smlp.extend import (
    ModelConfig,
    RouterKind,
    Routing,
    RoutingPlan,
    UserError,
    check_no_nan,
    gate_logits,
    register_architecture,
    register_router,
    setting,
)


@dataclass(frozen=True)
class CosineSettings:
    """Settings that the router brings along: options --cosine-temperature and --cosine-balance-weight."""

    temperature: float = setting(0.1, "cosine: similarities are divided by this before the softmax")
    balance_weight: float = setting(0.01, "cosine: weight of the load-balance loss")

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UserError(f"cosine_temperature must be positive, got {self.temperature}")
        if not self.balance_weight >= 0:
            raise UserError(f"cosine_balance_weight must be at least 0, got {self.balance_weight}")


class CosineRouter(nn.Module):
    """The module of one layer. It holds weights; what it decides travels in a plan."""

    def __init__(self, embed_dim: int, num_experts: int, settings: CosineSettings) -> None:
        super().__init__()
        self.settings = settings
        # Every rank holds the directions of all experts, drawn from the same random numbers.
        self.directions = nn.Parameter(torch.empty(num_experts, embed_dim))
        if not self.directions.is_meta:  # costs are counted on a model without numbers
            nn.init.normal_(self.directions)

    def forward(self, x_NH: Tensor, token_ids_N: Tensor | None, plan: RoutingPlan | None = None) -> Routing:
        """Routes tokens; padding is not among them, and there may be none."""
        cosine_NE = gate_logits(F.normalize(x_NH, dim=1), F.normalize(self.directions, dim=1))  # float32 at least
        logits_NE = cosine_NE / self.settings.temperature
        gate_NE = logits_NE.softmax(dim=1)
        # A plan that is given must be kept to: a block that is computed again in the backward pass, or a test, wants
        # the weights of these very assignments.
        if plan is None:
            with torch.no_grad():
                check_no_nan(logits_NE)
                plan = RoutingPlan.from_experts(logits_NE.argmax(dim=1), logits_NE.size(1))
        aux_losses = {}
        if self.training and self.settings.balance_weight > 0:
            num_tokens, num_experts = max(x_NH.size(0), 1), logits_NE.size(1)
            share_E = plan.counts_E.to(gate_NE) / num_tokens
            balance = num_experts * (share_E * gate_NE.sum(dim=0) / num_tokens).sum()  # 1 where loads are equal
            aux_losses["load_balance"] = self.settings.balance_weight * balance
        # Only the weights have gradients: through them the router learns.
        return Routing(plan, gate_NE[plan.token_A, plan.expert_A], aux_losses, logits_NE.detach())

    def looks_ahead(self) -> bool:
        """Never: each token chooses by itself, and no place is limited, so no later token can change its expert."""
        return False


@register_router("cosine")
class Cosine(RouterKind):
    """What the package needs to know to build the router and to count its cost."""

    settings = CosineSettings

    def build(self, config: ModelConfig) -> CosineRouter:
        return CosineRouter(config.embed_dim, config.num_experts, config.own("cosine"))

    def num_parameters(self, config: ModelConfig) -> int:
        return config.num_experts * config.embed_dim

    def flops_per_token(self, config: ModelConfig) -> float:
        return config.num_experts * config.embed_dim  # one product; norms and softmax count as 0

    def auxiliary_loss(self, config: ModelConfig) -> str | None:
        weight = config.own("cosine").balance_weight
        return f"cosine_balance_weight={weight}" if weight > 0 else None


register_architecture("cosine_lm_tiny", like="switch_lm_tiny", router="cosine")
