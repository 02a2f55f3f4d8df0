"""Base classes of routers: the result of routing, the interface of modules, and what the package has to know.

Letters: ``N`` tokens, ``H`` features, ``E`` experts of which each token is due ``k``, ``A`` assignments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.registration import ModelPart, register
from smlp.config.registry import ROUTERS
from smlp.moe.plan import RoutingPlan
from smlp.nn.state import pytree
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
    #: scores that determine the plan, (N, E), detached; None if there are none
    logits_NE: Tensor | None = None

    def problem(self, num_tokens: int) -> str | None:
        """Return what does not fit together or to N tokens, as the end of a sentence; None if all does."""
        if not isinstance(self.plan, RoutingPlan):
            return f"{_shape(self.plan)} as its plan, not a RoutingPlan"
        shape_A, weight_A, logits_NE = self.plan.token_A.shape, self.weight_A, self.logits_NE
        if self.plan.num_tokens != num_tokens:
            return f"a plan of {self.plan.num_tokens} tokens for {num_tokens}"
        if weight_A is not None and getattr(weight_A, "shape", None) != shape_A:
            return f"weight_A of shape {_shape(weight_A)} for {shape_A[0]} assignments"
        if weight_A is not None and not weight_A.is_floating_point():
            return f"weight_A of type {weight_A.dtype}, which has no gradient"
        if not isinstance(self.aux_losses, dict):
            return f"aux_losses {self.aux_losses!r:.40}, not a dictionary"
        for name, loss in self.aux_losses.items():
            if not isinstance(loss, Tensor) or loss.dim():
                return f"aux_losses[{name!r}] of shape {_shape(loss)}, not a scalar tensor"
        if logits_NE is not None and logits_NE.shape != (num_tokens, self.plan.num_experts):
            return f"logits_NE of shape {_shape(logits_NE)}, not {(num_tokens, self.plan.num_experts)}"
        return None


def _shape(value: object) -> object:
    return tuple(map(int, value.shape)) if isinstance(value, Tensor) else f"{value!r:.40}"


class Router(Protocol):
    """Chooses experts for tokens.

    A router that changes with the progress of training has ``follow(progress)``, as :class:`TrainedRouter`; what it
    learns from loads instead of gradients is in an :class:`smlp.moe.routers.offsets.ExpertOffsets`.
    A router that can drop tokens in evaluation too has ``limit_capacity(factor)``, which sets the capacity factor of
    evaluation in place; 0 drops nothing.
    """

    def __call__(self, x_NH: Tensor, token_ids_N: Tensor | None, plan: RoutingPlan | None = None) -> Routing:
        """Route tokens (N, H) with ids (N,).

        With ``plan`` given, only weights and losses are computed, for that plan. Random numbers are drawn all the same,
        so that a block that is computed again draws the same ones afterwards.
        """

    def looks_ahead(self) -> bool:
        """Tell whether, in the present mode, other tokens of the batch can change where a token goes."""


class TrainedRouter(nn.Module):
    """Base class of routers with parameters, which may stop being trained after a share of the training.

    Args:
        freeze_after: share of the training; 1 for never.
    """

    def __init__(self, freeze_after: float = 1.0) -> None:
        super().__init__()
        self.freeze_after = freeze_after
        #: whether the present update leaves its parameters alone; the trainer's optimizer asks
        self.is_frozen = False

    def follow(self, progress: float) -> None:
        """Freeze or not, by the share of the training that is done; called before each update."""
        self.is_frozen = self.freeze_after < 1 and progress >= self.freeze_after

    def scores(self, x_NH: Tensor, weight_EH: Tensor) -> Tensor:
        """Return :func:`gate_logits`; a frozen weight gets a gradient of zeros."""
        return gate_logits(x_NH, weight_EH.detach() + 0 * weight_EH if self.is_frozen else weight_EH)


class RouterKind(ModelPart):
    """Describes a router to the package; its module is separate. Methods are given the whole model's configuration."""

    #: fields of ``MoEConfig`` that it reads; for models with another router they have no effect
    takes: ClassVar[tuple[str, ...]] = ()
    #: whether every expert has its own layer norm and starts as zero, as in BASE; otherwise all share the block's norm
    experts_as_in_base: ClassVar[bool] = False
    #: label in reports; by default its name
    title: ClassVar[str | None] = None

    @abstractmethod
    def build(self, config: ModelConfig) -> Router:
        """Build the module of one layer. Every rank has all of it, and starts from the same random numbers."""

    @abstractmethod
    def num_parameters(self, config: ModelConfig) -> int:
        """Return the number of parameters of one layer's module."""

    @abstractmethod
    def flops_per_token(self, config: ModelConfig) -> float:
        """Return the multiply-adds of a token's scores, as fvcore counts them. Choosing by the scores counts as 0."""

    def experts_per_token(self, config: ModelConfig) -> int:
        """Return k, the number of experts that a token goes to where none is dropped."""
        return 1

    def activations_per_position(self, config: ModelConfig) -> float:
        """Return how many numbers are kept for the backward pass, for each position.

        By default those of a learnt gate: its input, its scores, and the expert outputs that it weighs.
        """
        return (1 + config.experts_per_token) * config.embed_dim + config.num_experts

    def needs_token_counts(self, config: ModelConfig) -> bool:
        """Tell whether ``module.balance(frequencies_V)`` must be called with the counts of the training tokens."""
        return False

    def mixes_ranks(self, config: ModelConfig) -> bool:
        """Tell whether, in training, the tokens of an expert group's ranks are mixed before they are routed."""
        return False

    def affinities(self, config: ModelConfig, logits_NE: Tensor) -> Tensor:
        """Map the scores that the module reports, (N, E), to numbers between 0 and 1."""
        return logits_NE.softmax(dim=1)


class ScoredRouterKind(RouterKind):
    """A router whose scores are products of tokens with one vector for each expert."""

    def num_parameters(self, config: ModelConfig) -> int:
        return config.num_experts * config.embed_dim

    def flops_per_token(self, config: ModelConfig) -> float:
        return config.num_experts * config.embed_dim


_R = TypeVar("_R", bound=type[RouterKind])


def register_router(name: str) -> Callable[[_R], _R]:
    """Register a :class:`RouterKind` that ``--router NAME`` chooses; a class decorator.

    Raises:
        UserError: the name is taken, the class lacks something, or its settings cannot be used.
    """
    return register(ROUTERS, name, RouterKind)


def gate_logits(x_NH: Tensor, weight_EH: Tensor) -> Tensor:
    """Return the scores ``x @ weight.T``, (N, E), in float32 at least, also under autocast."""
    dtype = torch.promote_types(x_NH.dtype, torch.float32)
    # autocast does not support the meta device, on which costs are counted
    device = "cpu" if x_NH.is_meta else x_NH.device.type
    with torch.autocast(device, enabled=False):
        return linear(x_NH.to(dtype), weight_EH.to(dtype))
