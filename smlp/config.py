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


def _setting(default: Any, help_text: str) -> Any:
    """A field with its documentation, which command lines show as well."""
    return field(default=default, metadata={"help": help_text})


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class MoEConfig:
    """The sparse part of a model: what the experts of its sparse blocks are and how they are chosen.

    Source: smlp.txt, sections 3.1 and 3.2.1.
    """

    num_experts: int = _setting(32, "E, experts in each sparse layer, over all ranks; divides the embedding width")
    spatial_bias_init: float = _setting(0.0, "initial value of the sMoE's spatial bias")
    centroid_init_gain: float = _setting(0.1, "gain of the orthogonal initialisation of the tMoE's expert centroids")

    def __post_init__(self) -> None:
        _require(self.num_experts >= 1, f"num_experts must be at least 1, got {self.num_experts}")
        _require(self.centroid_init_gain > 0, f"centroid_init_gain must be positive, got {self.centroid_init_gain}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model made of dense (gMLP) and sparse (sMoE + tMoE) blocks.

    Raises:
        UserError: a value is out of range, or E does not divide H; the message names the field and the numbers.
    """

    vocab_size: int = _setting(51200, "V, rows of the tied embedding, special symbols included")
    max_tokens: int = _setting(1024, "T, the context length that the spatial weights are built for")
    embed_dim: int = _setting(1024, "H, embedding width")
    ffn_dim: int = _setting(4096, "F; a gMLP block splits it in halves, an expert of the tMoE uses all of it")
    num_dense_layers: int = _setting(28, "N1, number of gMLP blocks")
    num_sparse_layers: int = _setting(12, "N2, number of sparse blocks; 0 builds a plain gMLP")
    num_heads: int = _setting(1, "h, heads of the spatial gating unit of the gMLP blocks")
    dropout: float = _setting(0.1, "dropout probability after the embedding and after every sublayer")
    activation: str = _setting("gelu", f"activation function: {', '.join(ACTIVATIONS)}")
    sinusoidal_positions: bool = _setting(False, "add fixed sinusoidal positions; MLP models do not need them")
    checkpoint_activations: bool = _setting(False, "recompute each block in the backward pass to save memory")
    embed_init_std: float | None = _setting(None, "standard deviation of the initial embedding (default: H ** -0.5)")
    spatial_init_scale: float = _setting(1e-3, "spatial weights start as U(-s/T, s/T) with this s: near zero")
    padding_idx: int = _setting(1, "id of the padding symbol")
    moe: MoEConfig = field(default_factory=MoEConfig)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_tokens", "embed_dim", "ffn_dim", "num_heads"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_dense_layers", "num_sparse_layers", "spatial_init_scale"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        _require(self.num_layers >= 1, "num_dense_layers and num_sparse_layers are both 0: a model needs a layer")
        _require(0.0 <= self.dropout < 1.0, f"dropout must be in [0, 1), got {self.dropout}")
        _require(
            self.activation in ACTIVATIONS,
            f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}",
        )
        _require(
            0 <= self.padding_idx < self.vocab_size,
            f"padding_idx must be an id below vocab_size={self.vocab_size}, got {self.padding_idx}",
        )
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
