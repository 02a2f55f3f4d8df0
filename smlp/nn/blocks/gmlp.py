"""gMLP (Liu et al., 2021, section 2): the block, its spatial gating unit, causal and with heads, and what it costs.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``H``, ``F``, ``f`` features that are mixed (F/2 or F), ``h`` heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.model import MOST_SIZE
from smlp.config.settings import require, setting
from smlp.costs.component import (
    ATTENTION,
    LAYER_NORM_FLOPS,
    LAYER_NORM_KEEPS,
    NORMS,
    PROJECTIONS,
    SCORES,
    SPATIAL,
    Component,
    dropout_keeps,
    linear_parameters,
)
from smlp.nn.attention import SelfAttention
from smlp.nn.blocks.base import AuxLosses, Block, BlockKind, register_dense_block
from smlp.nn.layers import Dropout, SpatialWeights, spatial_parameters, xavier_linear
from smlp.nn.state import ForwardContext
from smlp.ops import ACTIVATION_FUNCTIONS, activated_halves
from smlp.parallel import Ranks

GATED_MLP = "gMLP block"
SPATIAL_GATING = "spatial gating"
GATES = ("split", "multiplicative", "additive", "linear")


@dataclass(frozen=True)
class GatedMLPSettings:
    """Settings of a gMLP block (Liu et al., 2021, sections 2.1, 4.1 and 4.3)."""

    gate: str = setting(
        "split",
        "z1 * m(z2) of the halves of the features z, or z * m(z), z + m(z), m(z), where m mixes positions",
        GATES,
    )
    attention_dim: int = setting(0, "width of the tiny attention that is added to m, as in aMLP; 0 for none")

    def __post_init__(self) -> None:
        require(self.attention_dim >= 0, f"gmlp_attention_dim must not be negative, got {self.attention_dim}")
        require(self.attention_dim <= MOST_SIZE, f"gmlp_attention_dim must be at most {MOST_SIZE:,}")


class SpatialGatingUnit(nn.Module):
    """``z1 * (W @ LN(z2) + b)`` with ``z1, z2`` halves of the features, or another gate (Liu et al., 2021, equation 4).

    ``W`` is ``tril(W)`` in a causal model. It starts near zero and ``b`` at one, so that the unit starts as ``z1``.
    With h heads, ``z2`` is cut into h chunks of features with a ``W`` and a ``b`` each (Yu et al., 2022, section 4.2).

    Without a product there is nothing that ``b = 1`` would pass through: the gates ``additive`` and ``linear`` start
    with ``b = 0``, and the latter with ``W`` of variance 1/T. The paper prints no initial values for them.

    Args:
        width: f, features that are mixed.
        max_tokens: T.
        weight_bound: weights start as U(-bound, bound), near zero.
        num_heads: h.
        gate: one of ``GATES``; "split" and "multiplicative" are the same here.
        is_causal, is_toeplitz, average: as in :class:`smlp.nn.layers.SpatialWeights`.
        norm_eps: of the layer norm.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        weight_bound: float,
        num_heads: int = 1,
        gate: str = "split",
        is_causal: bool = True,
        is_toeplitz: bool = False,
        average: float = 0.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_product = gate in ("split", "multiplicative")
        self.is_sum = gate == "additive"
        self.norm = nn.LayerNorm(width, norm_eps)
        self.heads = SpatialWeights(
            max_tokens,
            range(num_heads),
            math.sqrt(3 / max_tokens) if gate == "linear" else weight_bound,
            bias_init=float(self.is_product),
            is_causal=is_causal,
            is_toeplitz=is_toeplitz,
            average=average,
        )

    @classmethod
    def of(cls, config: ModelConfig) -> SpatialGatingUnit:
        """Return the unit of a gMLP block of this model."""
        return cls(
            _mixed_features(config),
            config.max_tokens,
            config.spatial_weight_bound,
            config.num_heads,
            config.own("gmlp").gate,
            is_causal=not config.is_bidirectional,
            is_toeplitz=config.spatial_weights == "toeplitz",
            average=config.spatial_init_average,
        )

    def forward(
        self, z1_Bnf: Tensor, z2_Bnf: Tensor, context: ForwardContext, attended_Bnf: Tensor | None = None
    ) -> Tensor:
        """Gate z1 with the projected z2 and, in aMLP, what the tiny attention saw; (B, n, f) each, to (B, n, f)."""
        z2_Bnf = self.norm(z2_Bnf)
        if context.valid_Bn is not None and not self.heads.is_causal:
            z2_Bnf = z2_Bnf * context.valid_Bn.unsqueeze(2)  # no token may see padding
        seen_Bmf, start = context.remember(self, z2_Bnf, self.heads.max_tokens)
        z1_Bnhc, seen_Bmhc = (z.unflatten(2, (self.num_heads, -1)) for z in (z1_Bnf, seen_Bmf))
        # by head: if flattened before the product, the projection's output need not be contiguous in this order
        mixed_Bnf = self.heads.project(seen_Bmhc, start, z1_Bnhc if self.is_product else None).flatten(2)
        if attended_Bnf is not None:
            mixed_Bnf = mixed_Bnf + (z1_Bnf * attended_Bnf if self.is_product else attended_Bnf)
        return z1_Bnf + mixed_Bnf if self.is_sum else mixed_Bnf


class GatedMLPBlock(Block):
    """``x + V(s(act(U(LN(x)))))`` with the spatial gating unit s (Liu et al., 2021, equation 1).

    In aMLP the unit also gets a single attention head over ``LN(x)`` (Liu et al., 2021, section 4.3 and figure 6).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        own = config.own("gmlp")
        self.norm = nn.LayerNorm(config.embed_dim)
        self.proj_in = xavier_linear(config.embed_dim, config.ffn_dim)
        self.activation = config.activation
        self.is_split = own.gate == "split"
        self.gating = SpatialGatingUnit.of(config)
        self.attention = None
        if own.attention_dim:
            self.attention = SelfAttention(config, own.attention_dim, num_heads=1, out_dim=_mixed_features(config))
        self.proj_out = xavier_linear(_mixed_features(config), config.embed_dim)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        normed_BnH = self.norm(x_BnH)
        z_BnF = self.proj_in(normed_BnH)
        if self.is_split:
            parts = activated_halves(z_BnF, self.activation)
        else:
            parts = (ACTIVATION_FUNCTIONS[self.activation](z_BnF),) * 2
        if self.attention is None:
            gated_Bnf = context.by_sequences(self.gating, *parts)
        else:
            attended_Bnf = self.attention(normed_BnH, context)
            gated_Bnf = context.by_sequences(
                lambda z1, z2, attended, own: self.gating(z1, z2, own, attended), *parts, attended_Bnf
            )
        return x_BnH + self.dropout(self.proj_out(gated_Bnf)), {}


def _mixed_features(config: ModelConfig) -> int:
    """Return f, the features that are mixed: half of F where the gate splits them."""
    return config.ffn_dim // 2 if config.own("gmlp").gate == "split" else config.ffn_dim


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

    settings = GatedMLPSettings
    has_spatial_weights = True

    def attends(self, config: ModelConfig) -> bool:
        return config.own("gmlp").attention_dim > 0

    def check(self, config: ModelConfig) -> None:
        if config.own("gmlp").gate == "split":
            check_halves(config)
        require(
            config.ffn_dim % config.num_heads == 0,
            f"num_heads={config.num_heads} must divide ffn_dim={config.ffn_dim}",
        )

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        return GatedMLPBlock(config)

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        H, F, T, a = config.embed_dim, config.ffn_dim, config.max_tokens, config.own("gmlp").attention_dim
        name, f = f"blocks.{layer_index}", _mixed_features(config)
        spatial = spatial_parameters(T, not config.is_bidirectional, config.spatial_weights == "toeplitz")
        yield Component(
            name,
            layer_index,
            GATED_MLP,
            other_params=2 * H + linear_parameters(H, F) + linear_parameters(f, H),
            work={NORMS: LAYER_NORM_FLOPS * H, PROJECTIONS: H * F + f * H},
        )
        yield Component(
            f"{name}.gating",
            layer_index,
            SPATIAL_GATING,
            other_params=2 * f + config.num_heads * (spatial + T),
            work={NORMS: LAYER_NORM_FLOPS * f, SPATIAL: num_tokens * f},
            num_mixed=num_tokens,
        )
        if a:
            yield Component(
                f"{name}.attention",
                layer_index,
                ATTENTION,
                other_params=linear_parameters(H, 3 * a) + linear_parameters(a, f),
                work={PROJECTIONS: 3 * H * a + a * f, SCORES: 2 * num_tokens * a},
                num_mixed=num_tokens,
            )

    def activations_per_position(self, config: ModelConfig) -> float:
        f, a = _mixed_features(config), config.own("gmlp").attention_dim
        # input and output of the norm, input and output of the activation, normed part, gate, product
        kept = 2 * config.embed_dim + 2 * LAYER_NORM_KEEPS + 2 * config.ffn_dim + 3 * f + dropout_keeps(config)
        # queries, keys, values, the heads' outputs and the softmax sums; then the projected output and its product
        return kept + (4 * a + 1 + 2 * f if a else 0)

    def ffn_multiple(self, config: ModelConfig) -> int:
        return 2 * config.num_heads
