"""Model configuration: plain dataclasses, checked on construction.

Letters used throughout the package: ``B`` sequences, ``T`` tokens of context, ``H`` embedding width, ``F``
feed-forward width, ``V`` vocabulary, ``E`` experts in a layer (over all ranks), ``N = B*T`` tokens on one rank.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from smlp.errors import UserError

ACTIVATIONS = ("gelu", "relu", "swish")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class MoEConfig:
    """The sparse part of a model: what the experts of its sparse blocks are and how they are chosen.

    Source: smlp.txt, sections 3.1 and 3.2.1.
    """

    #: E, experts in each sparse layer, over all ranks
    num_experts: int = 32
    #: initial value of the sMoE's spatial bias ``b`` (see docs/models.md: no projection follows, so 0 beats 1)
    spatial_bias_init: float = 0.0
    #: gain of the orthogonal initialisation of the tMoE's expert centroids (BASE uses 0.1)
    centroid_init_gain: float = 0.1

    def __post_init__(self) -> None:
        _require(self.num_experts >= 1, f"num_experts must be at least 1, got {self.num_experts}")
        _require(self.centroid_init_gain > 0, f"centroid_init_gain must be positive, got {self.centroid_init_gain}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model made of dense (gMLP) and sparse (sMoE + tMoE) blocks.

    Raises:
        UserError: a value is out of range, or E does not divide H; the message names the field and the numbers.
    """

    #: V, rows of the (tied) embedding, padding and other special symbols included
    vocab_size: int = 51200
    #: T, the context length that the spatial weights are built for
    max_tokens: int = 1024
    #: H
    embed_dim: int = 1024
    #: F; a gMLP block splits it in halves, an expert of the tMoE uses all of it
    ffn_dim: int = 4096
    #: N1, number of gMLP blocks
    num_dense_layers: int = 28
    #: N2, number of sparse blocks; 0 builds a plain gMLP
    num_sparse_layers: int = 12
    #: h, heads of the spatial gating unit of the gMLP blocks
    num_heads: int = 1
    #: dropout probability after the embedding and after every sublayer
    dropout: float = 0.1
    #: "gelu", "relu" or "swish"
    activation: str = "gelu"
    #: add fixed sinusoidal positions to the embedding; MLP models do not need them
    sinusoidal_positions: bool = False
    #: recompute each block in the backward pass instead of keeping its activations
    checkpoint_activations: bool = False
    #: standard deviation of the embedding's initial values; None means H ** -0.5
    embed_init_std: float | None = None
    #: standard deviation of the initial spatial weights is this divided by T ("near zero")
    spatial_init_scale: float = 1e-3
    #: id of the padding symbol (fairseq's dictionaries: 1)
    padding_idx: int = 1
    moe: MoEConfig = field(default_factory=MoEConfig)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_tokens", "embed_dim", "ffn_dim", "num_heads"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_dense_layers", "num_sparse_layers"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        _require(self.num_layers >= 1, "num_dense_layers and num_sparse_layers are both 0: a model needs a layer")
        _require(0.0 <= self.dropout < 1.0, f"dropout must be in [0, 1), got {self.dropout}")
        _require(
            self.activation in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
        )
        _require(
            0 <= self.padding_idx < self.vocab_size,
            f"padding_idx must be an id below vocab_size={self.vocab_size}, got {self.padding_idx}",
        )
        _require(self.spatial_init_scale >= 0, f"spatial_init_scale must not be negative, got {self.spatial_init_scale}")
        _require(
            not self.sinusoidal_positions or self.embed_dim % 2 == 0,
            f"sinusoidal_positions need an even embed_dim, got {self.embed_dim}",
        )
        if self.num_dense_layers:
            _require(self.ffn_dim % 2 == 0, f"ffn_dim must be even to be split in halves, got {self.ffn_dim}")
            _require(
                (self.ffn_dim // 2) % self.num_heads == 0,
                f"num_heads={self.num_heads} must divide half of ffn_dim={self.ffn_dim}",
            )
        if self.num_sparse_layers:
            _require(
                self.embed_dim % self.moe.num_experts == 0,
                f"num_experts={self.moe.num_experts} must divide embed_dim={self.embed_dim}: "
                "the sMoE gives each expert an equal chunk of the features",
            )

    @property
    def num_layers(self) -> int:
        """N1 + N2."""
        return self.num_dense_layers + self.num_sparse_layers

    def sparse_layer_indices(self) -> tuple[int, ...]:
        """Positions of the sparse blocks in the stack, counted from 0: ``floor(i*(N1+N2)/(N2+1))``, i = 1..N2.

        Source: smlp.txt, section 4.1, the rule of BASE layers (28 + 12: 3, 6, 9, ..., 36).
        """
        num_sparse = self.num_sparse_layers
        return tuple(i * self.num_layers // (num_sparse + 1) for i in range(1, num_sparse + 1))

    def to_flat_dict(self) -> dict[str, Any]:
        """Every field by name, those of ``moe`` beside the others; the inverse of :func:`from_flat_dict`."""
        flat = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "moe"}
        return flat | dataclasses.asdict(self.moe)


MODEL_FIELDS = tuple(f.name for f in dataclasses.fields(ModelConfig) if f.name != "moe")
MOE_FIELDS = tuple(f.name for f in dataclasses.fields(MoEConfig))


def from_flat_dict(values: dict[str, Any]) -> ModelConfig:
    """Builds a :class:`ModelConfig` from field names of both dataclasses; missing ones take their defaults.

    Raises:
        UserError: a name is no field, or a value is out of range.
    """
    known = MODEL_FIELDS + MOE_FIELDS
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"unknown model setting {name!r}{hint}")
    moe = MoEConfig(**{k: v for k, v in values.items() if k in MOE_FIELDS})
    return ModelConfig(moe=moe, **{k: v for k, v in values.items() if k in MODEL_FIELDS})
