"""MLP-Mixer's block for text (Liu et al., 2021, section 4.1): a network over the positions, then one over the features.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``H``, ``D`` hidden width of the network over positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.settings import require, setting
from smlp.costs.component import LAYER_NORM_FLOPS, LAYER_NORM_KEEPS, NORMS, SPATIAL, Component, dropout_keeps
from smlp.nn.blocks.base import (
    Block,
    BlockKind,
    DenseBlock,
    feed_forward_costs,
    feed_forward_keeps,
    register_dense_block,
)
from smlp.nn.layers import Dropout, xavier_linear
from smlp.nn.state import ForwardContext
from smlp.ops import ACTIVATION_FUNCTIONS
from smlp.parallel import Ranks

TOKEN_MIXING = "token mixing"


@dataclass(frozen=True)
class MixerSettings:
    """The network over the positions."""

    token_dim: int = setting(384, "D, hidden width of the network over the positions")

    def __post_init__(self) -> None:
        require(self.token_dim >= 1, f"mixer_token_dim must be at least 1, got {self.token_dim}")


class TokenMixing(nn.Module):
    """``x + W2 act(W1 LN(x) + b1) + b2`` over the positions of each feature.

    Inputs shorter than T use the leading columns of ``W1``, the leading rows of ``W2`` and the leading entries of
    ``b2``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.tokens_in = xavier_linear(config.max_tokens, config.own("mixer").token_dim)
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.tokens_out = xavier_linear(config.own("mixer").token_dim, config.max_tokens)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        z_BnH = self.norm(x_BnH)
        if context.valid_Bn is not None:
            z_BnH = z_BnH * context.valid_Bn.unsqueeze(2)  # no token may see padding
        n = x_BnH.size(1)
        hidden_BHD = nn.functional.linear(z_BnH.transpose(1, 2), self.tokens_in.weight[:, :n], self.tokens_in.bias)
        mixed_BHn = nn.functional.linear(
            self.activation(hidden_BHD), self.tokens_out.weight[:n], self.tokens_out.bias[:n]
        )
        return x_BnH + self.dropout(mixed_BHn.transpose(1, 2))


@register_dense_block("mixer")
class Mixer(BlockKind):
    """A network over the positions, and a feed-forward network; for encoders only."""

    settings = MixerSettings
    has_heads = False

    def check(self, config: ModelConfig) -> None:
        require(config.is_bidirectional, "mixer blocks mix all positions: they need direction=bidirectional")

    def attends(self, config: ModelConfig) -> bool:
        return False

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        return DenseBlock(config, TokenMixing(config))

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        H, T, D = config.embed_dim, config.max_tokens, config.own("mixer").token_dim
        yield Component(
            f"blocks.{layer_index}.mixing",
            layer_index,
            TOKEN_MIXING,
            other_params=2 * H + 2 * T * D + D + T,
            work={NORMS: LAYER_NORM_FLOPS * H, SPATIAL: 2 * D * H},
            num_mixed=num_tokens,
        )
        yield feed_forward_costs(config, layer_index)

    def activations_per_position(self, config: ModelConfig) -> float:
        # input and output of the norm; input and output of the activation, D numbers for each feature, per T positions
        hidden = 2 * config.embed_dim * config.own("mixer").token_dim / config.max_tokens
        mixing = 2 * config.embed_dim + LAYER_NORM_KEEPS + hidden
        return mixing + feed_forward_keeps(config) + 2 * dropout_keeps(config)
