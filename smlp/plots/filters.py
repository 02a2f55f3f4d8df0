"""The spatial filters of a model: the layers that have them, and statistics, above all how Toeplitz-like they are.

The weights of a Toeplitz matrix depend on the distance between positions alone: it is a convolution over positions. The
filters of trained gMLPs are close to that (Liu et al., 2021, figure 9).

Letters: ``E`` heads or experts, ``T`` positions that a matrix spans, ``d`` = i - j, the distance from an output
position i back to an input position j: 0 .. T-1 in a causal model, where a matrix is ``tril(W)``, and 1-T .. T-1 in an
encoder, where ``D`` = 2T-1 diagonals have weights instead of T.
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
from smlp.nn.layers import SpatialWeights
from smlp.nn.stack import Stack


def diagonal_sums(weight_TT: np.ndarray, is_causal: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of the weights and of their squares on each diagonal, in the order of ``d``, (D,) float64 each.

    Args:
        weight_TT: a matrix.
        is_causal: whether only its lower triangle counts, so that D is T.
    """
    rows, columns, diagonal = _diagonals(weight_TT.shape[0], is_causal)
    weights = weight_TT[rows, columns].astype(np.float64)
    return np.bincount(diagonal, weights), np.bincount(diagonal, weights * weights)


@functools.lru_cache(maxsize=2)
def _diagonals(size: int, is_causal: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row, the column and the number of the diagonal, 0 .. D-1, of every weight."""
    if is_causal:
        rows, columns = np.tril_indices(size)
        return rows, columns, rows - columns
    rows, columns = (places.ravel() for places in np.indices((size, size)))
    return rows, columns, rows - columns + size - 1


def _num_weights(size: int, is_causal: bool) -> float:
    return size * (size + 1) / 2 if is_causal else size * size


def toeplitz_share(weight_TT: np.ndarray, is_causal: bool = True) -> float:
    """Return the share of the energy (sum of squares) of a matrix that its nearest Toeplitz matrix holds.

    The nearest Toeplitz matrix (least squares: the orthogonal projection) has the mean of each diagonal in all its
    entries, so that the share is ``sum_d (T-|d|) mean_d**2 / sum_ij W_ij**2``: 1 for a Toeplitz matrix, 0 where every
    diagonal has mean zero, NaN for a matrix of zeros.

    Args:
        weight_TT: a matrix.
        is_causal: whether entries above the diagonal are ignored.
    """
    sums, squares = diagonal_sums(weight_TT, is_causal)
    energy = squares.sum()
    if energy == 0:
        return math.nan
    size = weight_TT.shape[0]
    lengths = size - np.abs(np.arange(size - len(sums), size))
    return float((sums * sums / lengths).sum() / energy)


def random_toeplitz_share(size: int, is_causal: bool = True) -> tuple[float, float]:
    """Return the mean and standard deviation of :func:`toeplitz_share` for a random T x T matrix, as a baseline.

    The projection is on D of the n dimensions of all matrices: T of ``n = T(T+1)/2`` for lower triangles, 2T-1 of
    ``n = T**2`` for whole matrices. For independent weights of one distribution that is symmetric about zero, such as
    that of untrained weights, each weight holds 1/n of the energy on average and products of two weights none, so that
    the mean is exactly ``D/n``, 2/(T+1) or (2T-1)/T**2. For normal weights the share has the distribution
    ``Beta(D/2, (n-D)/2)``, whose standard deviation is returned.
    """
    n = _num_weights(size, is_causal)
    mean = (size if is_causal else 2 * size - 1) / n
    return mean, math.sqrt(mean * (1 - mean) / (n / 2 + 1))


def half_energy_distance(weight_TT: np.ndarray, is_causal: bool = True) -> int | None:
    """Return the smallest distance, in tokens, within which half of the energy of a matrix lies; None for zeros.

    It is small for a filter that attends to near tokens, and about ``0.29 T`` for a random matrix, causal or not.
    """
    _, squares = diagonal_sums(weight_TT, is_causal)
    if squares.sum() == 0:
        return None
    size = weight_TT.shape[0]
    squares = np.bincount(np.abs(np.arange(size - len(squares), size)), squares)  # of both directions together
    return int(np.searchsorted(squares.cumsum(), squares.sum() / 2))


def ahead_share(weight_TT: np.ndarray) -> float:
    """Return the share of the energy of a whole matrix that is above its diagonal, at later tokens; NaN for zeros.

    It is 0 for a filter that looks backward, 1 for one that looks forward, and about 1/2 for one that looks both ways,
    the kinds that figure 4 of Liu et al., 2021 shows.
    """
    energy = np.square(weight_TT, dtype=np.float64)
    return float(np.triu(energy, 1).sum() / energy.sum()) if energy.any() else math.nan


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
    def is_causal(self) -> bool:
        """Return whether only the lower triangle of a matrix has weights."""
        return self.experts.is_causal

    @property
    def is_toeplitz(self) -> bool:
        """Return whether the matrices are Toeplitz by construction."""
        return self.experts.is_toeplitz

    @property
    def size(self) -> int:
        """Return T."""
        return self.experts.max_tokens

    def weight(self, index: int) -> np.ndarray:
        """Return the matrix of one head or expert, ``tril(W)`` in a causal model, (T, T) float32."""
        weight_TT = self.experts.matrices(only=index)[0].detach().float().cpu().numpy()
        return np.tril(weight_TT) if self.is_causal else weight_TT

    def bias(self, index: int) -> np.ndarray:
        """Return the bias of one head or expert, (T,) float32."""
        return self.experts.bias[index].detach().float().cpu().numpy()


def middle_row(layer: SpatialLayer, index: int) -> np.ndarray:
    """Return row T // 2 of a matrix, (T,) float32; in a causal model up to the diagonal."""
    row = layer.size // 2
    row_T = layer.weight(index)[row]
    return row_T[: row + 1] if layer.is_causal else row_T


@dataclass(frozen=True)
class FilterNumbers:
    """Statistics of the matrix and the bias of one head or expert."""

    index: int
    #: :func:`smlp.plots.filters.toeplitz_share`
    toeplitz_share: float | None
    #: in tokens, :func:`smlp.plots.filters.half_energy_distance`
    half_energy_distance: int | None
    #: :func:`smlp.plots.filters.ahead_share`; None in a causal model
    ahead_share: float | None
    #: root mean square of the weights; in a causal model of those on and below the diagonal
    weight_rms: float
    bias_mean: float
    bias_std: float


def spatial_layers(model: Stack) -> list[SpatialLayer]:
    """Return the layers with spatial filters, in order; none for a model whose tokens are mixed in other ways."""
    config, found = model.config, []
    for index, block in enumerate(model.blocks):
        if isinstance(block, GatedMLPBlock):
            found.append(SpatialLayer(index, "SGU", "head", 0, block.gating.heads))
        elif isinstance(block, SparseBlock) and isinstance(block.mixing, FeatureSublayer):
            experts = block.mixing.feature_moe.experts
            kind = f"sMoE ({config.feature_routing})"
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
            raise UserError(f"layer {layer.layer} ({layer.kind}): {layer.unit} {index} has weights that are not finite")
        share = toeplitz_share(weight_TT, layer.is_causal)
        has_weights = not np.isnan(share)
        num_weights = _num_weights(layer.size, layer.is_causal)
        numbers.append(
            FilterNumbers(
                index,
                share if has_weights else None,
                half_energy_distance(weight_TT, layer.is_causal),
                ahead_share(weight_TT) if has_weights and not layer.is_causal else None,
                float(np.sqrt(np.square(weight_TT, dtype=np.float64).sum() / num_weights)),
                float(bias_T.mean()),
                float(bias_T.std()),
            )
        )
    return numbers


def layer_facts(
    layer: SpatialLayer, numbers: list[FilterNumbers], shown: FilterNumbers | None = None
) -> dict[str, Any]:
    """Return the facts about a layer for JSON; the middle row of the matrix ``shown``, if any."""
    mean, std = random_toeplitz_share(layer.size, layer.is_causal)
    return {
        "layer": layer.layer,
        "kind": layer.kind,
        "unit": layer.unit,
        "size": layer.size,
        "first_position": layer.first_position,
        "is_causal": layer.is_causal,
        "is_toeplitz": layer.is_toeplitz,
        "random_toeplitz_share": {"mean": mean, "std": std},
        "matrices": [asdict(each) for each in numbers],
        "middle_row": shown and {"index": shown.index, "weights": middle_row(layer, shown.index).tolist()},
    }


def fixed_chunks(config: ModelConfig) -> str | None:
    """Describe deterministic routing of features in a sentence; None for models without it."""
    if not config.has_feature_moe or config.feature_routing != "deterministic":
        return None
    experts, width = config.num_experts, config.embed_dim // config.num_experts
    return (
        f"deterministic routing of features: in every sMoE, expert i of 0 .. {experts - 1} mixes the {width} of "
        f"{config.embed_dim} features from number {width}*i on, in every sequence, so that there is no map to draw"
    )
