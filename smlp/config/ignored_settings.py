"""Settings that have no effect on a model."""

from __future__ import annotations

from typing import Any

from smlp.config import ModelConfig, all_settings, flatten
from smlp.config.own_settings import own_fields
from smlp.config.registry import ROUTERS

#: settings that do not affect a trained model: initial weights, and how it is computed
OF_THE_START = {
    *("embed_init_std", "spatial_init_scale", "spatial_init_average", "spatial_bias_init", "centroid_init_gain"),
    "checkpoint_activations",
}


def _takes_part(config: ModelConfig) -> dict[str, tuple[bool, str]]:
    """Return, for each setting that only some models use, whether this one does, and if not, why."""
    sparse, kinds, no_layers = config.num_sparse_layers > 0, config.kinds, "the model has no sparse layers"

    def of(names: str, condition: bool, reason: str) -> dict[str, tuple[bool, str]]:
        return {name: (condition, reason) for name in names.split()}

    takes_part = {
        **of("num_experts router sparse_block sparse_placement expert_dropout", sparse, no_layers),
        **of("num_heads", any(kind.has_heads for kind in config.block_kinds), "the model has no heads"),
        **of("feature_routing feature_experts spatial_bias_init", config.has_feature_moe, "the model has no sMoE"),
        **of(
            "attention_dropout", any(kind.attends(config) for kind in config.block_kinds), "the model has no attention"
        ),
        **of("prefix_fraction", config.prefix_tokens > 0, "no features are routed by a prefix"),
        **of(
            "spatial_weights spatial_init_scale spatial_init_average",
            any(kind.has_spatial_weights for kind in config.block_kinds),
            "the model has no spatial weights",
        ),
    }
    for name in dict.fromkeys(name for router in ROUTERS.values() for name in router.takes):
        takers = [router.name for router in ROUTERS.values() if name in router.takes]
        words = f"not {takers[0]}" if len(takers) == 1 else f"neither {', '.join(takers[:-1])} nor {takers[-1]}"
        reason = f"the router is {words}" if sparse else no_layers
        takes_part[name] = sparse and name in config.router_kind.takes, reason
    if "hash_kind" not in config.router_kind.takes and not config.base_warmup:
        for name in ("hash_seed", "hash_tables"):
            if takes_part[name][0]:
                takes_part[name] = False, "the router has no table of ids without base_warmup"
    if sparse and "hash_kind" in config.router_kind.takes and config.hash_kind == "balanced":
        takes_part["hash_seed"] = False, "the frequencies of tokens decide the table of hash_kind=balanced"
    if any(kind.keeps_sequences_whole for kind in config.block_kinds) and takes_part["base_shuffle"][0]:
        takes_part["base_shuffle"] = False, "experts of whole sequences do not take tokens of other ranks"
    used = {kind.name for kind in kinds}
    for name, setting_field in own_fields().items():
        owner = setting_field.metadata["owner"]
        takes_part[name] = owner in used, f"no router or block of the model is {owner}"
    return takes_part


def ignored_settings(config: ModelConfig, usual: dict[str, Any]) -> dict[str, str]:
    """Return the settings that somebody changed although this model does not use them, each with the reason.

    Args:
        config: of the model.
        usual: values that do not count as changed, by name; the default for a setting that it lacks.
    """
    values, known = flatten(config), all_settings()
    return {
        name: reason
        for name, (used, reason) in _takes_part(config).items()
        if not used and values.get(name, known[name].default) != usual.get(name, known[name].default)
    }
