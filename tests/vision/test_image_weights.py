"""Change of resolution: what the papers define, against the same thing done by hand."""

import dataclasses

import pytest
import torch
from image_models import randomised

from smlp.errors import UserError
from smlp.vision.model import ImageModel
from smlp.vision.weights import change_resolution


def resized(model, img_size):
    state, config = change_resolution(model.state_dict(), model.config, img_size)
    larger = ImageModel(config).double().eval()
    larger.load_state_dict(state)
    return larger


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("token_mixing", ["shared", "untied"])
def test_a_mosaic_of_images_has_the_mean_of_their_logits(token_mixing, factor):
    model = randomised(token_mixing=token_mixing)
    parts = torch.randn(factor, factor, 3, 12, 12).double()
    mosaic = torch.cat([torch.cat(list(row), dim=2) for row in parts], dim=1).unsqueeze(0)
    larger = resized(model, 12 * factor)
    assert larger.config.token_dim == factor**2 * model.config.token_dim
    expected = model(parts.flatten(0, 1)).mean(dim=0, keepdim=True)
    torch.testing.assert_close(larger(mosaic), expected, rtol=0, atol=1e-10)
    if factor > 1:  # block-diagonal over tokens in raster order is something else
        state = larger.state_dict()
        for name, tensor in model.state_dict().items():
            if name.endswith("mlp_tokens.fc1.weight") and tensor.dim() == 2:
                state[name] = torch.block_diag(*[tensor] * factor**2)
        larger.load_state_dict(state)
        assert token_mixing == "untied" or (larger(mosaic) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["smlp_mixer_s16", "smlp_gmlp_ti16"])
def test_weights_of_another_size_than_the_settings_say_are_refused(name):
    model = randomised(name)
    settings = dataclasses.replace(model.config, img_size=24)
    with pytest.raises(UserError, match=r"is over 9 tokens, and images of 24 pixels have 36 patches"):
        change_resolution(model.state_dict(), settings, 48)


@pytest.mark.parametrize("new_grid", [2, 3, 5, 8])
def test_every_filter_of_a_gmlp_is_the_central_one_shifted(new_grid):
    model = randomised("smlp_gmlp_ti16")
    larger = resized(model, 4 * new_grid)
    (old, old_bias), (new, new_bias) = (
        (own.blocks[1].mlp_channels.gate.heads.weight[0], own.blocks[1].mlp_channels.gate.heads.bias[0])
        for own in (model, larger)
    )
    if new_grid == 3:
        return torch.testing.assert_close(new, old, rtol=0, atol=0)
    middle = old[4].view(3, 3)
    for row in range(new_grid**2):
        for column in range(new_grid**2):
            down = column // new_grid - row // new_grid + 1
            right = column % new_grid - row % new_grid + 1
            inside = 0 <= down < 3 and 0 <= right < 3
            assert new[row, column] == (middle[down, right] if inside else 0)
    assert (new_bias == old_bias[4]).all()
    assert larger(torch.randn(2, 3, 4 * new_grid, 4 * new_grid).double()).shape == (2, 5)


def test_the_change_from_224_to_384_pixels():
    """14 x 14 to 24 x 24 patches, as in Table 11 of the gMLP paper: the central filter is that of row 7, column 7."""
    model = randomised("smlp_gmlp_ti16", img_size=56, num_layers=1)
    larger = resized(model, 96)
    old, new = (own.blocks[0].mlp_channels.gate.heads.weight[0] for own in (model, larger))
    middle, filters = old[7 * 14 + 7].view(14, 14), new.view(24, 24, 24, 24)
    for row, column in ((0, 0), (7, 7), (12, 3), (23, 23)):
        expected = torch.zeros(24, 24, dtype=torch.float64)
        for down in range(14):
            for right in range(14):
                place = row + down - 7, column + right - 7
                if min(place) >= 0 and max(place) < 24:
                    expected[place] = middle[down, right]
        assert torch.equal(filters[row, column], expected)


def test_what_has_no_rule_is_refused():
    mixer = randomised()
    with pytest.raises(UserError, match="img_size=20: 5 patches along a side are not a multiple of the 3"):
        resized(mixer, 20)
    with pytest.raises(UserError, match="img_size=13 must be a multiple of patch_size=4"):
        resized(mixer, 13)
    for settings in ({"token_mixing": "grouped", "token_groups": 2}, {"pyramid": {0: 4}}):
        with pytest.raises(UserError, match="no change of resolution is defined for block=mixer, token_mixing"):
            resized(randomised(**settings), 24)
    with pytest.raises(UserError, match="pool=cls"):
        resized(randomised("smlp_gmlp_ti16", pool="cls"), 24)
    with pytest.raises(UserError, match="images of 12 x 12 pixels, but the model is for 24 x 24"):
        resized(mixer, 24)(torch.randn(1, 3, 12, 12))
    assert dataclasses.replace(mixer.config, img_size=(24, 24)).img_size == 24
