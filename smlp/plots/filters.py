"""The spatial filters of a model: which layers have them, and numbers about each.

Letters: ``E`` heads or experts, ``T`` positions that a matrix spans.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.nn.blocks import FeatureSublayer, GatedMLPBlock, GatedMLPMoEBlock, SparseBlock
from smlp.nn.decoder import Decoder
from smlp.nn.layers import SpatialWeights
from smlp.plots.toeplitz import half_energy_distance, random_toeplitz_share, toeplitz_share


@dataclass(frozen=True)
class SpatialLayer:
    """A layer of a model that mixes positions by matrices."""

    #: position in the stack, counted from 0
    layer: int
    #: "SGU", "sMoE (deterministic)", "sMoE (partial)", "sMoE (leaky)" or "gMLP-MoE"
    kind: str
    #: what has a matrix each: "head" or "expert"
    unit: str
    #: the position of the first row and column: the prefix of partial and leaky routing, else 0
    first_position: int
    experts: SpatialWeights

    @property
    def num_matrices(self) -> int:
        """E."""
        return self.experts.weight.size(0)

    @property
    def size(self) -> int:
        """T."""
        return self.experts.max_tokens

    def weight(self, index: int) -> np.ndarray:
        """What one head or expert multiplies by: ``tril(W)``, (T, T) float32."""
        return np.tril(self.experts.weight[index].detach().float().cpu().numpy())

    def bias(self, index: int) -> np.ndarray:
        """``b`` of one head or expert, (T,) float32."""
        return self.experts.bias[index].detach().float().cpu().numpy()


@dataclass(frozen=True)
class FilterNumbers:
    """About the matrix and the bias of one head or expert."""

    index: int
    #: :func:`smlp.plots.toeplitz.toeplitz_share`
    toeplitz_share: float | None
    #: in tokens, :func:`smlp.plots.toeplitz.half_energy_distance`
    half_energy_distance: int | None
    #: root mean square of the weights on and below the diagonal
    weight_rms: float
    bias_mean: float
    bias_std: float


def spatial_layers(decoder: Decoder) -> list[SpatialLayer]:
    """The layers with spatial filters, in order; none for a model whose tokens are mixed in other ways."""
    config, found = decoder.config, []
    for index, block in enumerate(decoder.blocks):
        if isinstance(block, GatedMLPBlock):
            found.append(SpatialLayer(index, "SGU", "head", 0, block.gating.heads))
        elif isinstance(block, SparseBlock) and isinstance(block.mixing, FeatureSublayer):
            experts = block.mixing.feature_moe.experts
            kind = f"sMoE ({config.moe.feature_routing})"
            found.append(SpatialLayer(index, kind, "expert", config.prefix_tokens, experts))
        elif isinstance(block, GatedMLPMoEBlock):
            found.append(SpatialLayer(index, "gMLP-MoE", "expert", 0, block.token_moe.experts.gating))
    return found


def filter_numbers(layer: SpatialLayer) -> list[FilterNumbers]:
    """Of every head or expert of a layer, in order.

    Raises:
        UserError: a weight is NaN or infinite.
    """
    numbers = []
    for index in range(layer.num_matrices):
        weight_TT, bias_T = layer.weight(index), layer.bias(index).astype(np.float64)
        if not (np.isfinite(weight_TT).all() and np.isfinite(bias_T).all()):
            raise UserError(f"layer {layer.layer} ({layer.kind}): {layer.unit} {index} has weights that are no numbers")
        share = toeplitz_share(weight_TT)
        num_weights = layer.size * (layer.size + 1) / 2
        numbers.append(
            FilterNumbers(
                index,
                None if np.isnan(share) else share,
                half_energy_distance(weight_TT),
                float(np.sqrt(np.square(weight_TT, dtype=np.float64).sum() / num_weights)),
                float(bias_T.mean()),
                float(bias_T.std()),
            )
        )
    return numbers


def layer_facts(layer: SpatialLayer, numbers: list[FilterNumbers]) -> dict[str, Any]:
    """A layer for JSON."""
    mean, std = random_toeplitz_share(layer.size)
    return {
        "layer": layer.layer,
        "kind": layer.kind,
        "unit": layer.unit,
        "size": layer.size,
        "first_position": layer.first_position,
        "random_toeplitz_share": {"mean": mean, "std": std},
        "matrices": [asdict(each) for each in numbers],
    }


def fixed_chunks(config: ModelConfig) -> str | None:
    """What deterministic routing of features does, in a sentence; None for models without it."""
    if not config.has_feature_moe or config.moe.feature_routing != "deterministic":
        return None
    experts, width = config.moe.num_experts, config.embed_dim // config.moe.num_experts
    return (
        f"deterministic routing of features: in every sMoE, expert i of 0 .. {experts - 1} mixes the {width} of "
        f"{config.embed_dim} features from number {width}*i on, in every sequence, so that there is no map to draw"
    )
