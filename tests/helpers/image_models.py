"""Small image models with random weights."""

import torch

from smlp.vision.model import ImageModel
from smlp.vision.presets import preset

SMALL = {"img_size": 12, "patch_size": 4, "embed_dim": 8, "token_dim": 6, "ffn_dim": 16, "num_layers": 2}


def randomised(name="smlp_mixer_s16", **settings):
    """A small model in float64, in evaluation mode, with weights that all matter."""
    torch.manual_seed(0)
    model = ImageModel(preset(name, **{**SMALL, "num_classes": 5, **settings})).double().eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.3)
    return model
