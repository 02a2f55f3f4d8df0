"""Settings of image models, and the papers' sizes by name.

Letters: ``I`` side of an image, ``P`` side of a patch, ``S`` tokens, ``C`` channels, ``L`` blocks, ``D`` hidden width
of a Mixer's network over tokens (the paper's D_S), ``F`` of the network over channels (its D_C), ``G`` groups.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smlp.config import MOST_LAYERS
from smlp.config.model import check_most
from smlp.config.settings import check_choices, require, setting
from smlp.errors import UserError

BLOCKS = ("mixer", "gmlp", "s_mixer", "sparse_mlp")
PERMUTATIONS = ("none", "random")
TOKEN_MIXINGS = ("shared", "untied", "grouped", "views")
POOLS = ("mean", "cls")
ACTIVATIONS = ("gelu", "gelu_tanh")

_SIZES = ("img_size", "patch_size", "in_chans", "embed_dim", "num_layers", "token_dim", "ffn_dim", "token_groups")
_SIZES_OR_ZERO = ("num_classes", "mixed_tokens", "mlp_width", "mlp_hidden")
#: settings that some kinds of blocks have
_OF_BLOCKS = {
    "token_mixing": ("mixer",),
    "pyramid": ("mixer",),
    "permutations": ("mixer", "s_mixer"),
    "mixed_tokens": ("mixer", "s_mixer"),
    "mask_density": ("sparse_mlp",),
    "mlp_width": ("sparse_mlp",),
    "mlp_hidden": ("sparse_mlp",),
}


@dataclass(frozen=True)
class ImageConfig:
    """A classifier of square images: patches, blocks, pooling, head.

    Raises:
        UserError: a value is out of range, or two do not fit together; the message names the fields and the numbers.
    """

    block: str = setting("mixer", "kind of the blocks", BLOCKS)
    img_size: int = setting(224, "I, side of an image in pixels")
    patch_size: int = setting(16, "P, side of a patch in pixels")
    in_chans: int = setting(3, "channels of an image")
    num_classes: int = setting(1000, "classes; 0 leaves out the head")
    embed_dim: int = setting(512, "C, features of a token")
    num_layers: int = setting(8, "L, blocks")
    token_dim: int = setting(256, "D, hidden width of a Mixer's network over tokens")
    ffn_dim: int = setting(2048, "F, hidden width over channels; a gMLP block splits it in halves")
    activation: str = setting("gelu", "exact GELU, or its approximation by tanh", ACTIVATIONS)
    norm_eps: float = setting(1e-6, "added to the variance in layer norms")
    gate_norm_eps: float = setting(1e-5, "the same in spatial gating units; timm has this value there")
    spatial_init_scale: float = setting(1e-3, "gMLP: weights over tokens start as U(-s/S, s/S) with this s: near zero")
    pool: str = setting("mean", "gMLP: mean of all tokens, or a class token and a representation layer as ViT", POOLS)
    drop_rate: float = setting(0.0, "dropout probability of the head's input")
    drop_path_rate: float = setting(
        0.0, "probability of dropping the last residual branch of an image; it rises linearly from 0 at the first"
    )
    token_mixing: str = setting(
        "shared",
        "Mixer: one network over tokens for all channels, one for each, or one that sees several channels at once, "
        "neighbours or learnt views",
        TOKEN_MIXINGS,
    )
    token_groups: int = setting(1, "G, channels that a grouped network over tokens sees at once")
    permutations: str = setting(
        "none", "Mixer, S-Mixer: random makes it an RP-Mixer, with fixed random orders of all features", PERMUTATIONS
    )
    mixed_tokens: int = setting(
        0,
        "Mixer, S-Mixer: S, tokens after the first block, whose skip connection is then LN(W x); 0 for one per patch",
    )
    mask_density: float = setting(1.0, "sparse MLP: p, share of the weights of a block that its mask keeps")
    mlp_width: int = setting(0, "sparse MLP: m, features of a block; 0 for all features of all tokens")
    mlp_hidden: int = setting(0, "sparse MLP: hidden features of a block; 0 for blocks of one layer")
    #: pairs of a block's index and the tokens that its network over tokens leaves
    pyramid: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.img_size, tuple | list):  # as timm gives it
            require(len(set(self.img_size)) == 1, f"img_size must be that of a square, got {self.img_size}")
            object.__setattr__(self, "img_size", self.img_size[0])
        steps = self.pyramid.items() if isinstance(self.pyramid, Mapping) else self.pyramid
        object.__setattr__(self, "pyramid", tuple(sorted((int(layer), int(tokens)) for layer, tokens in steps)))
        check_choices(self)
        for name in _SIZES:
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in _SIZES_OR_ZERO:
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        check_most(self, (*_SIZES, *_SIZES_OR_ZERO))
        require(self.num_layers <= MOST_LAYERS, f"num_layers must be at most {MOST_LAYERS:,}, got {self.num_layers}")
        require(
            self.img_size % self.patch_size == 0,
            f"img_size={self.img_size} must be a multiple of patch_size={self.patch_size}",
        )
        for name in ("drop_rate", "drop_path_rate"):
            require(0.0 <= getattr(self, name) < 1.0, f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("norm_eps", "gate_norm_eps", "spatial_init_scale"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be finite and not negative, got {value}")
        require(0 < self.mask_density <= 1, f"mask_density must be above 0 and at most 1, got {self.mask_density}")
        for name, kinds in _OF_BLOCKS.items():
            value = getattr(self, name)
            require(
                self.block in kinds or value == getattr(type(self), name),  # a default is an attribute of the class
                f"{name}={value} is for block={' or '.join(kinds)}, not {self.block}",
            )
        if self.block == "gmlp":
            require(self.ffn_dim % 2 == 0, f"ffn_dim must be even to be split in halves, got {self.ffn_dim}")
        else:
            require(self.pool == "mean", f"pool={self.pool} is for block=gmlp: a Mixer has no class token")
        groups = self.token_groups
        require(
            self.token_mixing in ("grouped", "views") or groups == 1,
            f"token_groups={groups} needs token_mixing grouped or views, got {self.token_mixing}",
        )
        require(self.embed_dim % groups == 0, f"token_groups={groups} must divide embed_dim={self.embed_dim}")
        require(
            not (self.mixed_tokens and self.pyramid),
            f"mixed_tokens={self.mixed_tokens} and pyramid={self.pyramid} both set the tokens of blocks: give one",
        )
        for layer, tokens in self.pyramid:
            require(
                0 <= layer < self.num_layers and 1 <= tokens <= self.num_tokens,
                f"pyramid={self.pyramid}: block {layer} of {self.num_layers} cannot leave {tokens} of "
                f"{self.num_tokens} tokens",
            )

    @property
    def grid(self) -> int:
        """Return the patches along a side."""
        return self.img_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """Return S: patches, and the class token if there is one."""
        return self.grid**2 + (self.pool == "cls")

    @property
    def width(self) -> int:
        """Return m, the features of all tokens together after the first block (Hayase and Karakida, 2024, 3.1)."""
        if self.block == "sparse_mlp":
            return self.mlp_width or self.num_tokens * self.embed_dim
        return self.tokens_of_layers()[0][1] * self.embed_dim

    def tokens_of_layers(self) -> list[tuple[int, int]]:
        """Return the tokens before and after the network over tokens of each block."""
        steps, before, tokens = dict(self.pyramid), self.num_tokens, []
        if self.mixed_tokens:
            steps = {0: self.mixed_tokens}
        for layer in range(self.num_layers):
            tokens.append((before, steps.get(layer, before)))
            before = tokens[-1][1]
        return tokens

    def drop_path_rates(self) -> list[float]:
        """Return the probabilities of dropping the residual branches, in order: two in a Mixer's block, one in gMLP's.

        They rise linearly from 0 to ``drop_path_rate`` (Tolstikhin et al., 2021, supplement, B; Huang et al., 2016).
        """
        branches = self.num_layers * (2 if self.block in ("mixer", "s_mixer") else 1)
        return [self.drop_path_rate * branch / max(branches - 1, 1) for branch in range(branches)]


def _mixer(patch: int, width: int, layers: int) -> dict[str, Any]:
    # flax's GELU is the approximation, so listing 1 and the published weights have it
    return {
        "patch_size": patch,
        "embed_dim": width,
        "num_layers": layers,
        "token_dim": width // 2,
        "ffn_dim": 4 * width,
        "activation": "gelu_tanh",
    }


def _gmlp(width: int, layers: int = 30) -> dict[str, Any]:
    return {"block": "gmlp", "embed_dim": width, "num_layers": layers, "ffn_dim": 6 * width}


_S_MIXER = {
    "block": "s_mixer",
    "patch_size": 4,
    "img_size": 32,
    "num_layers": 8,
    "num_classes": 10,
    "norm_eps": 1e-5,
}

#: settings by name. Mixer: Tolstikhin et al., 2021, Table 1; gMLP: Liu et al., 2021, Table 1. The tiny ones are for
#: small images and two cores.
PRESETS: dict[str, dict[str, Any]] = {
    "smlp_mixer_s32": _mixer(32, 512, 8),
    "smlp_mixer_s16": _mixer(16, 512, 8),
    "smlp_mixer_b32": _mixer(32, 768, 12),
    "smlp_mixer_b16": _mixer(16, 768, 12),
    "smlp_mixer_l32": _mixer(32, 1024, 24),
    "smlp_mixer_l16": _mixer(16, 1024, 24),
    "smlp_mixer_h14": _mixer(14, 1280, 32),
    "smlp_gmlp_ti16": _gmlp(128),
    "smlp_gmlp_s16": {**_gmlp(256), "drop_path_rate": 0.05},
    "smlp_gmlp_b16": {**_gmlp(512), "drop_path_rate": 0.2},
    "smlp_mixer_tiny": {**_mixer(4, 128, 8), "img_size": 32, "num_classes": 10},
    # Hayase and Karakida, 2024, section C.4, at Omega = 2^18: the same connections in a layer. The Mixer's permuted kin
    # has MLPs with a hidden layer
    "smlp_s_mixer": {**_S_MIXER, "embed_dim": 64, "mixed_tokens": 64},
    "smlp_rp_s_mixer": {**_S_MIXER, "embed_dim": 64, "mixed_tokens": 64, "permutations": "random"},
    "smlp_sparse_mlp": {**_S_MIXER, "block": "sparse_mlp", "embed_dim": 48, "mlp_width": 1619, "mask_density": 0.1},
    "smlp_rp_mixer_tiny": {**_mixer(4, 128, 8), "img_size": 32, "num_classes": 10, "permutations": "random"},
    "smlp_gmlp_tiny": {**_gmlp(96, 12), "patch_size": 4, "img_size": 32, "num_classes": 10},
}


def preset(name: str, **overrides: Any) -> ImageConfig:
    """Return the settings of a named model.

    Args:
        name: a key of :data:`PRESETS`.
        **overrides: fields of :class:`ImageConfig`.

    Raises:
        UserError: the name or a setting is unknown, or a value cannot be used.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(PRESETS)}"
        raise UserError(f"unknown image model {name!r}; {hint}")
    known = [field.name for field in dataclasses.fields(ImageConfig)]
    for key in overrides:
        require(key in known, f"unknown setting {key!r} of {name}; there are {', '.join(known)}")
    return ImageConfig(**{**PRESETS[name], **overrides})
