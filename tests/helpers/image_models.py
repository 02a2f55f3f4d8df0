"""Small image models with random weights, and comparisons of image models in this process."""

import torch

from smlp.cli.main import main
from smlp.experiments.processes import Ended
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


def train_in_this_process(monkeypatch):
    """Commands that a comparison would have started run here instead; returns their words."""
    from smlp.vision import compare

    started = []

    def run_chains(chains, jobs, watch):
        for chain in chains:
            step = chain.next_step(0)
            started.append(step.command)
            status = main(step.command[step.command.index("vision") :])
            chain.ended(Ended(step, status, 1.0, 100.0, 0.0))
            assert chain.next_step(0) is None

    monkeypatch.setattr(compare, "run_chains", run_chains)
    return started
