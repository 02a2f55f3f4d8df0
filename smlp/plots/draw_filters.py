"""Pictures of spatial filters: the matrices of a layer, rows of them, biases; a matrix of each layer with its middle
row, as in figures 9 and 4 of Liu et al., 2021; and how Toeplitz-like all layers are.

Letters: ``T`` positions that a matrix spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from smlp.plots.drawing import DIVERGING, LINES, NOTHING, new_figure
from smlp.plots.filters import FilterNumbers, SpatialLayer, middle_row, random_toeplitz_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

#: most matrices in a figure
MOST_MATRICES = 8
_COLUMNS = 4
#: quantile of the weights at which the colour scale ends; a few outliers would leave all others pale
_COLOURED = 0.995
#: rows of a matrix drawn individually; larger matrices are averaged in blocks
_MOST_CELLS = 300
#: the same where all layers are drawn
_MOST_SMALL_CELLS = 150
_MARKERS = {"SGU": ("o", LINES[0]), "sMoE": ("D", LINES[1]), "gMLP-MoE": ("s", LINES[2])}


def draw_filters(
    layer: SpatialLayer, numbers: Sequence[FilterNumbers], indices: Sequence[int], model_name: str
) -> Figure:
    """Draw matrices of some heads or experts of a layer, three rows of each as curves, and their biases.

    Args:
        layer: of the model.
        numbers: of all its heads or experts.
        indices: the heads or experts to draw, at most :data:`MOST_MATRICES`.
        model_name: for the title.
    """
    columns = min(_COLUMNS, len(indices))
    groups = -(-len(indices) // columns)
    mean, std = random_toeplitz_share(layer.size, layer.is_causal)
    about = f"Toeplitz share: how much of W is a convolution; a random matrix has {mean:.4f} ± {std:.4f}"
    figure = new_figure(
        8.4 if len(indices) == 1 else max(3.1 * columns + 0.9, 8.0),
        4.4 if len(indices) == 1 else 5.7 * groups + 0.9,
        f"{model_name}, layer {layer.layer}: spatial filters W of {layer.kind}, {_which(layer, indices)}\n"
        + ("W is Toeplitz by construction" if layer.is_toeplitz else about),
    )
    step = -(-layer.size // _MOST_CELLS)
    cells = [block_means(layer.weight(index), step, layer.is_causal) for index in indices]
    limit = float(np.nanquantile(np.abs(cells), _COLOURED)) or 1.0
    placed = _panels(figure, len(indices), columns)
    for place, (index, panels) in enumerate(zip(indices, placed, strict=True)):
        image = _draw_cells(panels[0], layer, cells[place], step, limit)
        share = numbers[index].toeplitz_share
        shown = "no weights" if share is None else f"Toeplitz share {share:.4f}"
        panels[0].set_title(f"{layer.unit} {index}: {shown}", fontsize=9)
        panels[0].set_xlabel("input position j (tokens)", fontsize=8)
        _draw_rows(panels[1], layer, layer.weight(index))
        panels[2].plot(_positions(layer), layer.bias(index), color=LINES[0], linewidth=0.9)
        panels[2].set_xlabel("position i (tokens)", fontsize=8)
        if place % columns == 0:
            panels[0].set_ylabel("output position i (tokens)", fontsize=8)
            panels[1].set_ylabel("weight W[i, j]", fontsize=8)
            panels[2].set_ylabel("bias b[i]", fontsize=8)
    bar = figure.colorbar(image, ax=[panels[0] for panels in placed], shrink=0.8, aspect=30, pad=0.01, extend="both")
    what = "weight" if step == 1 else f"mean of {step} x {step} weights"
    beyond = f"{100 * (1 - _COLOURED):.1f} % lie beyond ±{limit:.2g}"
    bar.set_label(f"{what}; one scale for the figure,\n{beyond}", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def _which(layer: SpatialLayer, indices: Sequence[int]) -> str:
    if len(indices) == layer.num_matrices:
        return f"{layer.num_matrices} {layer.unit}{'s' if layer.num_matrices > 1 else ''}"
    return f"{len(indices)} of {layer.num_matrices} {layer.unit}s"


def _panels(figure: Figure, count: int, columns: int) -> list[list[Axes]]:
    """Return panels for each matrix, its rows and its bias: below the matrix, or next to it if there is only one."""
    if count == 1:
        grid = figure.add_gridspec(2, 2, width_ratios=[1, 1.15])
        placed = [[figure.add_subplot(part) for part in (grid[:, 0], grid[0, 1], grid[1, 1])]]
    else:
        groups = -(-count // columns)
        grid = figure.add_gridspec(3 * groups, columns, height_ratios=[3.0, 1.35, 1.1] * groups)
        places = [divmod(number, columns) for number in range(count)]
        placed = [[figure.add_subplot(grid[3 * row + part, column]) for part in range(3)] for row, column in places]
    for panels in placed:
        for panel in panels:
            panel.tick_params(labelsize=7)
            panel.locator_params(nbins=5)
        for panel in panels[1:]:
            panel.grid(alpha=0.3, linewidth=0.5)
    return placed


def block_means(weight_TT: np.ndarray, step: int, is_causal: bool = True) -> np.ndarray:
    """Return the means of the weights in blocks of ``step`` x ``step``; in a causal model of those on and below the
    diagonal, and NaN where there are none.

    A matrix with more rows than a page has pixels would otherwise lose some of its diagonals.
    """
    size = weight_TT.shape[0]
    padding = -size % step

    def sums(values_TT: np.ndarray) -> np.ndarray:
        padded = np.pad(values_TT, (0, padding))
        return padded.reshape(len(padded) // step, step, -1, step).sum(axis=(1, 3))

    counts = sums(np.tri(size) if is_causal else np.ones((size, size)))
    return np.where(counts > 0, sums(np.tril(weight_TT) if is_causal else weight_TT) / np.maximum(counts, 1), np.nan)


def _positions(layer: SpatialLayer) -> np.ndarray:
    return layer.first_position + np.arange(layer.size)


def _draw_cells(axes: Axes, layer: SpatialLayer, cells: np.ndarray, step: int, limit: float) -> AxesImage:
    first, end = layer.first_position - 0.5, layer.first_position + step * len(cells) - 0.5
    axes.set_facecolor(NOTHING)
    return axes.imshow(
        np.ma.masked_invalid(cells),
        cmap=DIVERGING,
        vmin=-limit,
        vmax=limit,
        extent=(first, end, end, first),
        interpolation="nearest",
    )


def _draw_rows(axes: Axes, layer: SpatialLayer, weight_TT: np.ndarray) -> None:
    """Draw three rows, in a causal model up to their diagonal."""
    shares = (1.0, 0.66, 0.33) if layer.is_causal else (0.75, 0.5, 0.25)
    for share, colour, width in zip(shares, LINES, (0.8, 0.8, 1.0), strict=True):
        row = max(round(share * layer.size) - 1, 0)
        label = f"i = {row + layer.first_position}"
        end = row + 1 if layer.is_causal else layer.size
        axes.plot(_positions(layer)[:end], weight_TT[row, :end], color=colour, linewidth=width, label=label)
    axes.axhline(0, color="0.5", linewidth=0.5)
    axes.margins(y=0.25)
    axes.legend(fontsize=6, frameon=False, ncols=3, loc="upper left", handlelength=1.0, columnspacing=0.8)
    axes.set_xlabel("input position j (tokens)", fontsize=8)


def draw_layers(drawn: Sequence[tuple[SpatialLayer, FilterNumbers]], model_name: str) -> Figure:
    """Draw the matrix of one head or expert of each layer, and below it its middle row, T // 2.

    Args:
        drawn: layers, with the numbers of the head or expert.
        model_name: for the title.
    """
    columns = min(len(drawn), 9 if len(drawn) <= 54 else 12)
    groups = -(-len(drawn) // columns)
    figure = new_figure(
        max(1.5 * columns + 0.3, 5.0),
        2.2 * groups + 1.0,
        f"{model_name}: W of each layer, and below it its middle row\n"
        "by layer: Toeplitz share and, for the row, the largest |weight|; each matrix has colours of its own scale",
    )
    grid = figure.add_gridspec(2 * groups, columns, height_ratios=[2.2, 1.0] * groups)
    for place, (layer, numbers) in enumerate(drawn):
        group, column = divmod(place, columns)
        weight_TT = layer.weight(numbers.index)
        step = -(-layer.size // _MOST_SMALL_CELLS)
        cells = block_means(weight_TT, step, layer.is_causal)
        limit = float(np.nanquantile(np.abs(cells), _COLOURED)) or 1.0
        panels = [figure.add_subplot(grid[2 * group + part, column]) for part in range(2)]
        _draw_cells(panels[0], layer, cells, step, limit).axes.set_aspect("auto")
        unit = f", {layer.unit} {numbers.index}" if layer.num_matrices > 1 else ""
        share = "no weights" if numbers.toeplitz_share is None else f"{numbers.toeplitz_share:.3f}"
        panels[0].set_title(f"layer {layer.layer}{unit}: {share}", fontsize=7, pad=2)
        row_T = middle_row(layer, numbers.index)
        panels[1].plot(_positions(layer)[: len(row_T)], row_T, color=LINES[0], linewidth=0.8)
        panels[1].axhline(0, color="0.5", linewidth=0.4)
        panels[1].axvline(_positions(layer)[layer.size // 2], color="0.5", linewidth=0.4, linestyle=":")
        panels[1].set_xlim(panels[0].get_xlim())
        panels[1].set_xlabel(f"{np.abs(row_T).max():.2g}", fontsize=6, labelpad=1)
        for panel in panels:
            panel.set(xticks=[], yticks=[])
    return figure


def draw_toeplitz(
    layers: Sequence[SpatialLayer], numbers: Mapping[int, Sequence[FilterNumbers]], model_name: str
) -> Figure:
    """Draw how Toeplitz-like every head or expert of every layer is, next to a random matrix of its size.

    Args:
        layers: all of a model.
        numbers: of their heads or experts, by layer number.
        model_name: for the title.
    """
    figure = new_figure(
        min(max(6.5, 0.28 * len(layers) + 2.5), 14),
        4.2,
        f"{model_name}\nhow much of each spatial filter depends on the distance alone",
    )
    axes = figure.add_subplot()
    for layer in layers:
        family = layer.kind.split(" ")[0]
        marker, colour = _MARKERS[family]
        shares = [each.toeplitz_share for each in numbers[layer.layer] if each.toeplitz_share is not None]
        across = layer.layer + (np.linspace(-0.25, 0.25, len(shares)) if len(shares) > 1 else np.zeros(len(shares)))
        label = f"{layer.kind}, one for each {layer.unit}"
        axes.plot(across, shares, marker, color=colour, markersize=4.5, linestyle="none", label=label, alpha=0.85)
        mean, std = random_toeplitz_share(layer.size, layer.is_causal)
        axes.fill_between(
            [layer.layer - 0.5, layer.layer + 0.5],
            max(mean - 2 * std, mean / 4),
            mean + 2 * std,
            color="0.6",
            linewidth=0,
            label="random matrix: mean ± 2 standard deviations",
        )
    axes.set_yscale("log")
    axes.set_ylim(axes.get_ylim()[0] / 1.5, 1.3)
    axes.set(xlabel="layer, counted from 0", ylabel="Toeplitz share of the energy\n(1: a convolution; log scale)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))  # one for all layers
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure
