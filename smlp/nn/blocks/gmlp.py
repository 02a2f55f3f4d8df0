"""gMLP (gmlp.txt, section 2): the block, its spatial gating unit, causal and with heads, and what it costs.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``H``, ``F``, ``h`` heads.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.settings import require
from smlp.costs.component import (
    LAYER_NORM_FLOPS,
    LAYER_NORM_KEEPS,
    NORMS,
    PROJECTIONS,
    SPATIAL,
    Component,
    dropout_keeps,
    linear_parameters,
)
from smlp.nn.blocks.base import AuxLosses, Block, BlockKind, register_dense_block
from smlp.nn.layers import Dropout, SpatialWeights, xavier_linear
from smlp.nn.state import ForwardContext
from smlp.ops import activated_halves, causal_spatial_projection
from smlp.parallel import Ranks

GATED_MLP = "gMLP block"
SPATIAL_GATING = "spatial gating"


class SpatialGatingUnit(nn.Module):
    """``z1 * (tril(W) @ LN(z2) + b)`` with ``z1, z2`` the halves of the features (gmlp.txt, equation 4).

    ``W`` starts near zero and ``b`` at one, so that the unit starts as ``z1``. With h heads, ``z2`` is cut into h
    chunks of features with a ``W`` and a ``b`` each (smlp.txt, section 4.2).

    Args:
        ffn_dim: F.
        max_tokens: T.
        num_heads: h; divides F/2.
        weight_bound: initial weights are U(-bound, bound).
    """

    def __init__(self, ffn_dim: int, max_tokens: int, num_heads: int, weight_bound: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(ffn_dim // 2)
        self.heads = SpatialWeights(max_tokens, range(num_heads), weight_bound, bias_init=1.0)

    def forward(self, z1_Bnf: Tensor, z2_Bnf: Tensor, context: ForwardContext) -> Tensor:
        """Multiply the first half of the features with the projected second, (B, n, F/2) each, to (B, n, F/2)."""
        heads = self.heads
        seen_Bmf, start = context.remember(self, self.norm(z2_Bnf), heads.max_tokens)
        z1_Bnhc, seen_Bmhc = (z.unflatten(2, (self.num_heads, -1)) for z in (z1_Bnf, seen_Bmf))
        # by head: flattened before the product, what comes of the projection need not lie in this order
        return causal_spatial_projection(seen_Bmhc, heads.weight, heads.bias, start, z1_Bnhc).flatten(2)


class GatedMLPBlock(Block):
    """``x + V(s(act(U(LN(x)))))`` with the spatial gating unit s (gmlp.txt, equation 1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.proj_in = xavier_linear(config.embed_dim, config.ffn_dim)
        self.activation = config.activation
        self.gating = SpatialGatingUnit(
            config.ffn_dim, config.max_tokens, config.num_heads, config.spatial_weight_bound
        )
        self.proj_out = xavier_linear(config.ffn_dim // 2, config.embed_dim)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        halves = activated_halves(self.proj_in(self.norm(x_BnH)), self.activation)
        return x_BnH + self.dropout(self.proj_out(context.by_sequences(self.gating, *halves))), {}


def check_halves(config: ModelConfig) -> None:
    """Refuse widths that a spatial gating unit cannot split.

    Raises:
        UserError: F is odd, or half of it no multiple of the heads.
    """
    require(config.ffn_dim % 2 == 0, f"ffn_dim must be even to be split in halves, got {config.ffn_dim}")
    require(
        (config.ffn_dim // 2) % config.num_heads == 0,
        f"num_heads={config.num_heads} must divide half of ffn_dim={config.ffn_dim}",
    )


@register_dense_block("gmlp")
class GatedMLP(BlockKind):
    """A gMLP block and its spatial gating unit."""

    has_spatial_weights = True

    def check(self, config: ModelConfig) -> None:
        check_halves(config)

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        return GatedMLPBlock(config)

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        H, F, T = config.embed_dim, config.ffn_dim, config.max_tokens
        name, half = f"blocks.{layer_index}", F // 2
        yield Component(
            name,
            layer_index,
            GATED_MLP,
            other_params=2 * H + linear_parameters(H, F) + linear_parameters(half, H),
            work={NORMS: LAYER_NORM_FLOPS * H, PROJECTIONS: H * F + half * H},
        )
        yield Component(
            f"{name}.gating",
            layer_index,
            SPATIAL_GATING,
            other_params=2 * half + config.num_heads * (T * T + T),
            work={NORMS: LAYER_NORM_FLOPS * half, SPATIAL: num_tokens * half},
            num_mixed=num_tokens,
        )

    def activations_per_position(self, config: ModelConfig) -> float:
        # the norm's input and output, before and after the activation, normed half, gate, product
        return 2 * config.embed_dim + 2 * LAYER_NORM_KEEPS + 3.5 * config.ffn_dim + dropout_keeps(config)

    def ffn_multiple(self, config: ModelConfig) -> int:
        return 2 * config.num_heads
