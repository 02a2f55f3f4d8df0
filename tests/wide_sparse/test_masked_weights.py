"""A mask stays: through AdamW with decay, checkpoints, averages of weights, exports, and on two ranks."""

import copy

import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timm.utils import ModelEmaV3

from smlp.errors import UserError
from smlp.nn.layers import MaskedLinear
from smlp.vision import timm_models  # noqa: F401  registers the models
from smlp.vision.model import SparseLayerBlock

SETTINGS = {"img_size": 8, "embed_dim": 6, "mlp_width": 20, "mask_density": 0.3, "num_layers": 2}


def sparse_mlp(seed=0):
    torch.manual_seed(seed)
    return timm.create_model("smlp_sparse_mlp", **SETTINGS)


def masked_layers(model):
    layers = [block.layer for block in model.blocks if isinstance(block, SparseLayerBlock)]
    assert len(layers) == 2
    return layers


def train(model, steps=3):
    """Some steps of AdamW with a large decay; the head starts at zero, so that the first gives blocks no gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        images = torch.randn(4, 3, 8, 8, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), torch.arange(4)).backward()
        optimizer.step()
    return optimizer


def test_masked_weights_get_no_gradient_and_stay_zero():
    model = sparse_mlp()
    before = copy.deepcopy(model)
    train(model)
    for layer, old in zip(masked_layers(model), masked_layers(before), strict=True):
        assert 0.15 < layer.mask.float().mean() < 0.45
        assert torch.equal(layer.mask, old.mask)
        assert (layer.weight[~layer.mask] == 0).all()
        assert (layer.weight.grad[~layer.mask] == 0).all()
        assert (layer.weight.grad[layer.mask] != 0).any()
        assert (layer.weight[layer.mask] != old.weight[layer.mask]).all()


def test_masks_go_through_a_checkpoint(tmp_path):
    model = sparse_mlp()
    train(model)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.pt")
    other = sparse_mlp(seed=9)  # other masks, until it is loaded
    assert not torch.equal(masked_layers(model)[0].mask, masked_layers(other)[0].mask)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True)["state_dict"])
    train(other)
    train(model)
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert all((layer.weight[~layer.mask] == 0).all() for layer in masked_layers(other))


def test_masks_stay_in_an_average_of_weights():
    model = sparse_mlp()
    average = ModelEmaV3(model, decay=0.5)
    train(model)
    average.update(model)
    for layer, own in zip(masked_layers(average.module), masked_layers(model), strict=True):
        assert torch.equal(layer.mask, own.mask) and layer.mask.dtype == torch.bool
        assert (layer.weight[~layer.mask] == 0).all()


def test_masks_go_through_an_export(tmp_path):
    model = sparse_mlp().eval()
    model.head.weight.data.normal_()
    images = torch.randn(2, 3, 8, 8)
    exported = torch.export.export(model, (images,))
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    torch.testing.assert_close(loaded.module()(images), model(images))
    assert torch.equal(loaded.state_dict["blocks.0.layer.mask"], model.blocks[0].layer.mask)


def _rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    model = sparse_mlp(seed=rank)  # as timm seeds its ranks: each draws another mask
    train(torch.nn.parallel.DistributedDataParallel(model))
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_have_the_mask_of_the_first(tmp_path):
    mp.start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    expected = masked_layers(sparse_mlp(seed=0))[0].mask
    assert torch.equal(one["blocks.0.layer.mask"], expected)
    assert (one["blocks.0.layer.weight"][~expected] == 0).all()


@pytest.mark.parametrize("density", [0.0, 1.5, -1.0])
def test_a_density_is_a_share(density):
    with pytest.raises(UserError, match="density of a masked layer must be above 0 and at most 1"):
        MaskedLinear(4, 4, density)
    with pytest.raises(UserError, match="mask_density must be above 0 and at most 1"):
        timm.create_model("smlp_sparse_mlp", mask_density=density)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("smlp_mixer_tiny", {"mask_density": 0.5}, "mask_density=0.5 is for block=sparse_mlp, not mixer"),
        ("smlp_gmlp_tiny", {"permutations": "random"}, "permutations=random is for block=mixer or s_mixer, not gmlp"),
        ("smlp_s_mixer", {"mixed_tokens": -1}, "mixed_tokens must not be negative, got -1"),
    ],
)
def test_settings_of_other_blocks_are_refused(name, settings, words):
    with pytest.raises(UserError, match=words):
        timm.create_model(name, **settings)
