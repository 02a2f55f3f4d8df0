"""What the package has to know of a router.

Letters: ``N`` tokens, ``H`` features, ``E`` experts of which each token is due ``k``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from smlp.config import ModelConfig
from smlp.kinds.kind import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from smlp.moe.routers import Router


class RouterKind(Kind):
    """A way in which tokens choose experts. Methods are given the configuration of the whole model."""

    #: fields of ``MoEConfig`` that it reads; for models with another router they have no effect
    takes: ClassVar[tuple[str, ...]] = ()
    #: whether every expert has a layer norm of its own and starts as zero, as in BASE; else all share the block's norm
    experts_as_in_base: ClassVar[bool] = False
    #: in reports; its name by default
    title: ClassVar[str | None] = None

    @abstractmethod
    def build(self, config: ModelConfig) -> Router:
        """The module of one layer; every rank has all of it, and starts from the same random numbers."""

    @abstractmethod
    def num_parameters(self, config: ModelConfig) -> int:
        """Of the module of one layer."""

    @abstractmethod
    def flops_per_token(self, config: ModelConfig) -> float:
        """Multiply-adds of its scores, for each token, as fvcore counts them; choosing by the scores is not counted."""

    def experts_per_token(self, config: ModelConfig) -> int:
        """k, as many as a token goes to where none is dropped."""
        return 1

    def activations_per_position(self, config: ModelConfig) -> float:
        """Numbers kept for the backward pass: for a learnt gate its input, scores, and the outputs that it weighs."""
        return (1 + config.experts_per_token) * config.embed_dim + config.moe.num_experts

    def needs_token_counts(self, config: ModelConfig) -> bool:
        """Whether ``module.balance(frequencies_V)`` is to be called with the counts of the training data's tokens."""
        return False

    def mixes_ranks(self, config: ModelConfig) -> bool:
        """Whether, in training, the tokens of an expert group's ranks are mixed before they are routed."""
        return False

    def affinities(self, logits_NE: Tensor) -> Tensor:
        """How much tokens are drawn to experts, between 0 and 1, from the scores that the module reports, (N, E)."""
        return logits_NE.softmax(dim=1)
