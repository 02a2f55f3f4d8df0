"""Blocks of image models: listing 1 and the variants of section A.1 written out, drop path, who sees whom."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from image_models import SMALL, randomised

from smlp.errors import UserError
from smlp.nn.blocks import SpatialGatingUnit
from smlp.nn.state import ForwardContext
from smlp.ops.fast_paths import reference_ops
from smlp.vision.model import DropPath, ImageModel
from smlp.vision.presets import preset

VARIANTS = {
    "shared": {},
    "untied": {"token_mixing": "untied"},
    "grouped": {"token_mixing": "grouped", "token_groups": 2},
    "views": {"token_mixing": "views", "token_groups": 2},
    "pyramid": {"pyramid": {1: 4}},
}


def network(state, name, vector, channel=None):
    """W2 gelu(W1 v + b1) + b2 of one vector."""
    w1, b1, w2, b2 = (state[f"{name}.{part}"] for part in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"))
    if channel is not None:
        w1, b1, w2, b2 = (value[channel] for value in (w1, b1, w2, b2))
    return w2 @ F.gelu(w1 @ vector + b1, approximate="tanh") + b2


def mixed(state, name, x_SC, variant):
    """What the network over tokens adds, vector by vector (Tolstikhin et al., 2021, supplement, section A.1), G = 2."""
    C = x_SC.size(1)
    if variant in ("shared", "untied", "pyramid"):
        own = [network(state, name, x_SC[:, c], c if variant == "untied" else None) for c in range(C)]
        return torch.stack(own, dim=1)
    out_SC = torch.empty_like(x_SC)
    if variant == "views":
        x_SC = torch.cat([x_SC @ view.t() for view in state[f"{name}.views.weight"].chunk(2)], dim=1)
    for c in range(C // 2):
        columns = [2 * c, 2 * c + 1] if variant == "grouped" else [c, c + C // 2]
        vector = network(state, name, torch.cat([x_SC[:, column] for column in columns]))
        for part, column in zip(vector.chunk(2), columns, strict=True):
            out_SC[:, column] = part
    return out_SC


def listing_1(model, image, variant):
    """Logits of one image."""
    state, config = dict(model.named_parameters()), model.config
    patches = [
        image[:, row : row + 4, column : column + 4].flatten() for row in range(0, 12, 4) for column in range(0, 12, 4)
    ]
    x_SC = torch.stack(patches) @ state["stem.proj.weight"].flatten(1).t() + state["stem.proj.bias"]

    def norm(name, x_SC):
        return F.layer_norm(x_SC, (config.embed_dim,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    for layer in range(config.num_layers):
        block = f"blocks.{layer}"
        added_SC = mixed(state, f"{block}.mlp_tokens", norm(f"{block}.norm1", x_SC), variant)
        x_SC = x_SC + added_SC if added_SC.shape == x_SC.shape else added_SC
        y_SC = norm(f"{block}.norm2", x_SC)
        x_SC = x_SC + torch.stack([network(state, f"{block}.mlp_channels", y_C) for y_C in y_SC])
    return state["head.weight"] @ norm("norm", x_SC).mean(dim=0) + state["head.bias"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixer_is_listing_1_and_its_variants(variant):
    model = randomised(**VARIANTS[variant])
    images, weights = torch.randn(2, 3, 12, 12).double(), torch.randn(2, 5).double()
    expected = torch.stack([listing_1(model, image, variant) for image in images])
    actual = model(images)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad((logits * weights).sum(), parameters) for logits in (actual, expected)]
    for name, *pair in zip(dict(model.named_parameters()), *gradients, strict=True):
        assert pair[0].abs().max() > 0, name
        torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-12)


def test_a_new_model_predicts_nothing_and_starts_with_lecuns_variance():
    torch.manual_seed(0)
    model = ImageModel(preset("smlp_mixer_s16", img_size=64, embed_dim=128, num_layers=1, token_mixing="untied"))
    assert not model(torch.randn(1, 3, 64, 64)).any()
    state = model.state_dict()
    for name in ("stem.proj.weight", "blocks.0.mlp_tokens.fc1.weight", "blocks.0.mlp_channels.fc2.weight"):
        fan_in = state[name][0].numel() if name.startswith("stem") else state[name].size(-1)
        assert state[name].std() * fan_in**0.5 == pytest.approx(1, abs=0.01), name
    assert not any(value.any() for name, value in state.items() if name.endswith("bias"))
    gate = ImageModel(preset("smlp_gmlp_ti16", num_layers=1)).blocks[0].mlp_channels.gate.heads
    assert gate.weight.abs().max() <= 1e-3 / 196 and (gate.bias == 1).all()


def test_class_token_and_representation_layer():
    model = randomised("smlp_gmlp_ti16", pool="cls")
    images = torch.randn(2, 3, 12, 12).double()
    tokens = model.forward_features(images)
    assert tokens.shape == (2, 10, 8) and model.global_pool == "token"
    pooled = torch.tanh(tokens[:, 0] @ model.representation.weight.t() + model.representation.bias)
    torch.testing.assert_close(model(images), model.head(pooled))
    assert "cls_token" in model.no_weight_decay()


def test_drop_rates_rise_linearly_over_all_networks():
    mixer = ImageModel(preset("smlp_mixer_s16", **{**SMALL, "num_layers": 3}, drop_path_rate=0.5))
    rates = [module.probability for module in mixer.modules() if isinstance(module, DropPath)]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    gmlp = ImageModel(preset("smlp_gmlp_b16", **{**SMALL, "num_layers": 5}))
    assert [block.drop_path.probability for block in gmlp.blocks] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert preset("smlp_mixer_tiny", num_layers=1, block="gmlp", drop_path_rate=0.5).drop_path_rates() == [0]


@pytest.mark.parametrize("name", ["smlp_mixer_tiny", "smlp_gmlp_tiny"])
def test_whole_images_are_dropped_and_the_mean_stays(name):
    """Of two branches the second is dropped for a share of the images, and scaled for the others."""
    model = randomised(name, drop_path_rate=0.4, num_layers=1 if "mixer" in name else 2)
    model.norm = torch.nn.Identity()  # so that logits are linear in the branch
    image = torch.randn(1, 3, 12, 12).double()
    with torch.no_grad():
        logits = model.train()(image.expand(2000, -1, -1, -1))
        expected = model.eval()(image)[0]
    values, counts = logits.mul(1e6).round().div(1e6).unique(dim=0, return_counts=True)
    assert len(values) == 2
    (dropped, without), (kept, branch) = sorted(zip(counts.tolist(), values, strict=True), key=lambda pair: pair[0])
    assert 0.36 < dropped / (dropped + kept) < 0.44
    torch.testing.assert_close(0.4 * without + 0.6 * branch, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rate", [0.5, 0.999])
@pytest.mark.parametrize("name", ["smlp_mixer_tiny", "smlp_gmlp_tiny"])
def test_skipped_images_are_as_masked_ones(name, rate):
    model = randomised(name, drop_path_rate=rate).train()
    images = torch.randn(6, 3, 12, 12).double()

    def passes(path):
        torch.manual_seed(1)
        with path:
            logits = model(images)
        return logits.detach(), torch.autograd.grad(logits.square().sum(), list(model.parameters()))

    (fast, gradients), (expected, wanted) = passes(nullcontext()), passes(reference_ops())
    torch.testing.assert_close(fast, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("path", [nullcontext, reference_ops])
@pytest.mark.parametrize("name", ["smlp_mixer_tiny", "smlp_gmlp_tiny"])
def test_mixed_precision(name, path):
    model = randomised(name, drop_path_rate=0.5, pool="cls" if "gmlp" in name else "mean").float().train()
    images, passes = torch.randn(4, 3, 12, 12), []
    for is_mixed in (True, False):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed), path():
            logits = model(images).float()
        gradients = torch.autograd.grad(logits.sum(), list(model.parameters()))
        passes.append((logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    for mixed, expected in zip(*passes, strict=True):
        assert (mixed - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", ["smlp_mixer_tiny", "smlp_gmlp_tiny"])
def test_a_compiled_model_is_one_graph_and_the_same_function(name):
    model = randomised(name, drop_path_rate=0.3, num_layers=1 if "mixer" in name else 2).train()
    images, passes = torch.randn(4, 3, 12, 12).double(), []
    for one in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        logits = one(images)
        passes.append((logits.detach(), *torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    torch.testing.assert_close(*passes, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_last_token_changes_the_first_output_unless_causal(is_causal):
    torch.manual_seed(0)
    unit = SpatialGatingUnit(6, 9, 1.0, is_causal=is_causal, norm_eps=1e-6)
    z1, z2 = torch.randn(2, 2, 9, 6)
    changed = z2.clone()
    changed[:, -1] = 5 * torch.randn(2, 6)
    before, after = (unit(z1, z, ForwardContext())[:, 0] for z in (z2, changed))
    assert torch.equal(before, after) == is_causal


def test_bad_settings_are_refused_in_one_sentence():
    for settings, message in [
        ({"img_size": 30}, "img_size=30 must be a multiple of patch_size=16"),
        ({"img_size": (32, 48)}, "img_size must be that of a square, got"),
        ({"token_groups": 2}, "token_groups=2 needs token_mixing grouped or views, got shared"),
        ({"token_mixing": "views", "token_groups": 3}, "token_groups=3 must divide embed_dim=512"),
        ({"pool": "cls"}, "pool=cls is for block=gmlp"),
        ({"block": "gmlp", "ffn_dim": 5}, "ffn_dim must be even"),
        ({"block": "gmlp", "pyramid": {0: 4}}, "is for block=mixer, not gmlp"),
        ({"pyramid": {9: 4}}, "block 9 of 8 cannot leave 4 of 196 tokens"),
        ({"pyramid": {0: 4}, "mixed_tokens": 4}, "both set the tokens of blocks"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be in"),
        ({"norm_eps": -1.0}, "norm_eps must be finite and not negative, got -1.0"),
        ({"gate_norm_eps": math.nan}, "gate_norm_eps must be finite and not negative, got nan"),
        ({"activation": "silu"}, "activation must be one of gelu, gelu_tanh"),
        ({"depth": 3}, "unknown setting 'depth' of smlp_mixer_s16"),
    ]:
        with pytest.raises(UserError, match=message):
            preset("smlp_mixer_s16", **settings)
    with pytest.raises(UserError, match="unknown image model 'smlp_mixer_s17'; did you mean 'smlp_mixer_s16'"):
        preset("smlp_mixer_s17")
