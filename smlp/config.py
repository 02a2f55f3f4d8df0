"""Model configuration: plain dataclasses, checked on construction.

Letters used throughout the package: ``B`` sequences, ``T`` tokens of context, ``H`` embedding width, ``F``
feed-forward width, ``V`` vocabulary, ``E`` experts in a layer (over all ranks), ``N = B*T`` tokens on one rank.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from typing import Any

from smlp.errors import UserError

ACTIVATIONS = ("gelu", "relu", "swish")
POSITIONS = ("none", "sinusoidal", "learned")
DENSE_BLOCKS = ("gmlp", "transformer")
SPARSE_BLOCKS = ("smlp", "transformer", "gmlp_moe")
SPARSE_PLACEMENTS = ("spread", "alternate")
ROUTERS = ("base", "switch", "gshard", "hash")
FEATURE_ROUTINGS = ("deterministic", "partial", "leaky")
DROP_ORDERS = ("position", "gate")
SECOND_EXPERTS = ("random", "sampled", "all")
GATE_NORMALISATIONS = ("before_drop", "after_drop")
HASHES = ("random", "balanced")


def _setting(default: Any, help_text: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field with its documentation, which command lines show as well, and the values it may take."""
    if choices is not None:
        help_text = f"{help_text}: {', '.join(choices)}"
    return field(default=default, metadata={"help": help_text, "allowed": choices})


def _check_choices(config: Any) -> None:
    for setting in dataclasses.fields(config):
        allowed, value = setting.metadata.get("allowed"), getattr(config, setting.name)
        _require(
            allowed is None or value in allowed,
            f"{setting.name} must be one of {', '.join(allowed or ())}, got {value!r}",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class MoEConfig:
    """The sparse part of a model: what the experts of its sparse blocks are and how they are chosen.

    Sources: smlp.txt, sections 3.1 and 3.2 and appendices A and B; Lepikhin et al., 2020 (GShard); Fedus et al., 2021
    (Switch); Lewis et al., 2021 (BASE); Roller et al., 2021 (Hash).
    """

    num_experts: int = _setting(32, "E, experts in each sparse layer, over all ranks")
    router: str = _setting("base", "how tokens choose experts", ROUTERS)
    feature_routing: str = _setting("deterministic", "how the sMoE's features choose experts", FEATURE_ROUTINGS)
    prefix_fraction: float = _setting(0.2, "share of the context that chooses experts for features (partial, leaky)")
    spatial_bias_init: float = _setting(0.0, "initial value of the sMoE's spatial bias")
    centroid_init_gain: float = _setting(0.1, "BASE: gain of the orthogonal initialisation of the experts' centroids")
    base_shuffle: bool = _setting(
        False, "BASE: in training, mix the tokens of the ranks of an expert group before they are assigned"
    )
    capacity_factor: float = _setting(
        1.0, "Switch, GShard: capacity of an expert in training, in units of k*N/E; 0 drops nothing"
    )
    eval_capacity_factor: float = _setting(0.0, "Switch, GShard: the same in evaluation")
    drop_order: str = _setting(
        "position",
        "Switch, GShard: who stays at an expert over its capacity: earlier tokens, or those with the higher first gate",
        DROP_ORDERS,
    )
    load_balance_weight: float = _setting(0.01, "Switch, GShard: weight of the load-balance loss")
    router_z_weight: float = _setting(0.0, "Switch, GShard: weight of the z-loss, the mean squared logsumexp of logits")
    router_jitter: float = _setting(0.0, "Switch, GShard: training inputs of the gate are scaled by U(1-j, 1+j)")
    second_expert: str = _setting(
        "random",
        "GShard: the second expert in training; kept with chance 2*gate, drawn by gate, or kept",
        SECOND_EXPERTS,
    )
    gate_normalisation: str = _setting(
        "before_drop", "GShard: when the two gates are made to sum to one", GATE_NORMALISATIONS
    )
    hash_kind: str = _setting(
        "random",
        "Hash: experts of token ids, drawn, or balanced by their frequency in training data in mmap format",
        HASHES,
    )
    hash_seed: int = _setting(1, "Hash: seed of the random table")
    overlap_chunks: int = _setting(
        1,
        "cut the experts of each rank into so many chunks, at most as many as there are, so that one travels while "
        "another is computed; for experts spread over ranks; 1 is off; see smlp costs (nothing was gained on CPUs)",
    )

    def __post_init__(self) -> None:
        _check_choices(self)
        _require(self.num_experts >= 1, f"num_experts must be at least 1, got {self.num_experts}")
        _require(self.centroid_init_gain > 0, f"centroid_init_gain must be positive, got {self.centroid_init_gain}")
        for name in ("capacity_factor", "eval_capacity_factor", "load_balance_weight", "router_z_weight"):
            _require(0 <= getattr(self, name) < math.inf, f"{name} must be at least 0, got {getattr(self, name)}")
        _require(0 <= self.router_jitter < 1, f"router_jitter must be in [0, 1), got {self.router_jitter}")
        _require(0 < self.prefix_fraction < 1, f"prefix_fraction must be in (0, 1), got {self.prefix_fraction}")
        _require(self.hash_seed >= 0, f"hash_seed must be at least 0, got {self.hash_seed}")
        _require(self.overlap_chunks >= 1, f"overlap_chunks must be at least 1, got {self.overlap_chunks}")

    @property
    def experts_per_token(self) -> int:
        """k: 2 for GShard, 1 for the others."""
        return 2 if self.router == "gshard" else 1


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model: one stack of dense and sparse blocks.

    Raises:
        UserError: a value is out of range, or two do not fit together; the message names the fields and the numbers.
    """

    vocab_size: int = _setting(51200, "V, rows of the tied embedding, special symbols included")
    max_tokens: int = _setting(1024, "T, the context length that the spatial weights are built for")
    embed_dim: int = _setting(1024, "H, embedding width")
    ffn_dim: int = _setting(4096, "F, width of a feed-forward network; a gMLP block splits it in halves")
    dense_block: str = _setting("gmlp", "what the dense blocks are", DENSE_BLOCKS)
    sparse_block: str = _setting("smlp", "what the sparse blocks are", SPARSE_BLOCKS)
    num_dense_layers: int = _setting(28, "N1, number of dense blocks")
    num_sparse_layers: int = _setting(12, "N2, number of sparse blocks; 0 builds a dense model")
    sparse_placement: str = _setting(
        "spread", "where the sparse blocks stand, over the depth or every other block", SPARSE_PLACEMENTS
    )
    num_heads: int = _setting(1, "h, heads of self-attention, or of the spatial gating unit of gMLP blocks")
    positions: str = _setting("none", "position vectors added to the embedding; MLP models need none", POSITIONS)
    dropout: float = _setting(0.1, "dropout probability after the embedding and after every sublayer")
    activation: str = _setting("gelu", "activation function", ACTIVATIONS)
    checkpoint_activations: bool = _setting(False, "recompute each block in the backward pass to save memory")
    embed_init_std: float | None = _setting(None, "standard deviation of the initial embedding (default: H ** -0.5)")
    spatial_init_scale: float = _setting(1e-3, "spatial weights start as U(-s/T, s/T) with this s: near zero")
    padding_idx: int = _setting(1, "id of the padding symbol")
    moe: MoEConfig = field(default_factory=MoEConfig)

    def __post_init__(self) -> None:
        _check_choices(self)
        for name in ("vocab_size", "max_tokens", "embed_dim", "ffn_dim", "num_heads"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_dense_layers", "num_sparse_layers", "spatial_init_scale"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        _require(self.num_layers >= 1, "num_dense_layers and num_sparse_layers are both 0: a model needs a layer")
        _require(0.0 <= self.dropout < 1.0, f"dropout must be in [0, 1), got {self.dropout}")
        _require(
            0 <= self.padding_idx < self.vocab_size,
            f"padding_idx must be an id below vocab_size={self.vocab_size}, got {self.padding_idx}",
        )
        _require(
            self.positions != "sinusoidal" or self.embed_dim % 2 == 0,
            f"sinusoidal positions need an even embed_dim, got {self.embed_dim}",
        )
        _require(
            self.sparse_placement == "spread" or self.num_sparse_layers <= self.num_dense_layers,
            f"sparse_placement=alternate starts with a dense block: num_sparse_layers={self.num_sparse_layers} must "
            f"not exceed num_dense_layers={self.num_dense_layers}",
        )
        if self.uses("gmlp", "gmlp_moe"):
            _require(self.ffn_dim % 2 == 0, f"ffn_dim must be even to be split in halves, got {self.ffn_dim}")
            _require(
                (self.ffn_dim // 2) % self.num_heads == 0,
                f"num_heads={self.num_heads} must divide half of ffn_dim={self.ffn_dim}",
            )
        if self.uses("transformer"):
            _require(
                self.embed_dim % self.num_heads == 0,
                f"num_heads={self.num_heads} must divide embed_dim={self.embed_dim}",
            )
        if self.uses("smlp"):
            _require(
                self.embed_dim % self.moe.num_experts == 0,
                f"num_experts={self.moe.num_experts} must divide embed_dim={self.embed_dim}: "
                "the sMoE gives each expert an equal share of the features",
            )
            _require(
                self.prefix_tokens < self.max_tokens,
                f"prefix_fraction={self.moe.prefix_fraction} of max_tokens={self.max_tokens} leaves nothing to predict",
            )

    def uses(self, *blocks: str) -> bool:
        """Whether the model has blocks of one of these kinds."""
        return bool(
            (self.num_dense_layers and self.dense_block in blocks)
            or (self.num_sparse_layers and self.sparse_block in blocks)
        )

    @property
    def num_layers(self) -> int:
        """N1 + N2."""
        return self.num_dense_layers + self.num_sparse_layers

    @property
    def prefix_tokens(self) -> int:
        """Leading positions that only choose experts for features: ``ceil(prefix_fraction * T)``, or 0 without such
        routing. The training loss and every score leave them out (smlp.txt, section 3.2.2)."""
        if not self.uses("smlp") or self.moe.feature_routing == "deterministic":
            return 0
        return math.ceil(round(self.moe.prefix_fraction * self.max_tokens, 6))

    @property
    def is_leaky(self) -> bool:
        """Whether the model sees what it is to predict (smlp.txt, appendix B)."""
        return self.uses("smlp") and self.moe.feature_routing == "leaky"

    def sparse_layer_indices(self) -> tuple[int, ...]:
        """Positions of the sparse blocks in the stack, counted from 0.

        Spread: ``floor(i*(N1+N2)/(N2+1))``, i = 1..N2 (28 + 12: 3, 6, 9, ..., 36). Alternate: every other one, the
        first dense. Source: smlp.txt, section 4.1.
        """
        num_sparse = self.num_sparse_layers
        if self.sparse_placement == "alternate":
            return tuple(range(1, 2 * num_sparse, 2))
        return tuple(i * self.num_layers // (num_sparse + 1) for i in range(1, num_sparse + 1))


def _takes_part(config: ModelConfig) -> dict[str, tuple[bool, str]]:
    """For settings that only some models use: whether this one does, and if not, why."""
    moe, sparse = config.moe, config.num_sparse_layers > 0

    def of(names: str, condition: bool, reason: str) -> dict[str, tuple[bool, str]]:
        return {name: (condition, reason) for name in names.split()}

    gate = sparse and moe.router in ("switch", "gshard")
    return {
        **of(
            "num_experts router sparse_block sparse_placement overlap_chunks", sparse, "the model has no sparse layers"
        ),
        **of("feature_routing spatial_bias_init", config.uses("smlp"), "the model has no sMoE"),
        **of("prefix_fraction", config.prefix_tokens > 0, "no features are routed by a prefix"),
        **of("centroid_init_gain base_shuffle", sparse and moe.router == "base", "the router is not base"),
        **of(
            "capacity_factor eval_capacity_factor drop_order load_balance_weight router_z_weight router_jitter",
            gate,
            "the router is neither switch nor gshard",
        ),
        **of("second_expert gate_normalisation", gate and moe.router == "gshard", "the router is not gshard"),
        **of("hash_kind hash_seed", sparse and moe.router == "hash", "the router is not hash"),
        **of("spatial_init_scale", config.uses("gmlp", "smlp", "gmlp_moe"), "the model has no spatial weights"),
    }


def ignored_settings(config: ModelConfig, usual: dict[str, Any]) -> dict[str, str]:
    """Settings that somebody changed although this model does not use them, each with the reason.

    Args:
        config: of the model.
        usual: values that do not count as changed, by name; the defaults where it is silent.
    """
    values = flatten(config)
    return {
        name: reason
        for name, (used, reason) in _takes_part(config).items()
        if not used and values[name] != usual.get(name, SETTINGS[name].default)
    }


#: what to tell whoever builds or loads a model with ``is_leaky``
LEAKY_WARNING = (
    "feature_routing=leaky routes features by the whole sequence, later tokens included: losses and scores of this "
    "model look better than they are; it is an ablation (smlp.txt, appendix B)"
)

#: every setting by name: the fields of ModelConfig, then those of MoEConfig
SETTINGS: dict[str, dataclasses.Field] = {
    f.name: f for f in (*dataclasses.fields(ModelConfig), *dataclasses.fields(MoEConfig)) if f.name != "moe"
}
_MOE_NAMES = {f.name for f in dataclasses.fields(MoEConfig)}


def flatten(config: ModelConfig) -> dict[str, Any]:
    """Every setting by name, those of ``moe`` beside the others; the inverse of :func:`unflatten`."""
    return {name: getattr(config.moe if name in _MOE_NAMES else config, name) for name in SETTINGS}


def unflatten(settings: dict[str, Any]) -> ModelConfig:
    """Builds a :class:`ModelConfig` from settings by name; missing ones take their defaults.

    Raises:
        UserError: a name is no setting, or a value is out of range.
    """
    for name in settings:
        if name not in SETTINGS:
            close = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"unknown model setting {name!r}{hint}")
    moe = MoEConfig(**{name: value for name, value in settings.items() if name in _MOE_NAMES})
    return ModelConfig(moe=moe, **{name: value for name, value in settings.items() if name not in _MOE_NAMES})
