"""Dropout with masks of our own (:mod:`smlp.ops.dropout`)."""

from types import SimpleNamespace

import pytest
import torch

import smlp
from smlp.nn.layers import Dropout
from smlp.ops import dropout
from smlp.ops.fast_paths import reference_ops

SMALL = {"vocab_size": 20, "max_tokens": 8, "embed_dim": 16, "ffn_dim": 16, "num_dense_layers": 2, "dropout": 0.5}


@pytest.mark.parametrize("probability", [1e-7, 0.1, 0.5, 0.9, 1 - 1e-7])
def test_share_of_zeros_and_scale(probability):
    torch.manual_seed(0)
    x = torch.ones(400, 1001)
    out = dropout(x, probability)
    kept = out != 0
    spread = (max(1 - probability, 2**-16) / x.numel()) ** 0.5
    assert kept.float().mean().item() == pytest.approx(max(1 - probability, 2**-16), abs=5 * spread + 2**-17)
    if kept.any():
        scale = out[kept].unique()
        assert scale.numel() == 1
        assert scale.item() == pytest.approx(1 / min(max(1 - probability, 2**-16), 1), rel=1e-4)


def test_the_mean_stays_exactly_where_16_bits_round_the_probability():
    torch.manual_seed(0)
    probability = 1 - 1.5 * 2**-16  # two of 65536 are kept
    assert dropout(torch.ones(2**22), probability).max() == 2**15


def test_elements_are_independent():
    """Rows, columns and neighbours of the mask do not tell of each other."""
    torch.manual_seed(0)
    kept = (dropout(torch.ones(512, 512), 0.5) != 0).float() - 0.5
    for shift in [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (4, 0)]:
        correlation = 4 * (kept * kept.roll(shift, (0, 1))).mean().item()
        assert abs(correlation) < 5 / 512, shift
    assert (4 * kept.mean(dim=0)).abs().max() < 5 * 2 / 512**0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradient_is_the_mask(dtype):
    x = torch.randn(3, 5, 7, dtype=dtype).transpose(0, 2).requires_grad_()
    torch.manual_seed(1)
    out = dropout(x, 0.25)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.25), out), "the generator alone decides"
    assert out.dtype == dtype and out.shape == x.shape
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, torch.where(out == 0, 0.0, 4 / 3).to(dtype))
    torch.testing.assert_close(x * gradient, out)


def test_fairseq_can_keep_dropout_in_generation():
    """``--retain-dropout``, for means over several draws."""
    from smlp.models.language_model import LanguageModelDecoder, SparseMLPLanguageModel

    def outputs(arch="gmlp_lm_tiny", settings=SMALL, **options):
        model = SparseMLPLanguageModel(LanguageModelDecoder(None, smlp.build(arch, **settings)))
        model.prepare_for_inference_(SimpleNamespace(generation=SimpleNamespace(**options)))
        return [model(torch.arange(2, 10)[None])[0] for _ in range(2)]

    assert torch.equal(*outputs(retain_dropout=False))
    assert not torch.equal(*outputs(retain_dropout=True, retain_dropout_modules=None))
    of_weights = {**SMALL, "num_heads": 2, "dropout": 0.0, "attention_dropout": 0.5}
    for is_retained in (True, False):
        found = outputs("dense_lm_tiny", of_weights, retain_dropout=is_retained, retain_dropout_modules=None)
        assert torch.equal(*found) != is_retained
    with pytest.raises(smlp.UserError, match=r"--retain-dropout-modules \['TransformerDecoder'\]: .* no such names"):
        outputs(retain_dropout=True, retain_dropout_modules=["TransformerDecoder"])


def test_evaluation_reference_and_nothing_to_drop():
    x = torch.randn(4, 6)
    module = Dropout(0.5)
    assert module.eval()(x) is x and Dropout(0.0).train()(x) is x
    assert (module.train()(x) == 0).any() and "0.5" in repr(module)
    torch.manual_seed(0)
    expected = torch.nn.functional.dropout(x, 0.5)
    torch.manual_seed(0)
    with reference_ops():
        assert torch.equal(dropout(x, 0.5), expected)
    assert dropout(x[:0], 0.5).shape == (0, 6)
