"""Settings of every model family that cost the same: FLOPs per token of the forward pass, by formula.

A family starts from its preset of the size that is asked for, brought to the common context, vocabulary and width.
Then its numbers of layers change, or its feed-forward width, until the cost is that of the target. Every match is
within 0.5 % of the target, so that any two are within 1 % of each other.

Letters: ``X`` target, ``N1`` dense and ``N2`` sparse layers, ``F`` feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from smlp.config import ModelConfig, differences
from smlp.config.presets import FROM_TASK, PRESETS, preset
from smlp.costs.formula import flops_per_token
from smlp.errors import UserError

FAMILIES = (
    "dense_lm",
    "gmlp_lm",
    "smlp",
    "smlp_partial",
    "smlp_leaky",
    "gmlp_moe",
    "gshard_lm",
    "switch_lm",
    "base_lm",
    "hash_lm",
)
_SIZES = ("", "_tiny", "_large")
#: largest relative difference from the target
TOLERANCE = 0.005
#: feed-forward widths are multiples of this
FFN_STEP = 8
#: largest relative change of the feed-forward width if whole layers are too coarse
FFN_RANGE = 0.25
#: largest change of the preset's share of sparse layers that is preferred to a change of the feed-forward width
SHARE_RANGE = 0.05
#: deeper models are not tried
MAX_LAYERS = 500


@dataclass(frozen=True)
class Match:
    """The settings that were found for a family."""

    #: the preset that the settings are compared with
    arch: str
    #: start of the search: the preset with the settings that all families share
    start: ModelConfig
    config: ModelConfig
    #: X
    target: float

    @property
    def flops_per_token(self) -> float:
        """Return the multiply-adds of the forward pass for each token."""
        return flops_per_token(self.config)

    @property
    def difference(self) -> float:
        """Return the relative difference from the target."""
        return self.flops_per_token / self.target - 1

    @property
    def matches(self) -> bool:
        """Return whether the difference is within :data:`TOLERANCE`."""
        return abs(self.difference) <= TOLERANCE

    @property
    def share_moved(self) -> float:
        """Return how far the share of sparse layers is from where the search began."""

        def share(config: ModelConfig) -> float:
            return config.num_sparse_layers / config.num_layers

        return abs(share(self.config) - share(self.start))

    @property
    def width_moved(self) -> float:
        """Return the relative distance of the feed-forward width from where the search began."""
        return abs(self.config.ffn_dim / self.start.ffn_dim - 1)

    def arguments(self) -> list[str]:
        """Return arguments of ``fairseq-train``: the architecture, its layers, and what differs from its preset. The
        vocabulary comes with the data."""
        shown = {name: getattr(self.config, name) for name in ("num_dense_layers", "num_sparse_layers")}
        other = differences(self.config, preset(self.arch))
        shown |= {name: value for name, value in other.items() if name not in FROM_TASK}
        shown["tokens_per_sample"] = self.config.max_tokens
        words = [("--" + name.replace("_", "-"), str(value)) for name, value in shown.items()]
        return ["--arch", self.arch, *(word for pair in words for word in pair)]


def families() -> list[str]:
    """Return :data:`FAMILIES` and the architectures of plugins, each in one size."""
    found = list(FAMILIES)
    for arch in PRESETS.added():
        base = next((arch.removesuffix(size) for size in _SIZES[1:] if arch.endswith(size)), arch)
        family = base if base in PRESETS else arch
        if family not in found:
            found.append(family)
    return found


def match(
    family: str, target: float, vary: str = "layers", size: str = "", overrides: dict[str, Any] | None = None
) -> Match:
    """Return the settings of a family that come nearest to a target; see :attr:`Match.matches`.

    Args:
        family: one of :func:`families`.
        target: X, multiply-adds of the forward pass for each token at the full context.
        vary: ``layers`` keeps the share of sparse layers as near to the preset's as possible, and changes the
            feed-forward width as well if whole layers are too coarse; ``ffn`` changes only that width.
        size: start from the preset of this size where the family has one: ``""``, ``"_tiny"`` or ``"_large"``.
        overrides: settings that all families share, such as ``max_tokens``; the feed-forward width follows
            ``embed_dim`` in proportion.

    Raises:
        UserError: the target is not positive, or the family cannot be built with these settings.
    """
    check_target(target)
    arch = family + size if family + size in PRESETS else family
    start = _start(arch, overrides or {})
    if vary == "ffn":
        return Match(arch, start, _with_nearest_width(start, target, math.inf), target)
    whole = [Match(arch, start, config, target) for config in _layer_choices(start, target)]
    found = [choice for choice in whole if choice.matches and choice.share_moved <= SHARE_RANGE]
    if found:
        return min(found, key=lambda choice: (choice.share_moved, abs(choice.difference)))
    choices = list(whole)
    for around in (0, 3):  # steps of F may pass over the target with every number of layers next to it
        configs = _layer_choices(start, target, around)
        choices += [Match(arch, start, _with_nearest_width(config, target, FFN_RANGE), target) for config in configs]
        found = [choice for choice in choices if choice.matches]
        if found:
            return min(found, key=lambda choice: 2 * choice.share_moved + choice.width_moved)
    return min(choices, key=lambda choice: abs(choice.difference))


def check_target(target: float) -> None:
    """Refuse a target that no model can cost.

    Raises:
        UserError: the target is not a positive number.
    """
    if not 0 < target < math.inf:
        raise UserError(f"the target must be a positive number of FLOPs per token, got {target}")


def like(arch: str, overrides: dict[str, Any] | None = None) -> tuple[float, str, dict[str, Any]]:
    """Return the target, size and shared settings for matching an architecture: the arguments of :func:`match`.

    Args:
        arch: the architecture.
        overrides: settings that all families share, this one too.

    Raises:
        UserError: it is unknown, or cannot be built with these settings.
    """
    config = _start(arch, overrides or {})
    size = next((size for size in _SIZES if size and arch.endswith(size)), "_large" if "enlarged" in arch else "")
    shared = {"vocab_size": config.vocab_size, "max_tokens": config.max_tokens, "embed_dim": config.embed_dim}
    return flops_per_token(config), size, shared


def _start(arch: str, overrides: dict[str, Any]) -> ModelConfig:
    """Return the preset with shared settings; width and heads of its blocks follow the embedding's."""
    config = preset(arch)
    width = overrides.get("embed_dim", config.embed_dim)
    scaled = max(FFN_STEP, round(config.ffn_dim * width / config.embed_dim / FFN_STEP) * FFN_STEP)
    own = {"ffn_dim": scaled, "num_heads": math.gcd(config.num_heads, width), **overrides}
    if not config.num_sparse_layers:
        own.pop("num_experts", None)
    return preset(arch, **own)


def _layer_choices(start: ModelConfig, target: float, around: int = 0) -> Iterator[ModelConfig]:
    """Yield, for each number of sparse layers, the two numbers of dense layers next to the target, and more around."""

    def cost(num_dense: int, num_sparse: int) -> float:
        return flops_per_token(replace(start, num_dense_layers=num_dense, num_sparse_layers=num_sparse))

    dense = cost(2, 0) - cost(1, 0)
    sparse = cost(1, 1) - cost(1, 0) if start.num_sparse_layers else dense
    for_layers = target - (cost(1, 0) - dense)
    if for_layers / min(dense, sparse) > MAX_LAYERS:
        raise UserError(
            f"{target:.4g} FLOPs per token would take more than {MAX_LAYERS} layers of embed_dim={start.embed_dim}"
        )
    for num_sparse in range(1, max(1, math.ceil(for_layers / sparse)) + 1) if start.num_sparse_layers else (0,):
        least = num_sparse if start.sparse_placement == "alternate" else int(num_sparse == 0)
        wanted = (for_layers - num_sparse * sparse) / dense
        first, last = math.floor(wanted) - around, math.ceil(wanted) + around
        for num_dense in sorted({max(number, least) for number in range(first, last + 1)}):
            yield replace(start, num_dense_layers=num_dense, num_sparse_layers=num_sparse)


def _with_nearest_width(config: ModelConfig, target: float, most: float) -> ModelConfig:
    """Return the configuration with the cost nearest to the target; F is a multiple of 8, moved by at most ``most``.

    The cost is linear in F. Halves of F must divide into the heads of spatial gating units.
    """
    step = math.lcm(FFN_STEP, *(kind.ffn_multiple(config) for kind in config.block_kinds))
    low, high = replace(config, ffn_dim=step), replace(config, ffn_dim=2 * step)
    slope = flops_per_token(high) - flops_per_token(low)
    wanted = 1 + round((target - flops_per_token(low)) / slope)
    if most < math.inf:
        smallest, largest = ((1 + sign * most) * config.ffn_dim / step for sign in (-1, 1))
        wanted = min(max(wanted, math.ceil(smallest)), math.floor(largest))
    return replace(config, ffn_dim=max(wanted, 1) * step)
