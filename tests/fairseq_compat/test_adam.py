"""Adam in one pass on a CPU is fairseq's Adam (:mod:`smlp.fairseq_compat.adam`)."""

import copy

import pytest
import torch

from smlp.ops.fast_paths import reference_ops


@pytest.fixture
def adam():
    from fairseq.optim.adam import Adam

    from smlp.fairseq_compat import adam

    if not hasattr(Adam.step, "__wrapped__"):
        adam.apply()
    return Adam


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (3,), (4, 2, 6))]


def updates(optimizer, parameters, count, seed=1):
    """So many updates; the second parameter has a gradient in every other one only."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        for place, parameter in enumerate(parameters):
            # tiny gradients, among which epsilon counts
            scale = (1e-8, 1.0, 1e-3)[place]
            gradient = scale * torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if place == 1 and number % 2 else gradient
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_is_fairseqs(adam, weight_decay):
    settings = {"lr": 0.1, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": weight_decay}
    ours, theirs = weights(), weights()
    one_pass, stepwise = adam(ours, **settings), adam(theirs, **settings)
    updates(one_pass, ours, 7)
    with reference_ops():
        updates(stepwise, theirs, 7)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6)
        mine, other = one_pass.state[our], stepwise.state[their]
        assert mine.keys() == other.keys() and mine["step"] == other["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine[name], other[name], rtol=1e-5, atol=0)


def test_it_goes_on_from_a_state_of_fairseqs(adam):
    ours, theirs = weights(), weights()
    one_pass, stepwise = adam(ours, lr=0.1), adam(theirs, lr=0.1)
    with reference_ops():
        updates(stepwise, theirs, 3)
    one_pass.load_state_dict(copy.deepcopy(stepwise.state_dict()))
    with torch.no_grad():
        for our, their in zip(ours, theirs, strict=True):
            our.copy_(their)
    updates(one_pass, ours, 3, seed=2)
    with reference_ops():
        updates(stepwise, theirs, 3, seed=2)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6)


def test_what_the_kernel_does_not_do_is_left_to_fairseq(adam):
    low = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    low[0].grad = torch.ones_like(low[0])
    adam(low, lr=0.5).step()
    assert low[0].tolist() == [0.5] * 3
    turned = [weights()[0], torch.nn.Parameter(weights()[0].detach().clone())]
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    turned[0].grad, turned[1].grad = gradient.t(), gradient.t().contiguous()
    for weight in turned:
        adam([weight], lr=0.1).step()
    torch.testing.assert_close(turned[0], turned[1])
    highest = weights()
    optimizer = adam(highest, lr=0.1, amsgrad=True)
    updates(optimizer, highest, 2)
    assert "max_exp_avg_sq" in optimizer.state[highest[0]]
