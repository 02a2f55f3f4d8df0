"""int8 for inference: against exact integers, and against float32; no token depends on others."""

import copy

import pytest
import torch
from architectures import LANGUAGE_MODELS
from tiny_checkpoints import write_checkpoint

from smlp.cli.main import main
from smlp.config.presets import preset
from smlp.inference.int8 import Int8Experts, Int8Linear, int8_product, quantize, quantized
from smlp.inference.scoring.candidates import drop_nothing
from smlp.launch.team import Team
from smlp.moe.experts import FeedForwardExperts
from smlp.nn.build import model_of
from smlp.nn.layers import Linear, MaskedLinear

SMALL = {"vocab_size": 60, "max_tokens": 16, "embed_dim": 32, "ffn_dim": 64}
TINY = [arch for arch in LANGUAGE_MODELS if arch.endswith("_tiny") and not preset(arch).is_leaky]


def decoder(arch, **settings):
    torch.manual_seed(0)
    model = model_of(preset(arch, **{**SMALL, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # second weights of experts start at zero
    drop_nothing(model)
    return model


def by_hand(x, weight, bias):
    """Each entry from exact integers: the row's and the output's largest values over 127 are their units."""
    y = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for r, row in enumerate(x.double()):
        for o, column in enumerate(weight.double()):
            units = row.abs().max() / 127, column.abs().max() / 127
            integers = [(values / unit).round().long() for values, unit in zip((row, column), units, strict=True)]
            y[r, o] = (integers[0] * integers[1]).sum() * units[0] * units[1]
    return y if bias is None else y + bias


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (17, 33, 20)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_those_of_integers(shape, has_bias):
    torch.manual_seed(1)
    rows, inputs, outputs = shape
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if has_bias else None
    found = int8_product(x, *quantized(weight), bias)
    torch.testing.assert_close(found.double(), by_hand(x, weight, bias), rtol=1e-5, atol=1e-5)
    others = x.clone()
    others[1:] *= 1000
    assert torch.equal(int8_product(others, *quantized(weight), bias)[:1], found[:1]), "a row depends on others"
    assert torch.equal(int8_product(x[:1], *quantized(weight), bias), found[:1])
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias), rtol=0, atol=0.03 * inputs**0.5)


def test_zeros_and_nothing():
    rows = torch.randn(2000, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight, scale = quantized(rows)
    assert torch.equal(weight.sign()[rows.abs() > scale], rows.sign().to(torch.int8)[rows.abs() > scale])
    weight, scale = quantized(torch.zeros(3, 4))
    assert torch.equal(int8_product(torch.zeros(2, 4), weight, scale, None), torch.zeros(2, 3))
    assert int8_product(torch.zeros(0, 4), weight, scale, None).shape == (0, 3)
    x, ones = torch.ones(1, 2048) / 16, torch.ones(1, 2048) / 16  # the sum of products is beyond float16
    for dtype in (torch.float16, torch.bfloat16):
        found = int8_product(x.to(dtype), *quantized(ones.to(dtype)), None)
        assert found.dtype == dtype and found.item() == pytest.approx(8.0, rel=0.01)
    assert int8_product(torch.randn(2, 5, 4), weight, scale, torch.ones(3)).shape == (2, 5, 3)


@pytest.mark.parametrize("arch", TINY)
def test_every_architecture(arch):
    """Close to float32; every linear map and expert is int8; neither later tokens nor other sequences matter."""
    exact = decoder(arch)
    model = copy.deepcopy(exact)
    quantize(model)
    kinds = [type(module) for module in model.modules()]
    assert Linear not in kinds and FeedForwardExperts not in kinds and Int8Linear in kinds
    assert (Int8Experts in kinds) == any(isinstance(module, FeedForwardExperts) for module in exact.modules())
    tokens = torch.randint(4, 60, (3, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted, found = exact(tokens).logits, model(tokens).logits
        # a close router may choose another expert for a few tokens
        off = ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).flatten()
        assert off.median() < 0.05, off.median()
        changed = tokens.clone()
        changed[:, 10:] = 5
        # products in floating point may round otherwise in a batch of another size
        before = model(changed).logits[:, :10]
        assert (before - found[:, :10]).norm() < 0.003 * before.norm()
        alone = model(tokens[1:2]).logits
        assert (alone - found[1:2]).norm() < 0.003 * alone.norm()


def test_masked_feed_forward_networks():
    exact = decoder("dense_lm_tiny", transformer_ffn_density=0.5)
    model = copy.deepcopy(exact)
    quantize(model)
    assert not any(isinstance(module, MaskedLinear) for module in model.modules())
    tokens = torch.randint(4, 60, (2, 16))
    with torch.no_grad():
        wanted, found = exact(tokens).logits, model(tokens).logits
    assert (found - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize(
    ("arch", "settings", "kept"),
    [("mixer_mlm_tiny", {}, Linear), ("gmlp_lm_tiny", {**SMALL, "dense_block": "masked"}, MaskedLinear)],
)
def test_weights_of_which_short_inputs_use_a_part_are_kept(arch, settings, kept):
    model = model_of(preset(arch, **{"vocab_size": 60, **settings})).eval()
    quantize(model)
    model(torch.randint(4, 60, (2, 8)))
    assert any(type(module) is kept for module in model.modules())


def test_the_commands(tmp_path, capsys, monkeypatch):
    symbols = [f"w{number}" for number in range(36)]
    path, _ = write_checkpoint(tmp_path, symbols, max_tokens=16)
    (tmp_path / "text.txt").write_text("w3 w4 w5 w6\nw7 w8\n")
    texts = {}
    for dtype in ("fp32", "int8"):
        words = ["eval-lm", "--path", str(path), "--text", str(tmp_path / "text.txt"), "--dtype", dtype]
        assert main([*words, "--device", "cpu"]) == 0
        texts[dtype] = capsys.readouterr().out
    assert texts["fp32"] != texts["int8"]
    generate = ["generate", "--path", str(path), "--prompt", "w3 w4", "--max-tokens", "3", "--greedy"]
    assert main([*generate, "--dtype", "int8", "--device", "cpu"]) == 0 and "w3 w4" in capsys.readouterr().out
    monkeypatch.setattr(Team, "device", lambda self, name: torch.device("cuda"))
    assert main([*generate, "--dtype", "int8"]) == 1
    assert "--dtype int8 is for CPUs, and the device is cuda" in capsys.readouterr().err
