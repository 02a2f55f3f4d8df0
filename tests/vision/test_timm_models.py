"""Our models as timm's: the same function with the same weights, and what timm's training script asks of a model."""

import pytest
import timm
import torch
from running import run_python
from timm.data import resolve_data_config
from timm.layers import GatedMlp
from timm.models import mlp_mixer
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

from smlp.vision import timm_models
from smlp.vision.presets import PRESETS
from smlp.vision.weights import from_timm, to_timm

NAMES = [
    *("smlp_mixer_s32", "smlp_mixer_s16", "smlp_mixer_b32", "smlp_mixer_b16", "smlp_mixer_l32", "smlp_mixer_l16"),
    *("smlp_mixer_h14", "smlp_gmlp_ti16", "smlp_gmlp_s16", "smlp_gmlp_b16", "smlp_mixer_tiny", "smlp_gmlp_tiny"),
    *("smlp_s_mixer", "smlp_rp_s_mixer", "smlp_sparse_mlp", "smlp_rp_mixer_tiny"),
]
#: small models: ours, and timm's class with what timm's own sizes give it
PAIRS = {
    "mixer": ({"token_dim": 8, "ffn_dim": 64}, {}),
    "gmlp": (
        {"block": "gmlp", "ffn_dim": 96},
        {"block_layer": mlp_mixer.SpatialGatingBlock, "mlp_layer": GatedMlp, "mlp_ratio": 6},
    ),
}


def pair(kind):
    """The two models with random weights, those of timm's."""
    torch.manual_seed(0)
    own, their_own = PAIRS[kind]
    shared = {"num_classes": 7, "img_size": 64, "in_chans": 2, "embed_dim": 16}
    ours = timm.create_model("smlp_mixer_s16", activation="gelu", num_layers=2, **own, **shared).double()
    theirs = mlp_mixer.MlpMixer(num_blocks=2, **their_own, **shared).double()
    with torch.no_grad():
        for value in theirs.parameters():
            value.copy_(torch.randn_like(value) * 0.3)
    return ours, theirs


@pytest.mark.parametrize("way", ["ours from timm's", "timm's from ours"])
@pytest.mark.parametrize("kind", PAIRS)
def test_parity(kind, way):
    ours, theirs = pair(kind)
    if way == "ours from timm's":
        ours.load_state_dict(from_timm(theirs.state_dict()))
    else:
        with torch.no_grad():
            for value in ours.parameters():
                value.copy_(torch.randn_like(value) * 0.3)
        theirs.load_state_dict(to_timm(ours.state_dict()))
    images, weights = torch.randn(3, 2, 64, 64).double(), torch.randn(3, 7).double()
    logits = [model(images) for model in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-10)
    for out in logits:
        (out * weights).sum().backward()
    gradients = to_timm({name: value.grad for name, value in ours.named_parameters()})
    expected = {name: value.grad for name, value in theirs.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-10 * max(1, gradient.abs().max()))


WITHOUT_TIMM = """
import sys

sys.modules["timm"] = None  # importing it raises ImportError
import torch

from smlp.errors import UserError
from smlp.vision import costs, table, weights
from smlp.vision.model import ImageModel
from smlp.vision.presets import preset

assert ImageModel(preset("smlp_mixer_tiny"))(torch.randn(2, 3, 32, 32)).shape == (2, 10)
try:
    import smlp.vision.timm_models
except UserError as error:
    print(error)
"""


def test_models_need_no_timm_and_registration_says_that_it_does():
    done = run_python("-c", WITHOUT_TIMM)
    assert done.rc == 0, done.stderr
    assert done.stdout.startswith("image models in timm need timm (") and done.stdout.count("\n") == 1
    assert "pip install -e '.[vision]'" in done.stdout


def test_every_model_is_registered():
    assert sorted(NAMES) == sorted(timm.list_models("smlp_*")) == sorted(PRESETS)
    for name, theirs in timm_models._PUBLISHED.items():
        assert timm.get_pretrained_cfg(name).hf_hub_id == timm.get_pretrained_cfg(theirs).hf_hub_id


@pytest.mark.parametrize(("name", "kind"), [("smlp_mixer_b16", "mixer"), ("smlp_gmlp_s16", "gmlp")])
def test_pretrained_weights_are_read_in_timms_format(name, kind, tmp_path):
    """As ``pretrained=True`` does, but from a file instead of the network."""
    theirs = pair(kind)[1].float().eval()
    torch.save(theirs.state_dict(), tmp_path / "published.pth")
    own = {key: value for key, value in PAIRS[kind][0].items() if key != "block"}
    settings = {**own, "num_classes": 7, "img_size": 64, "in_chans": 2, "embed_dim": 16, "num_layers": 2}
    file = {"file": str(tmp_path / "published.pth"), "num_classes": 7, "input_size": (2, 64, 64)}
    model = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=file, activation="gelu", drop_path_rate=0.0, **settings
    )
    images = torch.randn(2, 2, 64, 64)
    torch.testing.assert_close(model.eval()(images), theirs(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["smlp_mixer_tiny", "smlp_gmlp_tiny"])
def test_what_timms_training_script_asks_of_a_model(name, tmp_path):
    settings = {"drop_rate": 0.1, "drop_path_rate": 0.1, "drop_block_rate": None, "bn_momentum": None}
    model = timm.create_model(name, num_classes=4, img_size=8, in_chans=1, global_pool="avg", num_layers=2, **settings)
    data = resolve_data_config({"img_size": 8, "in_chans": 1}, model=model)
    assert data["input_size"] == (1, 8, 8) and data["mean"] == (0.5, 0.5, 0.5) and model.num_classes == 4
    model.get_classifier().weight.data.mul_(0.5)
    torch.nn.init.constant_(model.get_classifier().bias, -1.0)
    model.set_grad_checkpointing(True)
    images = torch.randn(3, 1, 8, 8)
    assert model(images).shape == (3, 4)
    pooled = model.forward_head(model.forward_features(images), pre_logits=True)
    assert pooled.shape == (3, model.num_features)
    every = timm.create_model(name, num_classes=0, img_size=8, in_chans=1, global_pool="", num_layers=1)
    assert every(images).shape == (3, 4, every.num_features), "all tokens"
    model.reset_classifier(6)
    assert model(images).shape == (3, 6) and [name for name, _ in model.named_parameters()][-1] == "head.bias"
    for layer_decay in (None, 0.7):
        optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=layer_decay)
        decayed = [group["params"] for group in optimizer.param_groups if group["weight_decay"]]
        names = {id(value): name for name, value in model.named_parameters()}
        assert decayed and all(names[id(value)].endswith(".weight") for values in decayed for value in values)
    model(images).sum().backward()
    optimizer.step()
    averaged = ModelEmaV3(model, decay=0.5)
    averaged.update(model)
    torch.save({"state_dict": averaged.module.state_dict(), "arch": name}, tmp_path / "checkpoint.pth")
    again = timm.create_model(
        name, num_classes=6, img_size=8, in_chans=1, num_layers=2, checkpoint_path=str(tmp_path / "checkpoint.pth")
    )
    torch.testing.assert_close(again.eval()(images), averaged.module.eval()(images))
