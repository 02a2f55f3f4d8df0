"""``smlp vision plot``: which units stand where in the pictures of image models."""

import numpy as np
import pytest
import timm
import torch

from smlp.cli.main import main
from smlp.errors import UserError
from smlp.plots.image_units import draw_image_units, gate_rows, mean_frequency, paired_order, token_units
from smlp.vision import timm_models  # noqa: F401


def wave(cycles, side=8, phase=0.0):
    x = np.arange(side)
    return np.cos(2 * np.pi * cycles * x / side + phase)[:, None] * np.ones(side)


def test_frequencies_are_those_of_waves():
    found = mean_frequency(np.stack([np.ones((8, 8)), wave(1), wave(2), wave(4)]))
    np.testing.assert_allclose(found, [0, 1 / 8, 2 / 8, 4 / 8], atol=1e-12)


def test_units_are_ordered_by_frequency_and_followed_by_their_inverse():
    units = np.stack([wave(4), wave(1), -wave(4), -wave(2), 3 * wave(2), -wave(1)])
    order = paired_order(units)
    assert sorted(order) == list(range(6))
    assert [set(order[place : place + 2]) for place in (0, 2, 4)] == [{1, 5}, {3, 4}, {0, 2}]
    assert paired_order(units[:3])[-1] in (0, 2) and len(paired_order(units[:3])) == 3


def model(name, **settings):
    torch.manual_seed(0)
    made = timm.create_model(name, img_size=16, num_classes=4, num_layers=3, **settings)
    for value in made.parameters():
        torch.nn.init.normal_(value)
    return made


def test_units_are_the_weights_over_tokens():
    mixer = model("smlp_mixer_tiny")
    units = token_units(mixer.state_dict())
    assert list(units) == [0, 1, 2] and units[1].shape == (64, 4, 4)
    image = torch.randn(1, 128, 4, 4)
    expected = mixer.blocks[1].mlp_tokens.fc1(image.flatten(2)) - mixer.blocks[1].mlp_tokens.fc1.bias
    found = torch.einsum("dgh,bcgh->bcd", torch.from_numpy(units[1]), image)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_tokens_that_are_no_patches_are_left_out(tmp_path):
    """Those of an RP-Mixer, and of blocks after one that mixes tokens into others."""
    assert list(token_units(model("smlp_mixer_tiny", mixed_tokens=16).state_dict())) == [0]
    permuted = model("smlp_rp_mixer_tiny").state_dict()
    assert not token_units(permuted)
    with pytest.raises(UserError, match="is not an MLP-Mixer or gMLP whose tokens are patches"):
        draw_image_units(permuted, "permuted", tmp_path)


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_rows_of_gates_have_no_class_token(pool):
    gmlp = model("smlp_gmlp_tiny", pool=pool)
    rows = gate_rows(gmlp.state_dict())
    weight_SS = gmlp.blocks[2].mlp_channels.gate.heads.weight[0]
    first = int(pool == "cls")
    assert rows[2].shape == (16, 4, 4)
    np.testing.assert_array_equal(rows[2].reshape(16, 16), weight_SS[first:, first:].detach().numpy())


def test_timms_checkpoints_are_drawn_too(tmp_path):
    theirs = timm.models.mlp_mixer.MlpMixer(
        num_classes=3,
        img_size=16,
        patch_size=4,
        num_blocks=2,
        embed_dim=12,
        block_layer=timm.models.mlp_mixer.SpatialGatingBlock,
        mlp_layer=timm.layers.GatedMlp,
        mlp_ratio=4,
    )
    files = draw_image_units(theirs.state_dict(), "theirs", tmp_path)
    assert [path.name for path in files] == ["gate_filters.png", "stem_units.png"]


def test_the_command_draws_a_checkpoint(tmp_path, capsys):
    checkpoint = tmp_path / "last.pth.tar"
    torch.save({"state_dict": model("smlp_mixer_tiny", in_chans=1).state_dict()}, checkpoint)
    assert main(["vision", "plot", str(checkpoint), "--out", str(tmp_path / "pictures"), "--format", "svg"]) == 0
    names = [line.rsplit("/", 1)[-1] for line in capsys.readouterr().out.splitlines()]
    assert names == ["token_units_0.svg", "token_units_1.svg", "stem_units.svg"]
    assert all((tmp_path / "pictures" / name).stat().st_size > 1000 for name in names)


def test_other_models_are_refused(tmp_path, capsys):
    torch.save({"state_dict": {"head.weight": torch.zeros(2, 2)}}, tmp_path / "other.pth.tar")
    assert main(["vision", "plot", str(tmp_path / "other.pth.tar"), "--out", str(tmp_path)]) == 1
    assert "is not an MLP-Mixer or gMLP whose tokens are patches on a square" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_refused(tmp_path, capsys):
    state = model("smlp_mixer_tiny", in_chans=1).state_dict()
    next(value for name, value in state.items() if name.startswith("stem"))[0] = torch.nan
    torch.save({"state_dict": state}, tmp_path / "nan.pth.tar")
    assert main(["vision", "plot", str(tmp_path / "nan.pth.tar"), "--out", str(tmp_path)]) == 1
    assert "has weights that are not finite" in capsys.readouterr().err
