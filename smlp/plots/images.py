"""Pictures of trained image models: what a Mixer's units over tokens and its stem see, and the filters of a gMLP.

Each is a sheet of small images, weights by place in the grid of patches or in a patch: of mlp_mixer_supplement.txt
Figures 1 and 2, and of gmlp.txt Figure 3.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from smlp.errors import UserError
from smlp.plots.drawing import DIVERGING, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from smlp.vision.model import ImageModel

_COLUMNS = 32
_INCHES = 0.3  # of a small image
_GAP = 1  # cells between small images
_TOKENS = 8  # whose filters are drawn, two rows of the grid
_LAYERS = 8


def draw_images(model: ImageModel, folder: Path, model_name: str, file_format: str = "png") -> list[Path]:
    """Draw everything that a model has, a file each, and return the files.

    A Mixer: the units of its first two networks over tokens, and its stem; a gMLP: its filters and its stem.

    Args:
        model: trained.
        folder: for the files.
        model_name: for the titles.
        file_format: "png" or "svg".

    Raises:
        UserError: there is nothing to draw, or a file cannot be written.
    """
    figures = {"stem": draw_stem(model, model_name)}
    if model.config.block == "gmlp":
        figures["filters"] = draw_gates(model, model_name)
    elif model.config.token_mixing == "shared":
        for layer, (tokens, _) in enumerate(model.config.tokens_of_layers()[:2]):
            if tokens == model.config.num_tokens:  # what a pyramid leaves has no place in the image
                figures[f"units-{layer}"] = draw_units(model, layer, model_name)
    return [save(figure, folder / f"{name}.{file_format}") for name, figure in figures.items()]


def draw_units(model: ImageModel, layer: int, model_name: str) -> Figure:
    """Draw the hidden units of a network over tokens as images, low frequencies first, each before its inverse.

    Raises:
        UserError: the units of this model are not over one image of tokens.
    """
    config = model.config
    if (
        config.block != "mixer"
        or config.token_mixing != "shared"
        or config.tokens_of_layers()[layer][0] != config.grid**2
    ):
        raise UserError(f"{model_name}: the units of layer {layer} are not over the tokens of one image")
    units_Dgg = _array(model.blocks[layer].mlp_tokens.fc1.weight).reshape(-1, config.grid, config.grid)
    order = paired_by_frequency(units_Dgg)
    over = f"{config.grid} x {config.grid} tokens"
    title = f"{model_name}, layer {layer}: {len(order)} units over {over}, each before its inverse"
    return _sheet(_scaled(units_Dgg[order]), title)


def draw_stem(model: ImageModel, model_name: str) -> Figure:
    """Draw the stem's linear units as patches, in colour if images have three channels, low frequencies first."""
    weight_CcPP = _array(model.stem.proj.weight)
    grey_CPP = weight_CcPP.mean(axis=1)
    order = np.argsort([mean_frequency(unit) for unit in grey_CPP])
    if weight_CcPP.shape[1] == 3:
        limit = np.abs(weight_CcPP).max(axis=(1, 2, 3), keepdims=True)
        cells = (0.5 + 0.5 * weight_CcPP / np.where(limit > 0, limit, 1)).transpose(0, 2, 3, 1)[order]
    else:
        cells = _scaled(grey_CPP[order])
    patch = weight_CcPP.shape[-1]
    return _sheet(cells, f"{model_name}: {len(order)} units of the stem over patches of {patch} x {patch} pixels")


def draw_gates(model: ImageModel, model_name: str) -> Figure:
    """Draw filters of the spatial gating units as images: a row for each of some layers, a column for each token."""
    config = model.config
    first = int(config.pool == "cls")
    down, right = (np.linspace(0, config.grid - 1, count + 2).round().astype(int)[1:-1] for count in (2, _TOKENS // 2))
    tokens = first + (config.grid * down[:, None] + right).flatten()
    layers = np.unique(np.linspace(0, config.num_layers - 1, _LAYERS).round().astype(int))
    rows = [_array(model.blocks[layer].mlp_channels.gate.heads.weight)[0, tokens, first:] for layer in layers]
    cells = _scaled(np.stack(rows).reshape(-1, config.grid, config.grid))
    places = ", ".join(f"{(token - first) // config.grid}|{(token - first) % config.grid}" for token in tokens)
    title = f"{model_name}: filters of the spatial gating units; rows are layers {', '.join(map(str, layers))}"
    return _sheet(cells, f"{title}; columns are tokens at row|column {places}", columns=_TOKENS, inches=0.9)


def mean_frequency(unit_gg: np.ndarray) -> float:
    """Return the mean distance from frequency zero in a unit's power spectrum, in cycles per patch."""
    power = np.abs(np.fft.fft2(unit_gg)) ** 2
    down, right = (np.fft.fftfreq(size) for size in unit_gg.shape)
    return float((power * np.hypot(down[:, None], right)).sum() / max(power.sum(), np.finfo(float).tiny))


def paired_by_frequency(units_Dgg: np.ndarray) -> list[int]:
    """Return an order of units: the lowest mean frequency first, followed by the unit that is closest to its inverse.

    A pair is taken out before the next unit is looked for, so that each unit occurs once.
    """
    flat = units_Dgg.reshape(len(units_Dgg), -1)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    unit = flat / np.where(lengths > 0, lengths, 1)
    likeness = unit @ unit.T
    left = list(np.argsort([mean_frequency(one) for one in units_Dgg], kind="stable"))
    order: list[int] = []
    while left:
        order.append(int(left.pop(0)))
        if left:
            inverse = min(left, key=lambda other: likeness[order[-1], other])
            left.remove(inverse)
            order.append(int(inverse))
    return order


def _array(weight: Tensor) -> np.ndarray:
    return weight.detach().double().cpu().numpy()


def _scaled(units: np.ndarray) -> np.ndarray:
    """Return units whose largest weight is one in size."""
    limit = np.abs(units).max(axis=(1, 2), keepdims=True)
    return units / np.where(limit > 0, limit, 1)


def _sheet(cells: np.ndarray, title: str, columns: int = _COLUMNS, inches: float = _INCHES) -> Figure:
    """Draw images (count, side, side) in -1..1, or (count, side, side, 3) in 0..1, in rows."""
    count, side = cells.shape[:2]
    columns = min(columns, count)
    rows = -(-count // columns)
    sheet = np.full((rows * (side + _GAP) - _GAP, columns * (side + _GAP) - _GAP, *cells.shape[3:]), np.nan)
    if cells.ndim == 4:
        sheet[:] = 1.0  # white
    for number, cell in enumerate(cells):
        row, column = divmod(number, columns)
        top, left = row * (side + _GAP), column * (side + _GAP)
        sheet[top : top + side, left : left + side] = cell
    width = max(columns * inches, 5.0)
    figure = new_figure(width + 0.4, width * sheet.shape[0] / sheet.shape[1] + 0.6, title)
    axes = figure.add_subplot()
    axes.imshow(sheet, cmap=DIVERGING, vmin=-1, vmax=1, interpolation="nearest")
    axes.set_axis_off()
    return figure
