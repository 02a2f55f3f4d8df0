"""Effective width, density, connections and reuse of weights: by formula, and of every preset of this project.

A layer that mixes tokens or channels of a matrix X is a sparse layer over ``vec(X)``. Its *connections* are the
products of a weight and an entry of X that it makes for one input, and each weight makes several: the same matrix is
applied to every column, or to every row (Hayase and Karakida, 2024, section 4.1). *Executed* multiply-adds are what the
computation does for them, which is more where a triangle or a mask is multiplied as a dense matrix.

Letters: ``S`` tokens, ``C`` channels, ``m`` = S*C effective width, ``g`` expansion gamma, ``p`` density.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from smlp.config import ModelConfig
from smlp.config.presets import PRESETS
from smlp.config.presets import preset as text_preset
from smlp.config.settings import require
from smlp.costs.component import EXPERTS, PROJECTIONS, SPATIAL, Component
from smlp.costs.counted import build_without_weights
from smlp.costs.formula import components, root_of
from smlp.nn.blocks import TokenMixing
from smlp.nn.build import without_weights
from smlp.nn.layers import MaskedLinear, SpatialWeights
from smlp.vision.costs import ROOT
from smlp.vision.costs import components as image_components
from smlp.vision.model import ImageModel, NormedSkip, TokenLayer, TokenMLP
from smlp.vision.presets import PRESETS as IMAGE_PRESETS
from smlp.vision.presets import ImageConfig
from smlp.vision.presets import preset as image_preset


def mixer_connections(tokens: float, channels: float, expansion: float = 1) -> float:
    """Return Omega, the mean connections of a Mixer's layer: ``g (C S^2 + C^2 S) / 2`` (equation 14)."""
    return expansion * channels * tokens * (tokens + channels) / 2


def mixer_tokens(omega: float, channels: float, expansion: float = 1) -> float:
    """Return S for Omega connections: ``(sqrt(C^2 + 8 Omega / (g C)) - C) / 2``, from equation 14."""
    require(
        min(omega, channels, expansion) > 0,
        f"connections, channels and expansion must be above 0, got {omega:g}, {channels:g} and {expansion:g}",
    )
    return (math.sqrt(channels**2 + 8 * omega / (expansion * channels)) - channels) / 2


def widest(omega: float, expansion: float = 1) -> tuple[float, float]:
    """Return ``C* = S* = (Omega/g)^(1/3)`` and the largest width m they give, ``(Omega/g)^(2/3)`` (equation 15)."""
    return (omega / expansion) ** (1 / 3), (omega / expansion) ** (2 / 3)


def masked_connections(width: float, density: float, expansion: float = 1) -> float:
    """Return Omega of a masked layer: ``p g m^2`` (equation 13)."""
    return density * expansion * width**2


def layer_connections(config: ImageConfig) -> float:
    """Return Omega of an image model: the mean connections of the layers of its last block (equations 13, 14, S.42).

    A block that changes the number of tokens counts as one that has the new number before it, too: the paper's S.

    Raises:
        UserError: it is a gMLP, for which the paper defines none.
    """
    tokens, channels = config.tokens_of_layers()[-1][1], config.embed_dim
    if config.block == "sparse_mlp":
        return masked_connections(config.width, config.mask_density, (config.mlp_hidden or config.width) / config.width)
    if config.block == "s_mixer":
        return mixer_connections(tokens, channels)
    require(
        config.block == "mixer", f"connections of a layer are defined for Mixers and sparse MLPs, not {config.block}"
    )
    return channels * tokens * (config.token_dim + config.ffn_dim) / 2


@dataclass(frozen=True)
class Row:
    """One kind of layer of a model, seen as a wide, sparse layer; numbers are those of a single layer."""

    model: str
    #: kind of component, as in ``smlp flops``, and of its work
    kind: str
    work: str
    #: layers of this kind that are alike
    layers: int
    #: effective width of the layer's input, m
    width: int
    #: share of the entries of its wide matrices that are not zero; None where products of activations mix
    density: float | None
    connections: float
    #: distinct weights, biases and norms left out
    weights: int
    #: multiply-adds that the computation executes
    executed: float

    @property
    def uses(self) -> float:
        """Return how often each weight is used for one input."""
        return self.connections / self.weights


def text_rows(name: str, config: ModelConfig | None = None) -> list[Row]:
    """Return the rows of a language model, for one sequence of T tokens.

    Args:
        name: of the architecture.
        config: its settings, if they are not the preset's.
    """
    config = config or text_preset(name)
    parts, size = components(config), config.max_tokens
    model, width = build_without_weights(config), size * config.embed_dim
    return _rows(name, parts, model, root_of(config), size, lambda layer, work: width, not config.is_bidirectional)


def image_rows(name: str, config: ImageConfig | None = None) -> list[Row]:
    """Return the rows of an image model, for one image; arguments as in :func:`text_rows`."""
    config = config or image_preset(name)
    with without_weights():
        model = ImageModel(config)

    def width(layer: int, work: str) -> int:
        if config.block == "sparse_mlp":
            return config.width if layer else config.num_tokens * config.embed_dim
        before, after = config.tokens_of_layers()[layer]
        return (before if work == SPATIAL else after) * config.embed_dim

    return _rows(name, image_components(config), model, ROOT, config.num_tokens, width, False)


def preset_rows(names: Iterable[str] | None = None) -> list[Row]:
    """Return the rows of presets: of all image models and language models, or of the named ones.

    Raises:
        UserError: there is no such preset.
    """
    rows = []
    for name in [*IMAGE_PRESETS, *PRESETS] if names is None else names:
        rows += image_rows(name) if name in IMAGE_PRESETS else text_rows(name)
    return rows


def _rows(
    name: str,
    parts: list[Component],
    model: nn.Module,
    root: str,
    size: int,
    width: Callable[[int, str], int],
    is_causal: bool,
) -> list[Row]:
    """Return the rows of a model; equal layers are one row. ``width`` gives m of a layer and a kind of work."""
    found: Counter[tuple[Any, ...]] = Counter()
    paths = {part.name.removeprefix(f"{root}.") for part in parts}
    for part in parts:
        if part.layer is not None:
            path = part.name.removeprefix(f"{root}.")
            inner = tuple(other.removeprefix(f"{path}.") for other in paths if other.startswith(f"{path}."))
            for numbers in _layers(part, model.get_submodule(path), inner, size, is_causal):
                found[part.kind, numbers[0], width(part.layer, numbers[0]), *numbers[1:]] += 1
    return [Row(name, *key[:2], count, *key[2:]) for key, count in found.items()]


def _layers(
    part: Component, module: nn.Module, inner: tuple[str, ...], size: int, is_causal: bool
) -> Iterator[tuple[str, float | None, float, int, float]]:
    """Yield kind of work, density, connections, distinct weights and executed multiply-adds of a component.

    The work is that of the project's cost accounting; the weights are those of the real modules.
    """
    connected, executed = part.nominal_work(size, is_causal), part.nominal_work(size)
    linear, masked, spatial, experts = _weights(module, inner)
    if spatial is not None and executed.get(SPATIAL):
        weights, of_a_feature = spatial
        copies = size * executed[SPATIAL] / of_a_feature  # features, or groups of features, that are mixed apart
        share = connected[SPATIAL] / executed[SPATIAL]
        yield SPATIAL, share / copies, size * connected[SPATIAL], weights, size * executed[SPATIAL]
    if masked and executed.get(PROJECTIONS):
        density = sum(one.density * one.weight.numel() for one in masked) / sum(one.weight.numel() for one in masked)
        all_weights = linear + sum(one.weight.numel() for one in masked)
        kept = linear + sum(round(one.density * one.weight.numel()) for one in masked)
        work = size * executed[PROJECTIONS]
        copies = work / all_weights
        yield PROJECTIONS, (density if not linear else kept / all_weights) / copies, copies * kept, kept, work
    elif linear and executed.get(PROJECTIONS):
        work = size * executed[PROJECTIONS]
        yield PROJECTIONS, linear / work, size * connected[PROJECTIONS], linear, work
    if experts and part.assignments_per_token:
        k, num_experts = part.assignments_per_token, part.num_experts
        work = size * k * experts / num_experts
        yield EXPERTS, k / (num_experts * size), work, experts, work
    if spatial is not None and part.flops_per_pair:
        pairs = [
            size * (work[EXPERTS] - part.assignments_per_token * part.flops_per_assignment)
            for work in (connected, executed)
        ]
        yield SPATIAL, None, pairs[0], spatial[0], pairs[1]


def _weights(
    module: nn.Module, inner: tuple[str, ...]
) -> tuple[int, list[MaskedLinear], tuple[int, float] | None, int]:
    """Return the distinct weights of a component, without the components inside it.

    Returns:
        Those of its linear layers; its masked layers; those over tokens, with the entries of the matrices that one
        feature goes through; those of its experts over tokens.
    """
    linear, masked, experts = 0, [], 0
    spatial: tuple[int, float] | None = None
    over_tokens: tuple[str, ...] = ()
    for path, one in module.named_modules():
        if any(path == name or path.startswith(f"{name}.") for name in inner):
            continue
        if isinstance(one, SpatialWeights):
            size = one.max_tokens
            distinct = size * (size + 1) // 2 if one.is_causal and not one.is_toeplitz else one.weight[0].numel()
            spatial = one.weight.size(0) * distinct, float(size * size)
        elif isinstance(one, TokenMLP | TokenMixing | TokenLayer | NormedSkip):
            names = ("fc1", "fc2", "tokens_in", "tokens_out", "proj")
            sizes = [
                value.numel()
                for name, value in one.named_parameters()
                if name in ("weight", *(f"{n}.weight" for n in names))
            ]
            networks = one.fc1.weight.size(0) if isinstance(one, TokenMLP) and one.is_untied else 1
            spatial = sum(sizes), sum(sizes) / networks
            over_tokens = tuple(f"{path}.{name}".removeprefix(".") for name in names)
        elif isinstance(one, MaskedLinear):
            masked.append(one)
        elif isinstance(one, nn.Linear) and path not in over_tokens:
            linear += one.weight.numel()
        elif hasattr(one, "expert_ids"):
            experts += sum(value.numel() for value in one.parameters(recurse=False) if value.dim() == 3)
    return linear, masked, spatial, experts
