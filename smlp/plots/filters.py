"""The spatial filters of a model: the layers that have them, and statistics, above all how Toeplitz-like they are.

The weights of a Toeplitz matrix depend on the distance between positions alone: it is a convolution over positions. The
filters of trained gMLPs are close to that (gmlp.txt, figure 9).

Letters: ``E`` heads or experts, ``T`` positions that a matrix spans, ``d`` = i - j, the distance from an output
position i back to an input position j, 0 .. T-1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.nn.blocks import FeatureSublayer, GatedMLPBlock, GatedMLPMoEBlock, SparseBlock
from smlp.nn.decoder import Decoder
from smlp.nn.layers import SpatialWeights


def diagonal_sums(weight_TT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of the weights and of their squares on each diagonal ``d`` of the lower triangle, (T,) float64
    each."""
    size = weight_TT.shape[0]
    rows, columns, distance = _lower_triangle(size)
    weights = weight_TT[rows, columns].astype(np.float64)
    sums = np.bincount(distance, weights, size)
    return sums, np.bincount(distance, weights * weights, size)


@functools.lru_cache(maxsize=2)
def _lower_triangle(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, columns = np.tril_indices(size)
    return rows, columns, rows - columns


def toeplitz_share(weight_TT: np.ndarray) -> float:
    """Return the share of the energy (sum of squares) of ``tril(W)`` that its nearest Toeplitz matrix holds.

    The nearest lower-triangular Toeplitz matrix (least squares: the orthogonal projection) has the mean of each
    diagonal in all its entries, so that the share is ``sum_d (T-d) mean_d**2 / sum_{j<=i} W_ij**2``: 1 for a Toeplitz
    matrix, 0 where every diagonal has mean zero, NaN for a matrix of zeros. Entries above the diagonal are
    ignored.
    """
    sums, squares = diagonal_sums(weight_TT)
    energy = squares.sum()
    if energy == 0:
        return math.nan
    lengths = np.arange(len(sums), 0, -1)
    return float((sums * sums / lengths).sum() / energy)


def random_toeplitz_share(size: int) -> tuple[float, float]:
    """Return the mean and standard deviation of :func:`toeplitz_share` for a random T x T matrix, as a baseline.

    The projection is on T of the ``n = T(T+1)/2`` dimensions of lower-triangular matrices. For independent weights of
    one distribution that is symmetric about zero, such as that of untrained weights, each weight holds 1/n of the
    energy on average and products of two weights none, so that the mean is exactly ``T/n = 2/(T+1)``. For normal
    weights the share has the distribution ``Beta(T/2, (n-T)/2)``, of which the standard deviation is given.
    """
    n = size * (size + 1) / 2
    mean = size / n
    return mean, math.sqrt(mean * (1 - mean) / (n / 2 + 1))


def half_energy_distance(weight_TT: np.ndarray) -> int | None:
    """Return the smallest ``d`` such that the diagonals 0 .. d hold half of the energy of ``tril(W)``; None for zeros.

    It is small for a filter that attends to near tokens, and about ``0.29 T`` for a random matrix.
    """
    _, squares = diagonal_sums(weight_TT)
    if squares.sum() == 0:
        return None
    return int(np.searchsorted(squares.cumsum(), squares.sum() / 2))


@dataclass(frozen=True)
class SpatialLayer:
    """A layer of a model that mixes positions by matrices."""

    #: position in the stack, counted from 0
    layer: int
    #: "SGU", "sMoE (deterministic)", "sMoE (partial)", "sMoE (leaky)" or "gMLP-MoE"
    kind: str
    #: unit that has a matrix of its own: "head" or "expert"
    unit: str
    #: position of the first row and column: the length of the prefix for partial and leaky routing, else 0
    first_position: int
    experts: SpatialWeights

    @property
    def num_matrices(self) -> int:
        """Return E."""
        return self.experts.weight.size(0)

    @property
    def size(self) -> int:
        """Return T."""
        return self.experts.max_tokens

    def weight(self, index: int) -> np.ndarray:
        """Return the matrix of one head or expert, ``tril(W)``, (T, T) float32."""
        return np.tril(self.experts.weight[index].detach().float().cpu().numpy())

    def bias(self, index: int) -> np.ndarray:
        """Return the bias of one head or expert, (T,) float32."""
        return self.experts.bias[index].detach().float().cpu().numpy()


@dataclass(frozen=True)
class FilterNumbers:
    """Statistics of the matrix and the bias of one head or expert."""

    index: int
    #: :func:`smlp.plots.filters.toeplitz_share`
    toeplitz_share: float | None
    #: in tokens, :func:`smlp.plots.filters.half_energy_distance`
    half_energy_distance: int | None
    #: root mean square of the weights on and below the diagonal
    weight_rms: float
    bias_mean: float
    bias_std: float


def spatial_layers(decoder: Decoder) -> list[SpatialLayer]:
    """Return the layers with spatial filters, in order; none for a model whose tokens are mixed in other ways."""
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
    """Return the numbers of every head or expert of a layer, in order.

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
    """Return the facts about a layer for JSON."""
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
    """Describe deterministic routing of features in a sentence; None for models without it."""
    if not config.has_feature_moe or config.moe.feature_routing != "deterministic":
        return None
    experts, width = config.moe.num_experts, config.embed_dim // config.moe.num_experts
    return (
        f"deterministic routing of features: in every sMoE, expert i of 0 .. {experts - 1} mixes the {width} of "
        f"{config.embed_dim} features from number {width}*i on, in every sequence, so that there is no map to draw"
    )
