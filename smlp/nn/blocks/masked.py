"""A sparse, wide MLP over a whole sequence (Hayase and Karakida, 2024, S.16), with a static, causal mask.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``m`` all tokens up to now, ``H``, ``p`` density.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.settings import require, setting
from smlp.costs.component import LAYER_NORM_FLOPS, LAYER_NORM_KEEPS, NORMS, PROJECTIONS, Component, dropout_keeps
from smlp.nn.blocks.base import AuxLosses, Block, BlockKind, register_dense_block
from smlp.nn.layers import Dropout, MaskedLinear
from smlp.nn.state import ForwardContext
from smlp.ops import ACTIVATION_FUNCTIONS, linear
from smlp.parallel import Ranks

MASKED_LAYER = "masked layer"


@dataclass(frozen=True)
class MaskedSettings:
    """The mask over all features of all positions."""

    density: float = setting(
        0.1, "share of the weights between any two positions, neither of which is later, that a static mask keeps"
    )

    def __post_init__(self) -> None:
        require(0 < self.density <= 1, f"masked_density must be above 0 and at most 1, got {self.density}")


class MaskedBlock(Block):
    """``x + act((M * W) LN(x))`` over all T*H features of a sequence, for models to be compared with sMLP's.

    The static mask M keeps each weight with probability p if its input's position is not later than its output's. The
    matrix has T^2 H^2 entries and is computed as a dense product, so that this block is for short contexts.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        T, H = config.max_tokens, config.embed_dim
        self.max_tokens = T
        self.norm = nn.LayerNorm(H)
        is_past = (
            torch.ones(T, T, dtype=torch.bool, device="cpu").tril().repeat_interleave(H, 0).repeat_interleave(H, 1)
        )
        self.layer = MaskedLinear(T * H, T * H, config.own("masked").density, bias=False, allowed=is_past)
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        return x_BnH + self.dropout(context.by_sequences(self._mixed, self.norm(x_BnH))), {}

    def _mixed(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        seen_BmH, start = context.remember(self, x_BnH, self.max_tokens)
        H, m = x_BnH.size(2), seen_BmH.size(1)
        weight = self.layer.matrix()[start * H : m * H, : m * H]
        return self.activation(linear(seen_BmH.flatten(1), weight, None)).unflatten(1, (-1, H))


@register_dense_block("masked")
class Masked(BlockKind):
    """A masked layer over all features of all positions; for causal models."""

    settings = MaskedSettings

    def check(self, config: ModelConfig) -> None:
        require(not config.is_bidirectional, "masked blocks are causal: they need direction=causal")

    def attends(self, config: ModelConfig) -> bool:
        return False

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        return MaskedBlock(config)

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        H, T = config.embed_dim, config.max_tokens
        yield Component(
            f"blocks.{layer_index}",
            layer_index,
            MASKED_LAYER,
            other_params=2 * H + (T * H) ** 2,
            work={NORMS: LAYER_NORM_FLOPS * H, PROJECTIONS: num_tokens * H * H},
            num_mixed=num_tokens,
        )

    def activations_per_position(self, config: ModelConfig) -> float:
        # input and output of the norm, input of the activation
        return 3 * config.embed_dim + LAYER_NORM_KEEPS + dropout_keeps(config)
