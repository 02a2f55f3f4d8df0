"""The routers of the paper's comparison."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from smlp.config import ModelConfig
from smlp.kinds.registration import register_router
from smlp.kinds.router import RouterKind

if TYPE_CHECKING:
    from torch import Tensor

    from smlp.moe.routers import BalancedRouter, HashRouter, TopKRouter

_LOSS_WEIGHTS = ("load_balance_weight", "router_z_weight")


class _Scored(RouterKind):
    """Scores are products of tokens with one vector for each expert."""

    def num_parameters(self, config: ModelConfig) -> int:
        return config.moe.num_experts * config.embed_dim

    def flops_per_token(self, config: ModelConfig) -> float:
        return config.moe.num_experts * config.embed_dim


@register_router("base")
class Base(_Scored):
    """Balanced assignment (Lewis et al., 2021; smlp.txt, section 3.1)."""

    takes = ("centroid_init_gain", "base_shuffle")
    experts_as_in_base = True
    title = "BASE"

    def build(self, config: ModelConfig) -> BalancedRouter:
        from smlp.moe.routers import BalancedRouter

        moe = config.moe
        return BalancedRouter(config.embed_dim, moe.num_experts, moe.centroid_init_gain, moe.base_shuffle)

    def activations_per_position(self, config: ModelConfig) -> float:
        return 2 * config.embed_dim  # what is routed; outputs, which weights multiply

    def mixes_ranks(self, config: ModelConfig) -> bool:
        return config.moe.base_shuffle

    def affinities(self, logits_NE: Tensor) -> Tensor:
        return logits_NE.sigmoid()


@register_router("switch")
class Switch(_Scored):
    """The best expert by a softmax gate (Fedus et al., 2021)."""

    takes = ("capacity_factor", "eval_capacity_factor", "drop_order", *_LOSS_WEIGHTS, "router_jitter")
    title = "Switch"

    def build(self, config: ModelConfig) -> TopKRouter:
        from smlp.moe.routers import TopKRouter, TopKSettings

        own = [field.name for field in dataclasses.fields(TopKSettings) if field.name != "num_choices"]
        same_name = {name: getattr(config.moe, name) for name in own}
        settings = TopKSettings(num_choices=config.experts_per_token, **same_name)
        return TopKRouter(config.embed_dim, config.moe.num_experts, settings)

    def auxiliary_loss(self, config: ModelConfig) -> str | None:
        weights = {name: getattr(config.moe, name) for name in _LOSS_WEIGHTS}
        return next((f"{name}={weight}" for name, weight in weights.items() if weight > 0), None)


@register_router("gshard")
class GShard(Switch):
    """The two best (Lepikhin et al., 2021)."""

    takes = (*Switch.takes, "second_expert", "gate_normalisation")
    title = "GShard"

    def experts_per_token(self, config: ModelConfig) -> int:
        return 2


@register_router("hash")
class Hash(RouterKind):
    """A table from the token's id (Roller et al., 2021)."""

    takes = ("hash_kind", "hash_seed")
    title = "Hash"

    def build(self, config: ModelConfig) -> HashRouter:
        from smlp.moe.routers import HashRouter

        seed = None if self.needs_token_counts(config) else config.moe.hash_seed
        return HashRouter(config.vocab_size, config.moe.num_experts, seed)

    def num_parameters(self, config: ModelConfig) -> int:
        return 0

    def flops_per_token(self, config: ModelConfig) -> float:
        return 0

    def activations_per_position(self, config: ModelConfig) -> float:
        return 0

    def needs_token_counts(self, config: ModelConfig) -> bool:
        return config.moe.hash_kind == "balanced"
