"""Registers ``resmlp_small``: timm's ResMLP with settings, which timm's own names do not take.

    smlp vision train --device-modules small_resmlp --model resmlp_small --model-kwargs num_blocks=8 embed_dim=96 ...

with this folder in PYTHONPATH.
"""

from typing import Any

from timm.models import register_model
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock


@register_model
def resmlp_small(pretrained: bool = False, **settings: Any) -> MlpMixer:
    """Return a ResMLP (Touvron et al., 2021) for images of 32 pixels and patches of 4."""
    names = {name: settings.pop(name, None) for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")}
    if pretrained:
        raise ValueError(f"resmlp_small has no published weights ({names})")
    sizes = {"img_size": 32, "patch_size": 4, "mlp_ratio": 4, "block_layer": ResBlock, "norm_layer": Affine}
    model = MlpMixer(**{**sizes, **settings})
    model.pretrained_cfg = {"classifier": "head"}
    return model
