"""scripts/routing_report.py: offsets that spread tokens evenly, and that need no later token."""

import pytest
import torch
from running import REPOSITORY

import smlp
from smlp.evaluation.leak import randomise
from smlp.moe.routers import ExpertOffsets


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import routing_report

    return routing_report


def uneven(loads):
    """The largest share of the tokens, over all experts and layers."""
    return max(float(load.max() / load.sum()) for load in loads.values())


@pytest.fixture
def model():
    """An sMLP whose routers prefer the first expert."""
    small = {"vocab_size": 40, "max_tokens": 16, "embed_dim": 16, "ffn_dim": 16, "num_dense_layers": 1}
    decoder = randomise(smlp.build("smlp_tiny", **small, num_sparse_layers=2, num_experts=4)).eval()
    with torch.no_grad():
        for block in decoder.blocks[-2:]:
            block.token_moe.router.centroids[0] *= 6
    return decoder


TOKENS = torch.randint(4, 40, (2048,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
def test_offsets_even_out_loads_whatever_the_scale(script, scale):
    generator = torch.Generator().manual_seed(2)
    logits_NE = scale * (torch.randn(4000, 8, generator=generator) + torch.linspace(0, 3, 8))
    shares = [
        torch.bincount(some.argmax(1), minlength=8) / 4000
        for some in (logits_NE, logits_NE + script.even_offsets(logits_NE))
    ]
    assert shares[0].max() > 0.4
    assert (shares[1] - 1 / 8).abs().max() < 0.01


def test_a_model_with_offsets_uses_its_experts_evenly_and_sees_nothing_later(script, model):
    plain, loads = script.evaluate(model, TOKENS, balanced=False)
    _, in_training = script.evaluate(model, TOKENS, balanced=True)
    assert uneven(loads) > 0.4 and uneven(in_training) < 0.26
    before = model(TOKENS[:16].view(1, 16)).logits
    script.add_offsets(model, TOKENS)
    shifted, with_offsets = script.evaluate(model, TOKENS, balanced=False)
    assert uneven(with_offsets) < 0.3 and shifted != plain
    whole = model(TOKENS[:16].view(1, 16)).logits
    assert not torch.equal(whole, before)
    for length in (1, 7, 15):
        torch.testing.assert_close(
            model(TOKENS[:length].view(1, length)).logits, whole[:, :length], atol=1e-5, rtol=1e-4
        )


def test_offsets_of_zero_change_nothing(script, model):
    tokens = TOKENS[:16].view(1, 16)
    before = model(tokens).logits
    for layer in script.balanced_layers(model):
        layer.router.offsets = ExpertOffsets(4, rate=0, by_sign=False)
    assert torch.equal(model(tokens).logits, before)
