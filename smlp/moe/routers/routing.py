"""What every router returns, and the interface of routers.

Letters: ``N`` tokens, ``H`` features, ``E`` experts, ``A`` assignments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from smlp.moe.plan import RoutingPlan


@dataclass(frozen=True)
class Routing:
    """A plan with the weights, differentiable, of its assignments."""

    plan: RoutingPlan
    #: weight of each assignment, (A,), float32
    weight_A: Tensor
    #: scalar losses to add to the training loss, by name
    aux_losses: dict[str, Tensor] = field(default_factory=dict)


class Router(Protocol):
    """Chooses experts for tokens."""

    def __call__(self, x_NH: Tensor, plan: RoutingPlan | None = None) -> Routing:
        """Routes tokens (N, H); with ``plan`` given, only the weights are computed, for that plan."""
