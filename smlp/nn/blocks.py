"""Residual blocks, dense and sparse; every architecture is a stack of them.

Letters: ``B`` sequences, ``n`` tokens, ``H`` embedding width, ``F`` feed-forward width. Every block maps
``(x_BnH, context)`` to the new ``x_BnH`` and its auxiliary losses.
"""

from __future__ import annotations

from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.registry import DENSE_BLOCKS, SPARSE_BLOCKS
from smlp.moe.layer import TokenMoE
from smlp.nn.attention import CausalSelfAttention
from smlp.nn.dropout import Dropout
from smlp.nn.feed_forward import FeedForward
from smlp.nn.linear import xavier_linear
from smlp.nn.sparse_layers import feature_moe, weight_bound
from smlp.nn.spatial_gating import SpatialGatingUnit
from smlp.nn.state import ForwardContext
from smlp.ops import activated_halves
from smlp.parallel import Ranks

AuxLosses = dict[str, Tensor]


class Block(nn.Module):
    """A residual block; what every block has."""

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        """The new x (B, n, H), and losses to add to that of training, by name.

        What mixes the tokens of a sequence goes through :meth:`ForwardContext.by_sequences`, and keeps what later
        positions need by :meth:`ForwardContext.remember`.
        """
        raise NotImplementedError

    def read(self, x_BnH: Tensor, context: ForwardContext) -> None:
        """Only what later positions need of these, which ``context.state`` keeps: the last block predicts nothing."""
        self.forward(x_BnH, context)


class GatedMLPBlock(Block):
    """``x + V(s(act(U(LN(x)))))`` with the spatial gating unit s (gmlp.txt, equation 1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.proj_in = xavier_linear(config.embed_dim, config.ffn_dim)
        self.activation = config.activation
        self.gating = SpatialGatingUnit(config.ffn_dim, config.max_tokens, config.num_heads, weight_bound(config))
        self.proj_out = xavier_linear(config.ffn_dim // 2, config.embed_dim)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        halves = activated_halves(self.proj_in(self.norm(x_BnH)), self.activation)
        return x_BnH + self.dropout(self.proj_out(context.by_sequences(self.gating, *halves))), {}


class AttentionSublayer(nn.Module):
    """``x + attention(LN(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.attention = CausalSelfAttention(config.embed_dim, config.num_heads, config.max_tokens)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        return x_BnH + self.dropout(self.attention(self.norm(x_BnH), context))


class DenseBlock(Block):
    """What mixes the tokens (self-attention in a Transformer), then ``x + FFN(LN(x))``.

    Args:
        config: of the model.
        mixing: the sublayer before, with its residual.
    """

    def __init__(self, config: ModelConfig, mixing: nn.Module) -> None:
        super().__init__()
        self.mixing = mixing
        self.norm = nn.LayerNorm(config.embed_dim)
        self.feed_forward = FeedForward(config.embed_dim, config.ffn_dim, config.activation)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        x_BnH = self.mixing(x_BnH, context)
        return x_BnH + self.dropout(self.feed_forward(self.norm(x_BnH))), {}

    def read(self, x_BnH: Tensor, context: ForwardContext) -> None:
        """As in :class:`Block`: without the feed-forward network, which no other position sees."""
        self.mixing(x_BnH, context)


class FeatureSublayer(nn.Module):
    """``x + sMoE(x)`` (smlp.txt, section 3.2)."""

    def __init__(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.feature_moe = feature_moe(config, layer_index, ranks)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        return x_BnH + self.dropout(context.by_sequences(self.feature_moe, x_BnH))


class SparseBlock(Block):
    """``x + tMoE(x)``, after what mixes the tokens: self-attention, the sMoE, or nothing.

    BASE, and experts that are gMLP layers, route x itself and have a norm of their own in each expert; the others
    route and transform ``LN(x)``.

    Args:
        mixing: the sublayer before, if there is one.
        token_moe: the sparse layer.
        norm: the layer norm before it, or the identity.
        dropout: after it.
    """

    def __init__(self, mixing: nn.Module | None, token_moe: TokenMoE, norm: nn.Module, dropout: float) -> None:
        super().__init__()
        self.mixing = mixing
        self.norm = norm
        self.token_moe = token_moe
        self.dropout = Dropout(dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        if self.mixing is not None:
            x_BnH = self.mixing(x_BnH, context)
        if self.mixing is None and context.groups:  # the experts mix tokens
            return x_BnH + context.by_sequences(lambda x, own: self.token_moe(x, own)[0], self.norm(x_BnH)), {}
        update_BnH, aux_losses = self.token_moe(self.norm(x_BnH), context)
        return x_BnH + self.dropout(update_BnH), aux_losses

    def read(self, x_BnH: Tensor, context: ForwardContext) -> None:
        """As in :class:`Block`: experts of tokens are left out, unless it is they that mix them."""
        if self.mixing is not None:
            self.mixing(x_BnH, context)
        else:
            self.forward(x_BnH, context)


def sparse_block(config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
    """The sparse block at ``layer_index`` of the stack, with the experts of this rank."""
    return SPARSE_BLOCKS[config.sparse_block].build(config, layer_index, ranks)


def build_blocks(config: ModelConfig, ranks: Ranks | None = None) -> nn.ModuleList:
    """The stack that a configuration describes, with the experts of this rank; with all of them by default."""
    sparse, dense_kind = set(config.sparse_layer_indices()), DENSE_BLOCKS[config.dense_block]
    return nn.ModuleList(
        sparse_block(config, index, ranks) if index in sparse else dense_kind.build(config, index, ranks)
        for index in range(config.num_layers)
    )
