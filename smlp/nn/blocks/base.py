"""Base classes of blocks: the interface of modules, their description to the package, and the stack.

Each file of this folder holds one block: its module, checks, parameters, FLOPs, memory and registration.

Letters: ``B`` sequences, ``n`` tokens of an input (n <= T), ``H`` embedding width, ``F`` feed-forward width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smlp.config import ModelConfig
from smlp.config.registration import ModelPart, call_problem, register
from smlp.config.registry import DENSE_BLOCKS, SPARSE_BLOCKS
from smlp.costs.component import (
    LAYER_NORM_FLOPS,
    LAYER_NORM_KEEPS,
    NORMS,
    PROJECTIONS,
    Component,
    linear_parameters,
)
from smlp.errors import UserError
from smlp.nn.layers import Dropout, FeedForward
from smlp.nn.state import ForwardContext
from smlp.parallel import Ranks

FEED_FORWARD = "feed-forward"

AuxLosses = dict[str, Tensor]


class Block(nn.Module):
    """A residual block."""

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        """Return the new x (B, n, H), and losses to add to that of training, by name.

        Functions that mix the tokens of a sequence are called through :meth:`ForwardContext.by_sequences`, and cache
        values for later positions with :meth:`ForwardContext.remember`.
        """
        raise NotImplementedError

    def read(self, x_BnH: Tensor, context: ForwardContext) -> None:
        """Cache in ``context.state`` what later positions need; called for the last block, if nothing is predicted."""
        self.forward(x_BnH, context)


class DenseBlock(Block):
    """A sublayer that mixes the tokens (self-attention in a Transformer), then ``x + FFN(LN(x))``.

    With ``layer_norm=after`` the second sublayer is ``LN(x + FFN(x))``.

    Args:
        config: of the model.
        mixing: the sublayer before, with its residual.
        density: of the feed-forward network's weights, if they have a static mask.
    """

    def __init__(self, config: ModelConfig, mixing: nn.Module, density: float = 1.0) -> None:
        super().__init__()
        self.mixing = mixing
        self.norm = nn.LayerNorm(config.embed_dim)
        self.feed_forward = FeedForward(config.embed_dim, config.ffn_dim, config.activation, density)
        self.dropout = Dropout(config.dropout)
        self.norms_after = config.layer_norm == "after"

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        x_BnH = mixed(self.mixing, x_BnH, context)
        if self.norms_after:
            return self.norm(x_BnH + self.dropout(self.feed_forward(x_BnH))), {}
        return x_BnH + self.dropout(self.feed_forward(self.norm(x_BnH))), {}

    def read(self, x_BnH: Tensor, context: ForwardContext) -> None:
        """Skip the feed-forward network, which no other position sees; otherwise as in :class:`Block`."""
        self.mixing(x_BnH, context)


def mixed(mixing: nn.Module, x_BnH: Tensor, context: ForwardContext) -> Tensor:
    """Apply the sublayer of a block that mixes tokens, which must keep shape and type."""
    y_BnH = mixing(x_BnH, context)
    _check_returned(mixing, y_BnH, x_BnH)
    return y_BnH


def applied(
    block: nn.Module, x_BnH: Tensor, context: ForwardContext, recompute: bool = False
) -> tuple[Tensor, AuxLosses]:
    """Apply a block, which must return what :meth:`Block.forward` describes; the backward pass may compute it again."""
    returned = checkpoint(block, x_BnH, context, use_reentrant=False) if recompute else block(x_BnH, context)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise UserError(f"{type(block).__name__} returned no tuple of a tensor and a dictionary of auxiliary losses")
    _check_returned(block, returned[0], x_BnH)
    for name, loss in returned[1].items():
        if not isinstance(loss, Tensor) or loss.dim():
            raise UserError(f"{type(block).__name__} returned an auxiliary loss {name!r} that is not a scalar tensor")
    return returned


def _check_returned(module: nn.Module, y_BnH: object, x_BnH: Tensor) -> None:
    if not isinstance(y_BnH, Tensor) or y_BnH.shape != x_BnH.shape:
        found = tuple(y_BnH.shape) if isinstance(y_BnH, Tensor) else f"{y_BnH!r:.40}"
        raise UserError(f"{type(module).__name__} returned {found}, not a tensor of shape {tuple(x_BnH.shape)}")
    if y_BnH.dtype != x_BnH.dtype:
        raise UserError(f"{type(module).__name__} returned numbers of type {y_BnH.dtype}, not {x_BnH.dtype}")


def feed_forward_costs(config: ModelConfig, layer: int) -> Component:
    """Return the costs of a :class:`DenseBlock` without its mixing: a norm and a feed-forward network of width F."""
    H, F = config.embed_dim, config.ffn_dim
    return Component(
        f"blocks.{layer}",
        layer,
        FEED_FORWARD,
        other_params=2 * H + linear_parameters(H, F) + linear_parameters(F, H),
        work={NORMS: LAYER_NORM_FLOPS * H, PROJECTIONS: 2 * H * F},
    )


def feed_forward_keeps(config: ModelConfig) -> float:
    """Return how many numbers a norm and a feed-forward network keep per position for the backward pass."""
    return 2 * config.embed_dim + LAYER_NORM_KEEPS + 2 * config.ffn_dim


class BlockKind(ModelPart):
    """Describes a block to the package. Methods receive the whole model's configuration."""

    #: whether it has an sMoE: ``feature_routing`` then says whether a prefix chooses experts
    has_feature_moe: ClassVar[bool] = False
    #: whether it has matrices over positions, initialised as ``spatial_init_scale`` says
    has_spatial_weights: ClassVar[bool] = False
    #: whether ``num_heads`` changes it
    has_heads: ClassVar[bool] = True
    #: whether its experts of tokens see the other tokens of a sequence, which ``base_shuffle`` would send elsewhere
    keeps_sequences_whole: ClassVar[bool] = False
    #: whether it can have its layer norms after the sublayers (``layer_norm=after``)
    can_norm_after: ClassVar[bool] = False

    def attends(self, config: ModelConfig) -> bool:
        """Tell whether it has attention weights, to which ``attention_dropout`` applies; a plug-in's block may."""
        return True

    @abstractmethod
    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        """Build the module for a layer of the stack.

        Args:
            config: of the model.
            layer_index: position in the stack, from 0.
            ranks: who holds which experts; one process with all of them by default.
        """

    @abstractmethod
    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        """Return all parameters of the module, and its work for inputs of n tokens."""

    def activations_per_position(self, config: ModelConfig) -> float:
        """Return how many numbers are kept per position for the backward pass, to estimate memory.

        Raises:
            UserError: the block does not define it.
        """
        raise UserError(f"{self.name} blocks do not say how much memory they keep: the memory of an update is unknown")

    def ffn_multiple(self, config: ModelConfig) -> int:
        """Return the number of which F must be a multiple."""
        return 1


_B = TypeVar("_B", bound=type[BlockKind])


def register_dense_block(name: str) -> Callable[[_B], _B]:
    """Register a :class:`BlockKind` that ``--dense-block NAME`` chooses; a class decorator.

    Raises:
        UserError: the name is taken, the class lacks something, or its settings cannot be used.
    """
    return register(DENSE_BLOCKS, name, BlockKind)


def register_sparse_block(name: str) -> Callable[[_B], _B]:
    """Register a :class:`BlockKind`, with experts, that ``--sparse-block NAME`` chooses; errors as above."""
    return register(SPARSE_BLOCKS, name, BlockKind)


def sparse_block(config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
    """Build the sparse block at ``layer_index`` of the stack, with the experts of this rank."""
    return SPARSE_BLOCKS[config.sparse_block].build(config, layer_index, ranks)


def build_blocks(config: ModelConfig, ranks: Ranks | None = None) -> nn.ModuleList:
    """Build the stack that a configuration describes, with the experts of this rank; with all of them by default."""
    sparse, dense_kind = set(config.sparse_layer_indices()), DENSE_BLOCKS[config.dense_block]
    blocks = nn.ModuleList()
    for index in range(config.num_layers):
        block = sparse_block(config, index, ranks) if index in sparse else dense_kind.build(config, index, ranks)
        what = f"layer {index}: build() of the block returned a {type(block).__name__}"
        if not isinstance(block, Block):
            raise UserError(f"{what}, not a Block")
        mixing = getattr(block, "mixing", block)
        problem = call_problem(block, "x_BnH", "context") or call_problem(mixing, "x_BnH", "context")
        if problem is not None:
            raise UserError(f"{what} with {type(mixing).__name__}, which {problem}")
        for name, parameter in block.named_parameters():
            if parameter.dtype != torch.get_default_dtype():
                raise UserError(f"{what} whose {name} is {parameter.dtype}, not {torch.get_default_dtype()}")
        blocks.append(block)
    return blocks
