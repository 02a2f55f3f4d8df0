"""Pictures of image models: the order of the units, and that each has its place on the sheet."""

import numpy as np
import pytest
import torch
from PIL import Image

from smlp.errors import UserError
from smlp.plots.images import draw_images, draw_units, mean_frequency, paired_by_frequency
from smlp.vision.model import ImageModel
from smlp.vision.presets import preset

SMALL = {"num_layers": 3, "img_size": 16}


def wave(cycles, size=8):
    return np.cos(2 * np.pi * cycles * (np.arange(size) + 0.25) / size)[:, None] * np.ones(size)


def test_low_frequencies_come_first_and_each_unit_before_its_inverse():
    assert mean_frequency(np.ones((8, 8))) == pytest.approx(0)
    assert [mean_frequency(wave(cycles)) for cycles in (1, 3)] == pytest.approx([1 / 8, 3 / 8])
    units = np.stack([wave(3), -wave(1), 2 * wave(2), -5 * wave(3), wave(1), -wave(2)])
    order = paired_by_frequency(units)
    assert [set(order[i : i + 2]) for i in (0, 2, 4)] == [{1, 4}, {2, 5}, {0, 3}]


def test_every_model_has_its_pictures(tmp_path):
    torch.manual_seed(0)
    mixer = ImageModel(preset("smlp_mixer_tiny", **SMALL, pyramid={0: 4}))
    files = draw_images(mixer, tmp_path / "mixer", "a Mixer")
    assert [file.name for file in files] == ["stem.png", "units-0.png"]
    with pytest.raises(UserError, match="a Mixer: the units of layer 1 are not over the tokens of one image"):
        draw_units(mixer, 1, "a Mixer")
    gmlp = ImageModel(preset("smlp_gmlp_tiny", **SMALL, pool="cls", in_chans=1))
    files += draw_images(gmlp, tmp_path / "gmlp", "a gMLP")
    assert [file.name for file in files[2:]] == ["stem.png", "filters.png"]
    for file in files:
        assert np.asarray(Image.open(file).convert("L")).std() > 10


def test_a_sheet_shows_the_weights(tmp_path):
    model = ImageModel(preset("smlp_mixer_tiny", **SMALL, token_dim=2))
    with torch.no_grad():
        model.blocks[0].mlp_tokens.fc1.weight.copy_(torch.stack([torch.eye(4), -torch.eye(4)]).flatten(1))
    (image,) = draw_units(model, 0, "a Mixer").axes[0].images
    sheet = image.get_array()
    assert sheet.shape == (4, 9) and np.isnan(np.ma.filled(sheet, np.nan)[:, 4]).all()
    assert np.array_equal(sheet[:, :4], np.eye(4)) or np.array_equal(sheet[:, :4], -np.eye(4))
    assert np.array_equal(sheet[:, 5:], -sheet[:, :4])
