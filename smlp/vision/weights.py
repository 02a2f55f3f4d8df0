"""Weights between timm's models and ours, and at other resolutions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from smlp.config.settings import require
from smlp.vision.presets import ImageConfig

_TIMMS = re.compile(r"\.gate\.proj\.(weight|bias)$")
_OURS = re.compile(r"\.gate\.heads\.(weight|bias)$")
_OVER_TOKENS = re.compile(r"\.mlp_tokens\.(fc1|fc2)\.(weight|bias)$")


def from_timm(state: Mapping[str, Tensor], model: Any = None) -> dict[str, Tensor]:
    """Return the weights of timm's ``mixer_*`` and ``gmlp_*`` models under our names; our own stay as they are.

    Only those of a spatial gating unit differ: ours has an axis of heads.

    Args:
        state: of ``timm.create_model("gmlp_s16_224")``, for example.
        model: unused; timm passes it.
    """
    return {
        _TIMMS.sub(r".gate.heads.\1", name): tensor.unsqueeze(0) if _TIMMS.search(name) else tensor
        for name, tensor in state.items()
    }


def to_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights under the names of timm's ``mixer_*`` and ``gmlp_*`` models."""
    return {
        _OURS.sub(r".gate.proj.\1", name): tensor.squeeze(0) if _OURS.search(name) else tensor
        for name, tensor in state.items()
    }


def can_change_resolution(config: ImageConfig) -> bool:
    """Return whether :func:`change_resolution` has a rule for a model."""
    return (
        config.block in ("mixer", "gmlp")
        and config.token_mixing in ("shared", "untied")
        and not config.pyramid
        and config.pool == "mean"
        and config.permutations == "none"
        and not config.mixed_tokens
    )


def change_resolution(
    state: Mapping[str, Tensor], config: ImageConfig, img_size: int
) -> tuple[dict[str, Tensor], ImageConfig]:
    """Return the weights and settings of the same model for images of another size, to be fine-tuned there.

    The patches keep their size, so that there are more of them. In a Mixer whose grid grows by a whole factor k, the
    hidden width over tokens grows by k^2, and the new network over tokens applies the old one to each of k x k parts
    of the image (Tolstikhin et al., 2021, supplement, section C): its matrices are block-diagonal copies, with the
    tokens of a part in the places where they stand in the whole image's raster order. In a gMLP every row of the new
    matrix is the filter of the old grid's central patch, shifted to the row's own place, and zero beyond the old grid's
    extent (Liu et al., 2021, appendix E.1); every bias is that of the central patch.

    Args:
        state: of an :class:`smlp.vision.model.ImageModel`, under our names.
        config: of that model.
        img_size: new side of an image.

    Raises:
        UserError: the sizes do not fit, or the model has no rule for another resolution.
    """
    new = dataclasses.replace(config, img_size=img_size)
    require(
        can_change_resolution(config),
        f"no change of resolution is defined for block={config.block}, token_mixing={config.token_mixing}, "
        f"pyramid={config.pyramid}, pool={config.pool}, permutations={config.permutations}, "
        f"mixed_tokens={config.mixed_tokens}",
    )
    for name, tensor in state.items():
        over = _num_tokens(name, tensor)
        require(
            over in (None, config.grid**2),
            f"{name} is over {over} tokens, and images of {config.img_size} pixels have {config.grid**2} patches",
        )
    if config.block == "gmlp":
        return {name: _shifted(name, tensor, config.grid, new.grid) for name, tensor in state.items()}, new
    factor, rest = divmod(new.grid, config.grid)
    require(
        rest == 0,
        f"img_size={img_size}: {new.grid} patches along a side are not a multiple of the {config.grid} at "
        f"img_size={config.img_size}, as a Mixer needs",
    )
    new = dataclasses.replace(new, token_dim=factor**2 * config.token_dim)
    return {name: _block_diagonal(name, tensor, config.grid, factor) for name, tensor in state.items()}, new


def img_size_of(state: Mapping[str, Tensor], patch_size: int) -> int | None:
    """Return the side of the images that weights over tokens are for; None if there are none."""
    numbers = (_num_tokens(name, tensor) for name, tensor in state.items())
    found = next((number for number in numbers if number is not None), None)
    return None if found is None else math.isqrt(found) * patch_size


def _num_tokens(name: str, tensor: Tensor) -> int | None:
    """Return the tokens that a tensor has a number for; None for one that has none for tokens."""
    rows, columns = (1, 1, *tensor.shape)[-2:]
    if _OURS.search(name):
        return columns
    found = _OVER_TOKENS.search(name)
    kind = found.groups() if found else None
    return {("fc1", "weight"): columns, ("fc2", "weight"): rows, ("fc2", "bias"): columns}.get(kind)


def _shifted(name: str, tensor: Tensor, grid: int, new_grid: int) -> Tensor:
    """Return a gMLP's weights (h, S, S) or biases (h, S) over tokens for a new grid; other tensors as they are."""
    found = _OURS.search(name)
    if not found or new_grid == grid:
        return tensor
    centre = grid // 2
    middle_h = tensor[:, centre * grid + centre]
    if found[1] == "bias":
        return middle_h.unsqueeze(1).repeat(1, new_grid**2)
    # distances from -(g-1) to g-1 on either axis, and zeros where the old filter has nothing
    reach = new_grid - 1
    padded_hLL = middle_h.new_zeros(len(middle_h), 2 * reach + 1, 2 * reach + 1)
    rows = torch.arange(grid, device=tensor.device) - centre
    seen = rows[rows.abs() <= reach]
    filter_hgg = middle_h.unflatten(1, (grid, grid))[:, seen + centre][:, :, seen + centre]
    padded_hLL[:, (seen + reach).unsqueeze(1), seen + reach] = filter_hgg
    place = torch.arange(new_grid, device=tensor.device)
    distance = place - place.unsqueeze(1) + reach  # of a column's patch from a row's, along one axis
    return padded_hLL[:, distance[:, None, :, None], distance[None, :, None, :]].reshape(-1, new_grid**2, new_grid**2)


def _block_diagonal(name: str, tensor: Tensor, grid: int, factor: int) -> Tensor:
    """Return a Mixer's weights over tokens for a grid ``factor`` times as large; other tensors as they are."""
    found = _OVER_TOKENS.search(name)
    if not found or factor == 1:
        return tensor
    layer, kind = found.groups()
    place = torch.arange((factor * grid) ** 2, device=tensor.device).view(factor, grid, factor, grid)
    raster = place.transpose(1, 2).flatten().argsort()  # where the token at each place of the image stands, by parts
    if kind == "weight":
        copies = torch.eye(factor**2, dtype=tensor.dtype, device=tensor.device)
        tensor = torch.kron(copies if tensor.dim() == 2 else copies.unsqueeze(0), tensor)
        return tensor[..., raster] if layer == "fc1" else tensor[..., raster, :]
    tensor = torch.cat([tensor] * factor**2, dim=-1)
    return tensor if layer == "fc1" else tensor[..., raster]
