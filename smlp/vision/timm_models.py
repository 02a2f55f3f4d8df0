"""Register the image models with timm: ``timm.create_model("smlp_mixer_s16")`` works once this module is imported.

timm's training script imports it with ``--device-modules smlp.vision.timm_models``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smlp.errors import UserError
from smlp.launch.machine import let_torchvision_load
from smlp.vision.model import ImageModel
from smlp.vision.presets import PRESETS, ImageConfig, preset
from smlp.vision.weights import from_timm

let_torchvision_load()
try:
    from timm.models import build_model_with_cfg, generate_default_cfgs, get_pretrained_cfg, register_model
except ImportError as error:
    raise UserError(f"image models in timm need timm ({error}): pip install -e '.[vision]'") from error

#: names of timm's global_pool for ours
_POOLS = {"avg": "mean", "token": "cls"}
#: weights that timm publishes, in its own format
_PUBLISHED = {
    "smlp_mixer_b16": "mixer_b16_224.goog_in21k_ft_in1k",
    "smlp_mixer_l16": "mixer_l16_224.goog_in21k_ft_in1k",
    "smlp_gmlp_s16": "gmlp_s16_224.ra3_in1k",
}


def _default_cfg(name: str) -> dict[str, Any]:
    """Return what timm needs to know about a model's input, head and published weights."""
    config: ImageConfig = preset(name)
    own = {
        "num_classes": config.num_classes,
        "input_size": (config.in_chans, config.img_size, config.img_size),
        "fixed_input_size": True,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "stem.proj",
        "classifier": "head",
    }
    published = get_pretrained_cfg(_PUBLISHED[name]) if name in _PUBLISHED else None
    if published is not None:
        own.update(url=published.url, hf_hub_id=published.hf_hub_id, license=published.license)
    return own


def _entry_point(name: str) -> Callable[..., ImageModel]:
    """Return the function by which timm makes a model."""

    def build(**settings: Any) -> ImageModel:
        pool = settings.pop("global_pool", None)
        if pool:
            settings["pool"] = _POOLS.get(pool, pool)
        model = ImageModel(preset(name, **settings))
        model.global_pool = "" if pool == "" else model.global_pool  # all tokens
        return model

    def create(pretrained: bool = False, **settings: Any) -> ImageModel:
        return build_model_with_cfg(build, name, pretrained, pretrained_filter_fn=from_timm, **settings)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"Return {name}; settings are fields of :class:`smlp.vision.presets.ImageConfig`."
    return create


default_cfgs = generate_default_cfgs({name: _default_cfg(name) for name in PRESETS})
for _name in PRESETS:
    globals()[_name] = register_model(_entry_point(_name))
