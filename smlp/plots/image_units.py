"""Draw what image models have learnt: units over tokens, stem units and spatial gates, of our checkpoints and timm's.

Letters: ``D`` hidden units over tokens, ``S`` tokens, ``g`` patches along a side (S = g*g), ``C`` features, ``P`` side
of a patch in pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from smlp.errors import UserError
from smlp.plots.drawing import DIVERGING, NOTHING, new_figure, save

_TOKEN_UNITS = re.compile(r"blocks\.(\d+)\.mlp_tokens\.fc1\.weight")
_SKIP = re.compile(r"blocks\.(\d+)\.skip\.")
_GATES = re.compile(r"blocks\.(\d+)\.mlp_channels\.gate\.(?:heads|proj)\.weight")
_STEM = "stem.proj.weight"
#: the paper draws the first two token MLPs of a Mixer
NUM_MIXERS = 2
NUM_GATES, _ROWS_OF_A_GATE, _UNITS_IN_A_ROW = 6, 8, 24
_INCHES = 9.0


def mean_frequency(units_Dgg: np.ndarray) -> np.ndarray:
    """Return the mean frequency of each image's power spectrum, (D,), in cycles per patch; 0 for a constant image.

    The supplement of MLP-Mixer sorts by "a heuristic that tries to show low frequency filters first", which it does not
    print; this is ours.
    """
    side = units_Dgg.shape[-1]
    power = np.abs(np.fft.fft2(units_Dgg)) ** 2
    each = np.fft.fftfreq(side)
    frequency = np.hypot(each[:, None], each[None, :])
    return (power * frequency).sum(axis=(1, 2)) / np.maximum(power.sum(axis=(1, 2)), 1e-30)


def paired_order(units_Dgg: np.ndarray) -> list[int]:
    """Order units by frequency, each followed by its closest inverse, the one of least cosine among those left.

    Args:
        units_Dgg: images of units.

    Returns:
        Every index once (supplement of MLP-Mixer, section D and Figure 1).
    """
    flat = units_Dgg.reshape(len(units_Dgg), -1)
    unit = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-30)
    order: list[int] = []
    left = np.argsort(mean_frequency(units_Dgg), kind="stable")
    while left.size:
        first, left = left[0], left[1:]
        order.append(int(first))
        if left.size:
            place = int((unit[left] @ unit[first]).argmin())  # a row at a time: a file may have very many units
            order.append(int(left[place]))
            left = np.delete(left, place)
    return order


def token_units(state: Mapping[str, torch.Tensor]) -> dict[int, np.ndarray]:
    """Return the units (D, g, g) of each block's token MLP, for Mixers whose channels share one over all tokens.

    Blocks whose tokens are no patches are left out: those after a block that mixes tokens into others, which has a skip
    connection with weights, and those of RP-Mixers, which permute all features.
    """
    found = {}
    first_mixing = min((int(match[1]) for match in map(_SKIP.match, state) if match), default=math.inf)
    for name, tensor in state.items():
        match = _TOKEN_UNITS.fullmatch(name)
        if not match or int(match[1]) > first_mixing or f"blocks.{match[1]}.orders.0.index" in state:
            continue
        if tensor.dim() == 2 and (side := _side(tensor.size(1))):
            found[int(match[1])] = tensor.float().numpy().reshape(-1, side, side)
    return found


def gate_rows(state: Mapping[str, torch.Tensor]) -> dict[int, np.ndarray]:
    """Return the rows (S, g, g) of each block's spatial gate: the filter of every token; a class token is left out."""
    found = {}
    for name, tensor in state.items():
        if match := _GATES.fullmatch(name):
            rows_SS = tensor.float().numpy().reshape(tensor.shape[-2:])
            without = len(rows_SS) - (0 if _side(len(rows_SS)) else 1)
            if side := _side(without):
                found[int(match[1])] = rows_SS[-without:, -without:].reshape(-1, side, side)
    return found


def _side(tokens: int) -> int:
    """Return the side of a square with this many tokens; 0 if there is none."""
    side = math.isqrt(tokens)
    return side if side * side == tokens else 0


def draw_image_units(state: Mapping[str, torch.Tensor], name: str, out: Path, file_format: str = "png") -> list[Path]:
    """Draw what a checkpoint has: token-mixing units, spatial gates, stem units.

    Args:
        state: weights under our names or timm's.
        name: of the model, for the titles.
        out: folder.
        file_format: png or svg.

    Returns:
        The files.

    Raises:
        UserError: the weights are of another model, or cannot be drawn.
    """
    files = []
    mixers, gates, stem = token_units(state), gate_rows(state), state.get(_STEM)
    if stem is None or stem.dim() != 4 or not (mixers or gates):
        raise UserError(
            f"{name} is not an MLP-Mixer or gMLP whose tokens are patches on a square: nothing can be drawn"
        )
    shown = (stem.float().numpy(), *mixers.values(), *gates.values())
    if not all(np.isfinite(values).all() for values in shown):
        raise UserError(f"{name} has weights that are not finite: there is nothing to see in them")
    for block in sorted(mixers)[:NUM_MIXERS]:
        units = mixers[block]
        title = f"{name}, block {block}: hidden units over tokens, low frequencies first, each with its closest inverse"
        path = out / f"token_units_{block}.{file_format}"
        files.append(_mosaic(_signed(units[paired_order(units)]), title, path))
    if gates:
        blocks = sorted(gates)
        places = np.linspace(0, len(blocks) - 1, min(NUM_GATES, len(blocks))).round().astype(int)
        chosen = [blocks[place] for place in places]
        side = gates[chosen[0]].shape[-1]
        tokens = np.linspace(0, side * side - 1, min(_ROWS_OF_A_GATE, side * side)).round().astype(int)
        shown = np.concatenate([_signed(gates[block][tokens]) for block in chosen])
        title = (
            f"{name}: rows of the spatial gates of blocks {', '.join(map(str, chosen))}, from top to bottom, for the "
            f"tokens {', '.join(map(str, tokens))}"
        )
        files.append(_mosaic(shown, title, out / f"gate_filters.{file_format}", len(tokens)))
    pixels = stem.float().permute(0, 2, 3, 1).numpy()
    title = f"{name}: linear projections of the stem, {pixels.shape[1]} x {pixels.shape[2]} pixels"
    if pixels.shape[3] == 3:
        low, high = pixels.min(axis=(1, 2, 3), keepdims=True), pixels.max(axis=(1, 2, 3), keepdims=True)
        tiles = (pixels - low) / np.maximum(high - low, 1e-30)
    else:
        tiles = _signed(pixels.mean(axis=3))
    return [*files, _mosaic(tiles, title, out / f"stem_units.{file_format}")]


def _signed(tiles: np.ndarray) -> np.ndarray:
    """Scale each image to -1 ... 1, zero staying zero."""
    return tiles / np.maximum(np.abs(tiles).max(axis=(1, 2), keepdims=True), 1e-30)


def _mosaic(tiles: np.ndarray, title: str, path: Path, columns: int = _UNITS_IN_A_ROW) -> Path:
    """Draw images (N, h, w) of -1 to 1, or (N, h, w, 3) of 0 to 1, in rows with a gap of one cell between them."""
    count, height, width = tiles.shape[:3]
    columns = min(columns, count)
    rows = -(-count // columns)
    between = float(NOTHING) if tiles.ndim == 4 else np.nan  # in both, the background's grey
    canvas = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1, *tiles.shape[3:]), between)
    for number, tile in enumerate(tiles):
        top, left = number // columns * (height + 1), number % columns * (width + 1)
        canvas[top : top + height, left : left + width] = tile
    figure = new_figure(_INCHES, 0.6 + _INCHES * canvas.shape[0] / canvas.shape[1], title)
    axes = figure.subplots()
    axes.set_facecolor(NOTHING)
    axes.imshow(canvas, cmap=DIVERGING, vmin=-1, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    return save(figure, path)
