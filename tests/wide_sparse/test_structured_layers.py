"""Structured layers compared with their explicit sparse matrices: outputs and gradients in float64, to 1e-12."""

import re

import pytest
import torch
from running import REPOSITORY, run_python

from data_prep.images import fetch
from smlp.moe.experts import SpatialExperts
from smlp.moe.feature_layer import FeatureMoE
from smlp.nn.layers import MaskedLinear
from smlp.vision.model import ChannelLayer, MixerBlock, TokenLayer
from smlp.vision.presets import preset
from smlp.wide_sparse.layers import (
    KroneckerLinear,
    MonarchLinear,
    PermutedKronecker,
    commutation,
    permutation_matrix,
)

S, C = 5, 4
M = S * C
EXACT = {"rtol": 0, "atol": 1e-12}


def random_order():
    return torch.randperm(M)


LAYERS = {
    "Kronecker": lambda: KroneckerLinear(S, C),
    "Monarch": lambda: MonarchLinear(S, C),
    "PK of tokens": lambda: PermutedKronecker(C, S, commutation(S, C), commutation(C, S)),
    "PK of channels": lambda: PermutedKronecker(S, C, torch.arange(M), torch.arange(M)),
    "random PK": lambda: PermutedKronecker(C, S, random_order(), random_order()),
    "masked": lambda: MaskedLinear(M, 7, 0.4, bias=False),
}


def agree(fast, slow, parameters, x):
    """Compare values and gradients of two functions of x."""
    results = []
    for function in (fast, slow):
        out = function(x)
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
        results.append((out, torch.autograd.grad((out * weight).sum(), [x, *parameters])))
    torch.testing.assert_close(results[0][0], results[1][0], **EXACT)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_matrix(name):
    torch.manual_seed(1)
    layer = LAYERS[name]().double()
    x = torch.randn(3, M, dtype=torch.float64, requires_grad=True)
    agree(layer, lambda x: x @ layer.matrix().t(), list(layer.parameters()), x)


def test_a_commutation_transposes():
    x = torch.arange(M).view(S, C)
    assert torch.equal(x.flatten()[commutation(S, C)], x.t().flatten())
    assert torch.equal(permutation_matrix(commutation(S, C)).t(), permutation_matrix(commutation(C, S)))


def test_an_s_mixer_is_a_wide_mlp():
    """Equation 10, written for vectors of rows."""
    torch.manual_seed(2)
    tokens, channels = TokenLayer(S, S, "gelu").double(), ChannelLayer(C, "gelu").double()
    torch.nn.init.normal_(tokens.weight)
    order = permutation_matrix(commutation(S, C))

    def explicit(x_BSC):
        first = order.t() @ torch.block_diag(*[tokens.weight] * C) @ order
        second = torch.block_diag(*[channels.fc.weight] * S)
        hidden = torch.nn.functional.gelu(x_BSC.flatten(1) @ first.t())
        return torch.nn.functional.gelu(hidden @ second.t()).view(-1, S, C)

    x = torch.randn(3, S, C, dtype=torch.float64, requires_grad=True)
    agree(lambda x: channels(tokens(x)), explicit, [tokens.weight, channels.fc.weight], x)


def test_mixing_without_activation_is_a_monarch_matrix_with_equal_blocks():
    """Corollary 3.4."""
    torch.manual_seed(3)
    product, monarch = KroneckerLinear(S, C).double(), MonarchLinear(S, C).double()
    with torch.no_grad():
        monarch.right.copy_(product.right.t().expand(S, C, C))
        monarch.left.copy_(product.left.expand(C, S, S))
    torch.testing.assert_close(monarch.matrix(), product.matrix(), **EXACT)
    x = torch.randn(2, M, dtype=torch.float64)
    torch.testing.assert_close(monarch(x), product(x), **EXACT)


@pytest.mark.parametrize("block", ["s_mixer", "mixer"])
def test_an_rp_mixer_is_a_permuted_kronecker_product(block):
    """Equations 19 and S.13, for each of the matrices of an MLP too."""
    torch.manual_seed(4)
    config = preset(
        "smlp_rp_s_mixer", block=block, mixed_tokens=0, img_size=8, patch_size=4, embed_dim=6, token_dim=5, ffn_dim=7
    )
    s, c = config.num_tokens, 6
    layer = MixerBlock(config, (s, s), (0.0, 0.0)).double()
    for value in layer.parameters():
        torch.nn.init.normal_(value)
    orders = [permutation_matrix(order.index) for order in layer.orders]
    assert all(not torch.equal(one, torch.eye(s * c, dtype=torch.float64)) for one in orders)
    gelu = torch.nn.functional.gelu

    def explicit(x):
        z = layer.norm1(x).flatten(1) @ orders[0].t() @ permutation_matrix(commutation(s, c)).t()
        for number, (weight, bias) in enumerate(weights(layer.mlp_tokens)):
            z = (z if number == 0 else gelu(z)) @ torch.block_diag(*[weight] * c).t() + bias.repeat(c)
        z = gelu(z) if block == "s_mixer" else z
        x = x + (z @ permutation_matrix(commutation(c, s)).t() @ orders[1].t()).view_as(x)
        z = layer.norm2(x).flatten(1) @ orders[2].t()
        for number, (weight, bias) in enumerate(weights(layer.mlp_channels)):
            z = (z if number == 0 else gelu(z)) @ torch.block_diag(*[weight] * s).t() + bias.repeat(s)
        z = gelu(z) if block == "s_mixer" else z
        return x + (z @ orders[3].t()).view_as(x)

    x = torch.randn(3, s, c, dtype=torch.float64, requires_grad=True)
    agree(layer, explicit, list(layer.parameters()), x)


def weights(network):
    """The matrices and biases of a network of one or two layers."""
    if isinstance(network, TokenLayer | ChannelLayer):
        weight = network.weight if isinstance(network, TokenLayer) else network.fc.weight
        return [(weight, weight.new_zeros(len(weight)))]
    return [(layer.weight, layer.bias) for layer in (network.fc1, network.fc2)]


def test_permutations_keep_singular_values():
    torch.manual_seed(5)
    layer = PermutedKronecker(C, S, random_order(), random_order()).double()
    own = torch.linalg.svdvals(layer.weight)
    found = torch.linalg.svdvals(layer.matrix())
    torch.testing.assert_close(found, own.repeat_interleave(C), **EXACT)
    assert (layer.matrix() != 0).sum() == C * S * S


@pytest.mark.parametrize("experts", [1, 2, C])
def test_the_smoe_runs_from_a_kronecker_product_to_monarchs_right_factor(experts):
    """Over vec of columns its matrix has a block tril(W) for each feature, of which E are distinct."""
    torch.manual_seed(6)
    moe = FeatureMoE(C, experts, SpatialExperts(S, range(experts), 1.0, 0.0), kind="linear").double()
    matrices = moe.experts.weight.detach().tril()
    right = torch.block_diag(*matrices.repeat_interleave(C // experts, 0))
    x = torch.randn(S, C, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(
        lambda v: moe._mix(v.view(C, S).t()[None], 0)[0].t().flatten(), x.t().flatten()
    )
    torch.testing.assert_close(jacobian, right, **EXACT)
    if experts == 1:
        torch.testing.assert_close(right, torch.kron(torch.eye(C, dtype=torch.float64), matrices[0]), **EXACT)
    if experts == C:
        monarch = MonarchLinear(C, S).double()
        with torch.no_grad():
            monarch.right.copy_(matrices)
            monarch.left.copy_(torch.eye(C, dtype=torch.float64).expand(S, C, C))
        torch.testing.assert_close(monarch.matrix(), right, **EXACT)


def test_the_shallow_networks_learn_digits(tmp_path):
    """examples/wide_sparse/shallow.py, Figure 2d: chance is an error of 90 %."""
    fetch("digits", tmp_path / "digits", limit=40, quiet=True)
    script = REPOSITORY / "examples" / "wide_sparse" / "shallow.py"
    done = run_python(script, tmp_path / "digits", "--epochs", 20, "--seeds", 1)
    assert done.rc == 0, done.stderr
    found = re.findall(r"(\w+) seed 1: error ([\d.]+) % \(([\d.]+) % in training\)", done.stdout)
    assert [name for name, *_ in found] == ["monarch", "kronecker"]
    for name, held_out, learnt in found:
        assert float(learnt) < float(held_out) < 40, name
    nothing = run_python(script, tmp_path)
    assert nothing.rc != 0 and "has no CLASS/NAME.png" in nothing.stderr and "Traceback" not in nothing.stderr
