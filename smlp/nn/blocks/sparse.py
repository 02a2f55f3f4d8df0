"""Base classes of sparse blocks: a sublayer that mixes tokens, then experts of tokens.

Letters: ``B`` sequences, ``n`` tokens, ``H``, ``F``, ``E`` experts of which each token is due ``k``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.costs.component import (
    LAYER_NORM_FLOPS,
    LAYER_NORM_KEEPS,
    NORMS,
    ROUTER,
    Component,
    dropout_keeps,
    linear_parameters,
)
from smlp.errors import UserError
from smlp.moe.dispatch import LocalDispatcher, TokenDispatcher
from smlp.moe.exchange import TokenExchange, TokenShuffle
from smlp.moe.experts import FeedForwardExperts
from smlp.moe.layer import TokenMoE
from smlp.nn.blocks.base import AuxLosses, Block, BlockKind, mixed
from smlp.nn.layers import Dropout
from smlp.nn.state import ForwardContext
from smlp.parallel import Ranks, one_process

TOKEN_EXPERTS = "tMoE experts"


class SparseBlock(Block):
    """A sublayer that mixes the tokens (self-attention, the sMoE), then ``x + tMoE(x)``.

    BASE routes x itself and has a norm of its own in each expert; the others route and transform ``LN(x)``.

    Args:
        mixing: the first sublayer, with its residual.
        token_moe: the sparse layer.
        norm: the layer norm before it, or the identity.
        dropout: after it.
        tokens_first: whether the tMoE precedes the first sublayer instead.
    """

    def __init__(
        self, mixing: nn.Module, token_moe: TokenMoE, norm: nn.Module, dropout: float, tokens_first: bool = False
    ) -> None:
        super().__init__()
        self.tokens_first = tokens_first
        self.mixing = mixing
        self.norm = norm
        self.token_moe = token_moe
        self.dropout = Dropout(dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        if not self.tokens_first:
            x_BnH = mixed(self.mixing, x_BnH, context)
        update_BnH, aux_losses = self.token_moe(self.norm(x_BnH), context)
        x_BnH = x_BnH + self.dropout(update_BnH)
        return (mixed(self.mixing, x_BnH, context) if self.tokens_first else x_BnH), aux_losses

    def read(self, x_BnH: Tensor, context: ForwardContext) -> None:
        """Skip the experts of tokens if no other position sees them; otherwise as in :class:`Block`."""
        if self.tokens_first:
            self.forward(x_BnH, context)
        else:
            self.mixing(x_BnH, context)


class SparseBlockKind(BlockKind):
    """A block that mixes tokens, then has experts of tokens: ``x + mixing(x)``, ``x + tMoE(x)``."""

    @abstractmethod
    def mixing(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> nn.Module:
        """Build the first sublayer, which maps (x (B, n, H), context) to (B, n, H), with the residual."""

    @abstractmethod
    def mixing_components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        """Return parameters and work of the first sublayer, ``blocks.{layer_index}.mixing``."""

    def has_tokens_first(self, config: ModelConfig) -> bool:
        """Return whether the experts of tokens precede the first sublayer."""
        return False

    def mixing_activations(self, config: ModelConfig) -> float:
        """Return how many numbers the first sublayer keeps, as :meth:`activations_per_position`."""
        return super().activations_per_position(config)

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        mixing = self.mixing(config, layer_index, ranks)
        if not isinstance(mixing, nn.Module):
            raise UserError(
                f"layer {layer_index}: mixing() of the block returned a {type(mixing).__name__}, not a module"
            )
        norm = nn.Identity() if config.router_kind.experts_as_in_base else nn.LayerNorm(config.embed_dim)
        token_moe = feed_forward_moe(config, layer_index, ranks)
        return SparseBlock(mixing, token_moe, norm, config.tmoe_dropout, self.has_tokens_first(config))

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        yield from router_costs(config, layer_index)
        yield from self.mixing_components(config, layer_index, num_tokens)
        yield _token_experts_costs(config, layer_index)

    def activations_per_position(self, config: ModelConfig) -> float:
        dropouts = dropout_keeps(config) + dropout_keeps(config, config.tmoe_dropout)
        return self.mixing_activations(config) + _token_experts_keep(config) + dropouts


def feed_forward_moe(config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> TokenMoE:
    """Build the tMoE: feed-forward experts over tokens, those of this rank; by default all experts."""
    ranks, name = ranks or one_process(config.num_experts), f"layer {layer_index} (tMoE)"
    experts = FeedForwardExperts(
        config.embed_dim,
        config.ffn_dim,
        ranks.layout.expert_ids,
        config.activation,
        as_in_base=config.router_kind.experts_as_in_base,
    )
    shuffle = None
    if config.router_kind.mixes_ranks(config) and ranks.experts.size > 1:
        shuffle = TokenShuffle(ranks.experts, ranks.layout, name)
    router = config.router_kind.build(config.for_router(layer_index))
    return TokenMoE(router, experts, name, token_dispatcher(ranks, name), shuffle)


def token_dispatcher(ranks: Ranks, name: str) -> TokenDispatcher:
    """Build the dispatcher of a layer's tokens. A rank that holds all experts sends nothing."""
    if ranks.experts.size == 1:
        return LocalDispatcher()
    return TokenExchange(ranks.experts, ranks.layout, name)


def router_costs(config: ModelConfig, layer: int) -> Iterator[Component]:
    """Yield the costs of a block's router; nothing if it has no parameters and computes nothing."""
    kind = config.router_kind
    num_parameters, flops = kind.num_parameters(config), kind.flops_per_token(config)
    if num_parameters or flops:
        name = f"blocks.{layer}.token_moe.router"
        yield Component(name, layer, ROUTER, other_params=num_parameters, work={ROUTER: flops})


def _token_experts_costs(config: ModelConfig, layer: int) -> Component:
    """Return the costs of feed-forward experts of tokens, with one norm per expert (as in BASE) or one for all."""
    H, F, E = config.embed_dim, config.ffn_dim, config.num_experts
    own_norm = config.router_kind.experts_as_in_base
    return Component(
        f"blocks.{layer}",
        layer,
        TOKEN_EXPERTS,
        expert_params=own_norm * 2 * H + linear_parameters(H, F) + linear_parameters(F, H),
        num_experts=E,
        other_params=(not own_norm) * 2 * H,
        work={} if own_norm else {NORMS: LAYER_NORM_FLOPS * H},
        flops_per_assignment=own_norm * LAYER_NORM_FLOPS * H + 2 * H * F,
        assignments_per_token=min(config.experts_per_token, E),
    )


def _token_experts_keep(config: ModelConfig) -> float:
    """Return how many numbers the tMoE and its router keep per position."""
    # for each choice, the inputs of the expert and of its activation
    kept = config.experts_per_token * (config.embed_dim + config.ffn_dim)
    if not config.router_kind.experts_as_in_base:
        kept += config.embed_dim + LAYER_NORM_KEEPS  # input of the preceding norm
    return kept + config.router_kind.activations_per_position(config)
