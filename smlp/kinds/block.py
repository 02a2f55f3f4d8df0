"""What the package has to know of a block.

Letters: ``B`` sequences, ``n`` tokens of an input (n <= T), ``H`` embedding width, ``F`` feed-forward width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from smlp.config import ModelConfig
from smlp.costs import parts
from smlp.costs.component import Component
from smlp.costs.memory import mask, token_experts
from smlp.errors import UserError
from smlp.kinds.kind import Kind

if TYPE_CHECKING:
    from torch import nn

    from smlp.nn.blocks import Block
    from smlp.parallel import Ranks


class BlockKind(Kind):
    """A residual block. Methods are given the configuration of the whole model."""

    #: whether it has an sMoE: ``feature_routing`` then says whether a prefix chooses experts
    has_feature_moe: ClassVar[bool] = False
    #: whether it has matrices over positions, which start as ``spatial_init_scale`` says
    has_spatial_weights: ClassVar[bool] = False

    @abstractmethod
    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        """The module at a place of the stack.

        Args:
            config: of the model.
            layer_index: the place, from 0.
            ranks: who holds which experts; one process with all of them by default.
        """

    @abstractmethod
    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        """Its parameters and its work for inputs of n tokens: together all that its module has and does."""

    def activations_per_position(self, config: ModelConfig) -> float:
        """Numbers kept for the backward pass, for each position; only estimates of memory ask for it.

        Raises:
            UserError: it does not say.
        """
        raise UserError(f"{self.name} blocks do not say how much they keep: the memory of an update is unknown")

    def ffn_multiple(self, config: ModelConfig) -> int:
        """F must be a multiple of this."""
        return 1


class SparseBlockKind(BlockKind):
    """Something that mixes tokens, then experts of tokens: ``x + mixing(x)``, ``x + tMoE(x)``."""

    @abstractmethod
    def mixing(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> nn.Module:
        """The first of the two, from (x (B, n, H), context) to (B, n, H), with the residual."""

    @abstractmethod
    def mixing_components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        """Its parameters and work; the module is ``blocks.{layer_index}.mixing``."""

    def mixing_activations(self, config: ModelConfig) -> float:
        """Numbers that it keeps, as :meth:`activations_per_position`."""
        return super().activations_per_position(config)

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        from smlp.nn.blocks import SparseBlock
        from smlp.nn.sparse_layers import feed_forward_moe, norm_before_experts

        mixing, norm = self.mixing(config, layer_index, ranks), norm_before_experts(config)
        return SparseBlock(mixing, feed_forward_moe(config, layer_index, ranks), norm, config.dropout)

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        yield from parts.router(config, layer_index)
        yield from self.mixing_components(config, layer_index, num_tokens)
        yield parts.token_experts(config, layer_index)

    def activations_per_position(self, config: ModelConfig) -> float:
        return self.mixing_activations(config) + mask(config) + token_experts(config) + mask(config)
