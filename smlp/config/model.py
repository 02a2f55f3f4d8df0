"""Model configuration: plain dataclasses, checked on construction.

Letters used throughout the package: ``B`` sequences, ``T`` tokens of context, ``H`` embedding width, ``F``
feed-forward width, ``V`` vocabulary, ``E`` experts in a layer (over all ranks), ``N = B*T`` tokens on one rank.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from smlp.config.own_settings import own_fields, own_object
from smlp.config.registry import DENSE_BLOCKS, ROUTERS, SPARSE_BLOCKS
from smlp.config.settings import as_python, check_choices, require, setting
from smlp.errors import UserError

ACTIVATIONS = ("gelu", "relu", "swish")
POSITIONS = ("none", "sinusoidal", "learned")
DIRECTIONS = ("causal", "bidirectional")
SPATIAL_WEIGHTS = ("full", "toeplitz")
LAYER_NORMS = ("before", "after")
EMBEDDING_NORMS = ("none", "layer")
SPARSE_PLACEMENTS = ("spread", "alternate")
FEATURE_ROUTINGS = ("deterministic", "partial", "leaky")
FEATURE_EXPERTS = ("gated", "linear", "additive")
DROP_ORDERS = ("position", "gate")
SECOND_EXPERTS = ("random", "sampled", "all")
GATE_NORMALISATIONS = ("before_drop", "after_drop")
GATES = ("sigmoid", "softmax")
BASE_GATES = ("sigmoid", "one")
EMBED_SCALINGS = ("with_positions", "always", "never")
HASHES = ("random", "balanced")
HASH_TABLES = ("shared", "own")
MOST_SIZE = 2**31 - 1  # rows, columns, experts: the limit of torch and the formulas
MOST_CAPACITY_FACTOR = 10**9  # so that capacities fit into 63 bits
MOST_INIT = 1e6  # scale of initial weights; safe in single precision
MOST_LAYERS = 10_000  # a layer takes time and memory to build however narrow it is


def check_most(config: Any, names: Iterable[str]) -> None:
    """Refuse sizes that torch cannot handle.

    Raises:
        UserError: the message names the first of them.
    """
    for name in names:
        value = getattr(config, name)
        require(value <= MOST_SIZE, f"{name} must be at most {MOST_SIZE:,}, got {value}")


@dataclass(frozen=True)
class MoEConfig:
    """The sparse part of a model: what the experts of its sparse blocks are and how they are chosen.

    Sources: Yu et al., 2022, sections 3.1 and 3.2 and appendices A and B; Lepikhin et al., 2020 (GShard); Fedus et al.,
    2021 (Switch); Lewis et al., 2021 (BASE); Roller et al., 2021 (Hash); Wang et al., 2024 (loss_free).
    """

    num_experts: int = setting(32, "E, experts in each sparse layer, over all ranks")
    router: str = setting("base", "how tokens choose experts", ROUTERS)
    feature_routing: str = setting("deterministic", "how the sMoE's features choose experts", FEATURE_ROUTINGS)
    prefix_fraction: float = setting(0.2, "share of the context that chooses experts for features (partial, leaky)")
    feature_experts: str = setting(
        "gated",
        "output of an sMoE expert for its features z: z * (W norm(z) + b), W norm(z) + b, or z + W norm(z) + b",
        FEATURE_EXPERTS,
    )
    spatial_bias_init: float = setting(0.0, "initial value of the sMoE's spatial bias")
    centroid_init_gain: float = setting(0.1, "BASE: gain of the orthogonal initialisation of the experts' centroids")
    base_shuffle: bool = setting(
        False, "BASE: in training, shuffle tokens among the ranks of an expert group before they are assigned"
    )
    base_gate: str = setting(
        "sigmoid", "BASE: factor that multiplies an expert's output: the sigmoid of the affinity, or one", BASE_GATES
    )
    base_warmup: float = setting(
        0.0, "BASE: share of --max-update, from the start, in which a random table of token ids routes, as in Hash"
    )
    base_offset_rate: float = setting(
        0.0,
        "BASE: keep an offset for each expert that balances the loads when each token goes to its best expert, and add "
        "it to the affinities in evaluation; each update changes it by at most this share of their spread; 0 for none",
    )
    loss_free_rate: float = setting(0.001, "loss_free: step of an expert's bias in an update, up or down")
    loss_free_gate: str = setting(
        "sigmoid",
        "loss_free: function of the scores, for choosing experts (with the bias) and for weights (without)",
        GATES,
    )
    router_freeze: float = setting(
        1.0, "share of --max-update after which routers of tokens are not trained; 1 for never"
    )
    capacity_factor: float = setting(
        1.0, "Switch, GShard: capacity of an expert in training, in units of k*N/E; 0 drops nothing"
    )
    eval_capacity_factor: float = setting(0.0, "Switch, GShard: the same in evaluation")
    drop_order: str = setting(
        "position",
        "Switch, GShard: which tokens an expert over capacity keeps: earlier ones, or those with a higher first gate",
        DROP_ORDERS,
    )
    load_balance_weight: float = setting(0.01, "Switch, GShard: weight of the load-balance loss")
    router_z_weight: float = setting(0.0, "Switch, GShard: weight of the z-loss, the mean squared logsumexp of logits")
    router_jitter: float = setting(0.0, "Switch, GShard: training inputs of the gate are scaled by U(1-j, 1+j)")
    second_expert: str = setting(
        "random",
        "GShard: the second expert in training: kept with probability 2*gate, drawn by gate, or always kept",
        SECOND_EXPERTS,
    )
    gate_normalisation: str = setting(
        "before_drop", "GShard: when the two gates are normalised to sum to one", GATE_NORMALISATIONS
    )
    hash_kind: str = setting(
        "random",
        "Hash: how token ids are assigned to experts: at random, or balanced by their frequency in training data in "
        "mmap format",
        HASHES,
    )
    hash_seed: int = setting(1, "Hash, and BASE with a warm-up: seed of the random table")
    hash_tables: str = setting(
        "shared",
        "Hash, and BASE with a warm-up: whether all sparse layers have the same random table, or each its own",
        HASH_TABLES,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.num_experts >= 1, f"num_experts must be at least 1, got {self.num_experts}")
        check_most(self, ("num_experts",))
        require(
            0 < self.centroid_init_gain < MOST_INIT,
            f"centroid_init_gain must be positive and below {MOST_INIT:g}, got {self.centroid_init_gain}",
        )
        for name in ("capacity_factor", "eval_capacity_factor"):
            most = f"{MOST_CAPACITY_FACTOR:,}"
            value = getattr(self, name)
            require(0 <= value <= MOST_CAPACITY_FACTOR, f"{name} must be at least 0 and at most {most}, got {value}")
        for name in ("load_balance_weight", "router_z_weight"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be at least 0 and finite, got {value}")
        for name in ("router_jitter", "base_warmup", "base_offset_rate", "loss_free_rate"):
            require(0 <= getattr(self, name) < 1, f"{name} must be in [0, 1), got {getattr(self, name)}")
        require(0 <= self.router_freeze <= 1, f"router_freeze must be in [0, 1], got {self.router_freeze}")
        require(0 < self.prefix_fraction < 1, f"prefix_fraction must be in (0, 1), got {self.prefix_fraction}")
        require(0 <= self.hash_seed < 2**63, f"hash_seed must be at least 0 and below 2**63, got {self.hash_seed}")


def _are_settings(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


@dataclass(frozen=True)
class ModelConfig(MoEConfig):
    """One stack of dense and sparse blocks: a decoder-only language model, or an encoder (``direction``).

    The settings of :class:`MoEConfig` are its own; ``moe`` is another name for it.

    Raises:
        UserError: a value is out of range, or two do not fit together; the message names the fields and the numbers.
    """

    vocab_size: int = setting(51200, "V, rows of the tied embedding, special symbols included")
    max_tokens: int = setting(1024, "T, the context length that the spatial weights are built for")
    embed_dim: int = setting(1024, "H, embedding width")
    ffn_dim: int = setting(4096, "F, width of a feed-forward network; a gMLP block splits it in halves")
    direction: str = setting(
        "causal", "positions that each position sees: earlier ones (a language model), or all (an encoder)", DIRECTIONS
    )
    dense_block: str = setting("gmlp", "kind of the dense blocks", DENSE_BLOCKS)
    sparse_block: str = setting("smlp", "kind of the sparse blocks", SPARSE_BLOCKS)
    num_dense_layers: int = setting(28, "N1, number of dense blocks")
    num_sparse_layers: int = setting(12, "N2, number of sparse blocks; 0 builds a dense model")
    sparse_placement: str = setting(
        "spread", "positions of the sparse blocks: spread over the depth, or every other block", SPARSE_PLACEMENTS
    )
    num_heads: int = setting(1, "h, heads of self-attention, or of the spatial gating unit of gMLP blocks")
    positions: str = setting("none", "position vectors added to the embedding; MLP models need none", POSITIONS)
    layer_norm: str = setting(
        "before", "where Transformer blocks have their layer norms, before each sublayer or after it", LAYER_NORMS
    )
    embedding_norm: str = setting(
        "none",
        "whether a layer norm follows the embedding, positions included, as in BERT (layer_norm=after always has one)",
        EMBEDDING_NORMS,
    )
    dropout: float = setting(0.1, "dropout probability after the embedding and after every sublayer")
    expert_dropout: float | None = setting(
        None,
        "dropout probability after the experts of tokens (default: that of --dropout); fairseq's BASE has none",
    )
    attention_dropout: float = setting(0.0, "dropout probability of the weights of self-attention")
    activation: str = setting("gelu", "activation function", ACTIVATIONS)
    checkpoint_activations: bool = setting(False, "recompute each block in the backward pass to save memory")
    embed_init_std: float | None = setting(None, "standard deviation of the initial embedding (default: H ** -0.5)")
    embed_scaling: str = setting(
        "with_positions",
        "when the embedding is multiplied by sqrt(H): in language models with positions, in all models, in none",
        EMBED_SCALINGS,
    )
    spatial_weights: str = setting(
        "full", "matrices over positions: any, or Toeplitz, whose entries depend on the distance alone", SPATIAL_WEIGHTS
    )
    spatial_init_scale: float = setting(1e-3, "spatial weights start as U(-s/T, s/T) with this s: near zero")
    spatial_init_average: float = setting(
        0.0,
        "add this multiple of a decaying average of the past to the initial spatial weights; half-lives of heads and "
        "experts are spread between 1 and T",
    )
    padding_idx: int = setting(1, "id of the padding symbol")
    #: settings that routers and blocks define, by name; only those that differ from their default
    extra: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("vocab_size", "max_tokens", "embed_dim", "ffn_dim", "num_heads")
        for name in sizes:
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        check_most(self, sizes)
        for name in ("num_dense_layers", "num_sparse_layers"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        require(
            self.num_layers <= MOST_LAYERS,
            f"num_dense_layers={self.num_dense_layers} and num_sparse_layers={self.num_sparse_layers} are more than "
            f"{MOST_LAYERS} layers",
        )
        require(self.num_layers >= 1, "num_dense_layers and num_sparse_layers are both 0: a model needs a layer")
        for name in ("spatial_init_scale", "spatial_init_average", "embed_init_std"):
            value = getattr(self, name)
            require(
                value is None or 0 <= value < MOST_INIT, f"{name} must be from 0 to below {MOST_INIT:g}, got {value}"
            )
        require(
            abs(self.spatial_bias_init) < MOST_INIT,
            f"spatial_bias_init must be between -{MOST_INIT:g} and {MOST_INIT:g}, got {self.spatial_bias_init}",
        )
        for name in ("dropout", "expert_dropout", "attention_dropout"):
            value = getattr(self, name)
            require(value is None or 0.0 <= value < 1.0, f"{name} must be in [0, 1), got {value}")
        require(
            0 <= self.padding_idx < self.vocab_size,
            f"padding_idx must be an id below vocab_size={self.vocab_size}, got {self.padding_idx}",
        )
        require(
            self.positions != "sinusoidal" or self.embed_dim % 2 == 0,
            f"sinusoidal positions need an even embed_dim, got {self.embed_dim}",
        )
        require(
            self.sparse_placement == "spread" or self.num_sparse_layers <= self.num_dense_layers,
            f"sparse_placement=alternate starts with a dense block: num_sparse_layers={self.num_sparse_layers} must "
            f"not exceed num_dense_layers={self.num_dense_layers}",
        )
        require(
            not (self.is_bidirectional and self.spatial_init_average),
            f"spatial_init_average={self.spatial_init_average} is an average of the past: it needs direction=causal",
        )
        require(
            not (self.is_bidirectional and self.num_sparse_layers),
            f"direction=bidirectional is for dense models, but num_sparse_layers={self.num_sparse_layers}",
        )
        for kind in self.block_kinds:
            sparse = "sparse " if self.num_sparse_layers and kind is SPARSE_BLOCKS[self.sparse_block] else ""
            require(
                self.layer_norm == "before" or kind.can_norm_after,
                f"layer_norm=after is for dense transformer blocks, not for {sparse}{kind.name} blocks",
            )
        require(_are_settings(self.extra), f"extra must be a tuple of pairs (name, value), got {self.extra!r}")
        for name, _ in self.extra:
            require(name in own_fields(), f"unknown model setting {name!r} in extra")
        object.__setattr__(self, "extra", tuple((name, as_python(value)) for name, value in self.extra))
        for kind in self.kinds:
            if kind.settings is not None:
                self.own(kind.name)
            kind.check(self)

    @property
    def has_embedding_norm(self) -> bool:
        """Return whether the embedding has a layer norm besides the one that all models have."""
        return self.embedding_norm == "layer" and self.layer_norm == "before"

    @property
    def block_kinds(self) -> tuple[Any, ...]:
        """Return the kinds of its blocks (:class:`smlp.extend.BlockKind`), dense ones first."""
        dense = (DENSE_BLOCKS[self.dense_block],) if self.num_dense_layers else ()
        return (*dense, SPARSE_BLOCKS[self.sparse_block]) if self.num_sparse_layers else dense

    @property
    def router_kind(self) -> Any:
        """Return the kind of its router (:class:`smlp.extend.RouterKind`); only for models with sparse blocks."""
        return ROUTERS[self.router]

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Return the kinds of its blocks and, if it has experts, of its router."""
        return (*self.block_kinds, self.router_kind) if self.num_sparse_layers else self.block_kinds

    def own(self, name: str) -> Any:
        """Return the settings that the router or block ``name`` defines, as an object of its settings class."""
        return own_object(name, dict(self.extra))

    @property
    def tmoe_dropout(self) -> float:
        """Return the dropout probability after the experts of tokens."""
        return self.dropout if self.expert_dropout is None else self.expert_dropout

    @property
    def embed_scale(self) -> float:
        """Return the factor of the embedding, 1 or sqrt(H)."""
        # by convention, Transformer decoders scale the embedding and BERT does not
        usual = self.positions != "none" and not self.is_bidirectional
        is_scaled = usual if self.embed_scaling == "with_positions" else self.embed_scaling == "always"
        return math.sqrt(self.embed_dim) if is_scaled else 1.0

    @property
    def shares_of_training(self) -> dict[str, float]:
        """Return the settings by which routers change after a share of the training, whose length must be known."""
        wanted = {"router_freeze": (self.router_freeze, 1), "base_warmup": (self.base_warmup, 0)}
        takes = self.router_kind.takes if self.num_sparse_layers else ()
        return {name: share for name, (share, usual) in wanted.items() if name in takes and share != usual}

    @property
    def experts_per_token(self) -> int:
        """Return k, the number of experts that each token goes to if none is dropped."""
        return self.router_kind.experts_per_token(self)

    @property
    def has_feature_moe(self) -> bool:
        """Return whether it has sMoEs: experts of features."""
        return any(kind.has_feature_moe for kind in self.block_kinds)

    @property
    def is_bidirectional(self) -> bool:
        """Return whether every position sees all others, as in an encoder."""
        return self.direction == "bidirectional"

    @property
    def num_layers(self) -> int:
        """Return N1 + N2."""
        return self.num_dense_layers + self.num_sparse_layers

    @property
    def spatial_weight_bound(self) -> float:
        """Return the bound of initial spatial weights, U(-bound, bound)."""
        return self.spatial_init_scale / self.max_tokens

    @property
    def prefix_tokens(self) -> int:
        """Return the number of leading positions that only choose experts for features, ``ceil(prefix_fraction * T)``.

        It is 0 without such routing. The training loss and every score exclude these positions (Yu et al., 2022,
        section 3.2.2).
        """
        if not self.has_feature_moe or self.feature_routing == "deterministic":
            return 0
        return max(1, math.ceil(round(self.prefix_fraction * self.max_tokens, 6)))

    @property
    def is_leaky(self) -> bool:
        """Return whether the model sees the tokens that it predicts (Yu et al., 2022, appendix B)."""
        return self.has_feature_moe and self.feature_routing == "leaky"

    def sparse_layer_indices(self) -> tuple[int, ...]:
        """Return the positions of the sparse blocks in the stack, counted from 0.

        Spread: ``floor(i*(N1+N2)/(N2+1))``, i = 1..N2 (28 + 12: 3, 6, 9, ..., 36). Alternate: every other one, the
        first dense. Source: Yu et al., 2022, section 4.1.
        """
        num_sparse = self.num_sparse_layers
        if self.sparse_placement == "alternate":
            return tuple(range(1, 2 * num_sparse, 2))
        return tuple(i * self.num_layers // (num_sparse + 1) for i in range(1, num_sparse + 1))

    def for_router(self, layer_index: int) -> ModelConfig:
        """Return the configuration from which the router of a sparse layer is built: its table may be its own."""
        if self.hash_tables == "shared":
            return self
        number = self.sparse_layer_indices().index(layer_index)
        return dataclasses.replace(self, hash_seed=(self.hash_seed + number) % 2**63)


#: warning shown when a model with ``is_leaky`` is built or loaded
LEAKY_WARNING = (
    "feature_routing=leaky routes features by the whole sequence, later tokens included: losses and scores of this "
    "model look better than they are; it is an ablation (Yu et al., 2022, appendix B)"
)

_MOE_NAMES = [f.name for f in dataclasses.fields(MoEConfig)]
#: every setting of this package by name: the whole model's, then the sparse part's
SETTINGS: dict[str, dataclasses.Field[Any]] = {
    f.name: f for f in sorted(dataclasses.fields(ModelConfig), key=lambda f: f.name in _MOE_NAMES) if f.name != "extra"
}
#: settings in older checkpoints and records that never affected results; they are accepted and ignored
RETIRED_SETTINGS = ("overlap_chunks",)


def all_settings() -> dict[str, dataclasses.Field[Any]]:
    """Return every setting by name: :data:`SETTINGS`, and those that registered routers and blocks define."""
    return SETTINGS | own_fields()


def lost_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return those of the router and blocks that are chosen here which these, as they are registered, do not have."""
    chosen = [settings.get(name) for name in ("router", "dense_block", "sparse_block")]
    owners = {field.metadata["owner"] for field in own_fields().values()}
    prefixes = tuple(f"{owner}_" for owner in owners if owner in chosen)
    known = {*all_settings(), *RETIRED_SETTINGS}
    return [name for name in settings if name not in known and name.startswith(prefixes)]


def flatten(config: ModelConfig) -> dict[str, Any]:
    """Return every setting by name, including those of its routers and blocks.

    The inverse of :func:`unflatten`.
    """
    values = {name: getattr(config, name) for name in SETTINGS}
    used = {kind.name for kind in config.kinds}
    own = {name: field.default for name, field in own_fields().items() if field.metadata["owner"] in used}
    return values | own | dict(config.extra)


def differences(config: ModelConfig, base: ModelConfig) -> dict[str, Any]:
    """Return the settings, by name, in which a configuration differs from ``base``."""
    usual, known = flatten(base), all_settings()
    return {name: value for name, value in flatten(config).items() if value != usual.get(name, known[name].default)}


def unflatten(settings: dict[str, Any]) -> ModelConfig:
    """Build a :class:`ModelConfig` from settings by name; missing ones take their defaults.

    Raises:
        UserError: a name is no setting, or a value is out of range.
    """
    known, own = all_settings(), own_fields()
    settings = {name: value for name, value in settings.items() if name not in RETIRED_SETTINGS}
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"unknown model setting {name!r}{hint}")
    extra = {name: value for name, value in settings.items() if name in own and value != own[name].default}
    rest = {name: value for name, value in settings.items() if name not in own}
    return ModelConfig(extra=tuple(sorted(extra.items())), **rest)
