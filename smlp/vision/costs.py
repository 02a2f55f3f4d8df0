"""Parameters and multiply-adds of image models by formula, as in :mod:`smlp.costs`; tests compare them with fvcore's.

Letters: ``S`` tokens, ``C`` channels, ``D`` hidden width over tokens, ``F`` over channels, ``G`` groups, ``K`` classes.
"""

from __future__ import annotations

from collections.abc import Iterator

from smlp.costs.component import LAYER_NORM_FLOPS, NORMS, OUTPUT, PROJECTIONS, SPATIAL, Component, linear_parameters
from smlp.vision.presets import ImageConfig

#: the component that is the whole model without its named parts
ROOT = "model"


def components(config: ImageConfig) -> list[Component]:
    """Return the parts of a model, named by the paths of their modules; work is per token of the stem's S."""
    S, C, K = config.num_tokens, config.embed_dim, config.num_classes
    patch = config.in_chans * config.patch_size**2
    tokens = config.tokens_of_layers()
    is_cls = config.pool == "cls"
    is_flat = config.block == "sparse_mlp"
    own = (not is_flat) * 2 * C + is_cls * (C + linear_parameters(C, C))
    norms = (not is_flat) * LAYER_NORM_FLOPS * C * tokens[-1][1] / S
    features = config.width if is_flat else C
    head = linear_parameters(features, K) if K else 0
    parts = [
        Component(
            ROOT, None, "norm and class token", other_params=own, work={NORMS: norms, OUTPUT: is_cls * C * C / S}
        ),
        Component(
            "stem",
            None,
            "stem",
            other_params=linear_parameters(patch, C),
            work={PROJECTIONS: patch * C * config.grid**2 / S},
        ),
    ]
    of_block = _BLOCKS[config.block]
    for layer, (before, after) in enumerate(tokens):
        parts += of_block(config, layer, before, after)
    return [*parts, Component("head", None, "head", other_params=head, work={OUTPUT: features * K / S})]


def parameters(config: ImageConfig) -> int:
    """Return the number of parameters."""
    return sum(part.other_params for part in components(config))


def multiply_adds(config: ImageConfig, norms: bool = False) -> int:
    """Return the multiply-adds of an image's forward pass.

    Args:
        config: of the model.
        norms: whether to count layer norms, at 5 per element, as fvcore does; the papers count products alone.
    """
    total = sum(work for part in components(config) for kind, work in part.work.items() if norms or kind != NORMS)
    return round(config.num_tokens * total)


def exaflops(config: ImageConfig, images: float) -> float:
    """Return the operations of training on so many images, in 10^18: two for a multiply-add, in three passes."""
    return 6 * multiply_adds(config) * images / 1e18


def _mixer_block(config: ImageConfig, layer: int, before: int, after: int) -> Iterator[Component]:
    S, C, D, F, G = config.num_tokens, config.embed_dim, config.token_dim, config.ffn_dim, config.token_groups
    name = f"blocks.{layer}"
    networks = C if config.token_mixing == "untied" else 1
    views = C * C if config.token_mixing == "views" else 0
    yield Component(
        name,
        layer,
        "channel MLP and norms",
        other_params=4 * C + linear_parameters(C, F) + linear_parameters(F, C),
        work={NORMS: LAYER_NORM_FLOPS * C * (before + after) / S, PROJECTIONS: 2 * C * F * after / S},
    )
    yield Component(
        f"{name}.mlp_tokens",
        layer,
        "token MLP",
        other_params=networks * (linear_parameters(G * before, D) + linear_parameters(D, G * after)) + views,
        work={SPATIAL: C * D * (before + after) / S, PROJECTIONS: views * before / S},
        num_mixed=before,
    )
    yield from _skip(config, layer, before, after)


def _gmlp_block(config: ImageConfig, layer: int, before: int, after: int) -> Iterator[Component]:
    S, C, F, f = config.num_tokens, config.embed_dim, config.ffn_dim, config.ffn_dim // 2
    name = f"blocks.{layer}"
    yield Component(
        name,
        layer,
        "gMLP block",
        other_params=2 * C + linear_parameters(C, F) + linear_parameters(f, C),
        work={NORMS: LAYER_NORM_FLOPS * C, PROJECTIONS: C * F + f * C},
    )
    yield Component(
        f"{name}.mlp_channels.gate",
        layer,
        "spatial gating",
        other_params=2 * f + S * S + S,
        work={NORMS: LAYER_NORM_FLOPS * f, SPATIAL: S * f},
        num_mixed=S,
    )


def _s_mixer_block(config: ImageConfig, layer: int, before: int, after: int) -> Iterator[Component]:
    S, C, name = config.num_tokens, config.embed_dim, f"blocks.{layer}"
    yield Component(
        name,
        layer,
        "channel layer and norms",
        other_params=4 * C + C * C,
        work={NORMS: LAYER_NORM_FLOPS * C * (before + after) / S, PROJECTIONS: C * C * after / S},
    )
    mixing = {SPATIAL: C * before * after / S}
    yield Component(
        f"{name}.mlp_tokens", layer, "token layer", other_params=before * after, work=mixing, num_mixed=before
    )
    yield from _skip(config, layer, before, after)


def _skip(config: ImageConfig, layer: int, before: int, after: int) -> Iterator[Component]:
    S, C = config.num_tokens, config.embed_dim
    if config.mixed_tokens and layer == 0:
        yield Component(
            f"blocks.{layer}.skip",
            layer,
            "skip over tokens",
            other_params=before * after + 2 * C,
            work={NORMS: LAYER_NORM_FLOPS * C * after / S, SPATIAL: C * before * after / S},
            num_mixed=before,
        )


def _sparse_block(config: ImageConfig, layer: int, before: int, after: int) -> Iterator[Component]:
    S, m, hidden = config.num_tokens, config.width, config.mlp_hidden
    inputs = S * config.embed_dim if layer == 0 else m
    weights = (inputs + m) * hidden if hidden else inputs * m
    yield Component(
        f"blocks.{layer}",
        layer,
        "masked MLP" if hidden else "masked layer",
        other_params=2 * inputs + weights,
        work={NORMS: LAYER_NORM_FLOPS * inputs / S, PROJECTIONS: weights / S},
    )


_BLOCKS = {"mixer": _mixer_block, "s_mixer": _s_mixer_block, "sparse_mlp": _sparse_block, "gmlp": _gmlp_block}
