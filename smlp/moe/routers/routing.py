"""What every router returns, and the interface of routers.

Letters: ``N`` tokens, ``H`` features, ``E`` experts, ``A`` assignments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from smlp.moe.plan import RoutingPlan
from smlp.nn.pytrees import pytree
from smlp.ops import linear


@pytree
@dataclass(frozen=True)
class Routing:
    """A plan with the weights, differentiable, of its assignments."""

    plan: RoutingPlan
    #: weight of each assignment, (A,), float32; None for ones
    weight_A: Tensor | None
    #: scalar losses to add to the training loss, by name, already weighted
    aux_losses: dict[str, Tensor] = field(default_factory=dict)
    #: scores that the plan follows from, (N, E), detached; None where there are none
    logits_NE: Tensor | None = None


class Router(Protocol):
    """Chooses experts for tokens."""

    def __call__(self, x_NH: Tensor, token_ids_N: Tensor | None, plan: RoutingPlan | None = None) -> Routing:
        """Routes tokens (N, H) with ids (N,).

        With ``plan`` given, only weights and losses are computed, for that plan; random numbers are drawn all the
        same, so that what comes after a block draws the same ones when the block is computed again.
        """

    def looks_ahead(self) -> bool:
        """Whether, in its present mode, where a token goes depends on other tokens of the batch, later ones too."""


@runtime_checkable
class RouterWithPlaces(Protocol):
    """A router that can drop tokens in evaluation too."""

    def limit_places(self, factor: float) -> None:
        """Sets the capacity factor of evaluation in place; 0 drops nothing."""


def gate_logits(x_NH: Tensor, weight_EH: Tensor) -> Tensor:
    """Scores ``x @ weight.T``, (N, E), in float32 at least, also under autocast."""
    dtype = torch.promote_types(x_NH.dtype, torch.float32)
    # autocast knows no meta device, on which costs are counted
    device = "cpu" if x_NH.is_meta else x_NH.device.type
    with torch.autocast(device, enabled=False):
        return linear(x_NH.to(dtype), weight_EH.to(dtype))
