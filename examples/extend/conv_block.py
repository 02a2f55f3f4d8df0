"""A block in one file: a causal convolution over the last positions mixes the tokens. Dense, and with experts.

    export SMLP_PLUGINS=examples/extend/conv_block.py
    smlp train data-bin --arch conv_lm_tiny --conv-width 8

docs/extending.md explains the interfaces. Letters: B sequences, n new tokens, m all tokens up to now, H features,
K width.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smlp.extend import (
    LAYER_NORM_FLOPS,
    NORMS,
    SPATIAL,
    Block,
    BlockKind,
    Component,
    DenseBlock,
    Dropout,
    ForwardContext,
    ModelConfig,
    Ranks,
    SparseBlockKind,
    UserError,
    feed_forward_costs,
    register_architecture,
    register_dense_block,
    register_sparse_block,
    setting,
)


@dataclass(frozen=True)
class ConvSettings:
    """A setting that the blocks bring along: the option --conv-width."""

    width: int = setting(4, "conv: K, positions that each one sees, itself included")

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"conv_width must be at least 1, got {self.width}")


class Convolution(nn.Module):
    """``x + conv(LN(x))``: every feature by itself, over the last K positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.max_tokens, self.width = config.max_tokens, config.own("conv").width
        self.norm = nn.LayerNorm(config.embed_dim)
        self.weight = nn.Parameter(torch.zeros(config.embed_dim, self.width))  # the block starts without mixing
        self.bias = nn.Parameter(torch.zeros(config.embed_dim))
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        # A batch may be groups of sequences of several lengths: what mixes tokens is applied to one after the other.
        return x_BnH + self.dropout(context.by_sequences(self._mix, self.norm(x_BnH)))

    def _mix(self, z_BnH: Tensor, context: ForwardContext) -> Tensor:
        # Text is written a few tokens at a time: here are all positions so far, and where the new ones begin.
        seen_BmH, start = context.remember(self, z_BnH, self.max_tokens)
        first = max(start - self.width + 1, 0)
        missing = self.width - 1 - (start - first)  # before the text: zeros on the left, so that no one sees ahead
        windows_BnHK = F.pad(seen_BmH[:, first:], (0, 0, missing, 0)).unfold(1, self.width, 1)
        return torch.einsum("bnhk,hk->bnh", windows_BnHK, self.weight) + self.bias


def convolution_costs(config: ModelConfig, layer: int) -> Component:
    """Parameters of the module at this path, and its multiply-adds for each token: a norm, and K for each feature."""
    H, K = config.embed_dim, config.own("conv").width
    work = {NORMS: LAYER_NORM_FLOPS * H, SPATIAL: K * H}
    return Component(f"blocks.{layer}.mixing", layer, "convolution", other_params=2 * H + K * H + H, work=work)


@register_dense_block("conv")
class Conv(BlockKind):
    """What the package needs to know about the dense block."""

    settings = ConvSettings

    def check(self, config: ModelConfig) -> None:
        if config.is_bidirectional:
            raise UserError("conv blocks are causal: they need direction=causal")

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        return DenseBlock(config, Convolution(config))  # then x + FFN(LN(x))

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        return convolution_costs(config, layer_index), feed_forward_costs(config, layer_index)


@register_sparse_block("conv")
class SparseConv(SparseBlockKind):
    """The sparse block: the convolution, then experts of tokens, with any router."""

    settings = ConvSettings

    def mixing(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> nn.Module:
        return Convolution(config)

    def mixing_components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        yield convolution_costs(config, layer_index)


register_architecture("conv_lm_tiny", like="gmlp_lm_tiny", dense_block="conv")
register_architecture("conv_moe_tiny", like="smlp_tiny", dense_block="conv", sparse_block="conv")
