"""Every router where batches are small, empty, padded or all of one mind: finite, and a gradient for every weight."""

import pytest
import torch
from architectures import LANGUAGE_MODELS
from sparse_references import randomised
from torch import nn

import smlp
from smlp.config import unflatten
from smlp.evaluation.leak import randomise
from smlp.moe.dispatch import LocalDispatcher
from smlp.moe.layer import TokenMoE
from smlp.moe.routers import BalancedRouter, HashRouter
from smlp.nn.blocks.gmlp_moe import gated_mlp_moe
from smlp.nn.blocks.smlp import feature_moe
from smlp.nn.blocks.sparse import feed_forward_moe
from smlp.nn.state import ForwardContext

ROUTERS = {
    "base": {"router": "base"},
    "base, shuffled": {"router": "base", "base_shuffle": True},
    "base, offsets": {"router": "base", "base_offset_rate": 0.1},
    "hash": {"router": "hash"},
    "loss_free": {"router": "loss_free"},
    "switch": {"router": "switch", "router_z_weight": 0.1, "router_jitter": 0.1},
    "switch, by gate": {"router": "switch", "drop_order": "gate"},
    "gshard, random": {"router": "gshard"},
    "gshard, sampled": {"router": "gshard", "second_expert": "sampled", "drop_order": "gate"},
    "gshard, all, after drop": {"router": "gshard", "second_expert": "all", "gate_normalisation": "after_drop"},
}
LAYERS = {"feed-forward": feed_forward_moe, "gMLP": gated_mlp_moe}
SMALL = {"vocab_size": 30, "max_tokens": 6, "embed_dim": 8, "ffn_dim": 10, "num_dense_layers": 1}
SMALL |= {"num_sparse_layers": 1, "sparse_block": "gmlp_moe"}
#: experts, and lengths of the sequences, padded to six tokens (the longest is not where all are shorter)
CASES = {
    "one expert": (1, [6, 6]),
    "fewer tokens than experts": (8, [2, 1]),
    "one token": (4, [1]),
    "all tokens to one expert": (4, [6, 6]),
    "an expert with none": (4, [6, 6]),
    "equal scores": (4, [6, 5]),
    "an all-padding row": (4, [6, 0, 3]),
    "zero valid tokens": (4, [0, 0]),
}
FAVOURITE = 2


def config_of(router, num_experts):
    return unflatten({**SMALL, **ROUTERS[router], "num_experts": num_experts})


def set_scores(router, case):
    """Positive inputs then all choose the favourite, or all avoid it, or see no difference."""
    with torch.no_grad():
        if isinstance(router, HashRouter):
            if case == "all tokens to one expert":
                router.table.fill_(FAVOURITE)
            elif case == "an expert with none":
                router.table[router.table == FAVOURITE] = 0
            return
        weight = router.centroids if isinstance(router, BalancedRouter) else router.weight
        if case == "all tokens to one expert":
            weight.zero_()
            weight[FAVOURITE] = 1
        elif case == "an expert with none":
            weight[FAVOURITE] = -10
        elif case == "equal scores":
            weight.zero_()


def batch(lengths):
    generator = torch.Generator().manual_seed(3)
    num_tokens = 6 if 6 in lengths or not any(lengths) else max(lengths)
    shape = (len(lengths), num_tokens)
    x = 0.1 + torch.rand(*shape, 8, dtype=torch.double, generator=generator)
    ids = torch.randint(2, 30, shape, generator=generator)
    return x.requires_grad_(), ids, torch.arange(num_tokens) < torch.tensor(lengths).unsqueeze(1)


def run(layer, case, training):
    x, ids, valid = batch(CASES[case][1])
    context = ForwardContext(tokens_Bn=ids, valid_Bn=None if valid.all() else valid)
    outputs = layer.train(training)(x, context)
    outputs, aux_losses = outputs if isinstance(outputs, tuple) else (outputs, {})
    return x, valid, outputs, aux_losses, context


def assert_sound(layer, x, valid, outputs, aux_losses):
    """Finite outputs, zero at padding, and finite gradients of everything, none missing."""
    assert outputs.isfinite().all() and not outputs[~valid].any()
    assert all(loss.isfinite() for loss in aux_losses.values())
    (outputs.square().sum() + sum(aux_losses.values())).backward()
    for name, tensor in [("x", x), *layer.named_parameters()]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
    assert not x.grad[~valid].any()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("experts", LAYERS)
@pytest.mark.parametrize("router", ROUTERS)
def test_token_routers(router, experts, case, training):
    num_experts, lengths = CASES[case]
    layer = randomised(LAYERS[experts](config_of(router, num_experts), 1))
    set_scores(layer.router, case)
    x, valid, outputs, aux_losses, context = run(layer, case, training)
    plan, num_tokens = context.plans[layer], sum(lengths)
    assert plan.num_tokens == num_tokens and plan.counts_E.numel() == num_experts
    assert plan.token_A.numel() == plan.counts_E.sum()
    balanced = router.startswith("base") and training
    if balanced:
        assert plan.counts_E.max() - plan.counts_E.min() <= 1
    elif case == "an expert with none":
        assert plan.counts_E[FAVOURITE] == 0
    elif case == "all tokens to one expert":
        first_choices = plan.counts_E[FAVOURITE]
        limited = training and router.startswith(("switch", "gshard"))
        assert first_choices == (num_tokens if not limited else 6 if router.startswith("gshard") else 3)
    assert_sound(layer, x, valid, outputs, aux_losses)
    unused = (plan.counts_E == 0).nonzero().flatten()
    for name, parameter in layer.experts.named_parameters():
        assert not parameter.grad[unused].any(), f"{name} of experts without tokens"


class IdentityExperts(nn.Module):
    """Experts that change nothing."""

    def forward(self, x_AH, counts):
        assert sum(counts) == len(x_AH)
        return x_AH


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("router", ROUTERS)
def test_identity_experts_are_the_identity(router, case, training):
    num_experts, lengths = CASES[case]
    config = config_of(router, num_experts)
    module = randomised(config.router_kind.build(config))
    set_scores(module, case)
    layer = TokenMoE(module, IdentityExperts(), "layer 1")
    x, valid, outputs, _, context = run(layer, case, training)
    plan = context.plans[layer]
    x_NH = x[valid]
    # without weights, a token comes back as often as it was sent
    inputs, record = LocalDispatcher().dispatch(x_NH, plan)
    combined = LocalDispatcher().combine(inputs, None, record)
    times_N1 = torch.bincount(plan.token_A, minlength=sum(lengths)).unsqueeze(1)
    torch.testing.assert_close(combined, x_NH * times_N1, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(combined.sum(), x, retain_graph=True)
    torch.testing.assert_close(gradient[valid], times_N1.expand_as(x_NH).double(), rtol=1e-12, atol=1e-12)
    if not (training and router.startswith(("switch", "gshard"))):
        experts_per_token = 2 if router.startswith("gshard") and num_experts > 1 else 1
        assert (times_N1 == experts_per_token).all(), "every token is somewhere"
        if router.startswith(("hash", "gshard")):  # weights that sum to one
            torch.testing.assert_close(outputs[valid], x_NH, rtol=1e-12, atol=1e-12)
            (gradient,) = torch.autograd.grad(outputs.sum(), x)
            torch.testing.assert_close(gradient, valid.unsqueeze(2).expand_as(x).double(), rtol=1e-12, atol=1e-12)


# An expert of features always has H/E of them, so that none can be without.
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [[6, 6], [6, 0, 3], [0, 0], [3]], ids=str)
@pytest.mark.parametrize("scores", ["different", "equal", "one favourite"])
@pytest.mark.parametrize("num_experts", [1, 2, 8])
@pytest.mark.parametrize("kind", ["partial", "leaky"])
def test_feature_routers(kind, num_experts, scores, lengths, training):
    settings = {"num_experts": num_experts, "feature_routing": kind, "sparse_block": "smlp"}
    layer = randomised(feature_moe(unflatten({**SMALL, **settings}), 1)).train(training)
    with torch.no_grad():
        if scores != "different":
            layer.router.weight.zero_()
        if scores == "one favourite":
            layer.router.weight[-1] = 1
    x, ids, valid = batch(lengths)
    context = ForwardContext(tokens_Bn=ids, valid_Bn=None if valid.all() else valid)
    update = layer(x, context)
    for row in context.plans[layer]:
        assert row.bincount(minlength=num_experts).tolist() == [8 // num_experts] * num_experts
    assert update.isfinite().all()
    update[valid].square().sum().backward()
    for name, tensor in [("x", x), *layer.named_parameters()]:
        assert tensor.grad is not None and tensor.grad.isfinite().all(), name
    assert not x.grad[~valid].any()


NARROW = {"vocab_size": 64, "max_tokens": 20, "embed_dim": 64, "ffn_dim": 64}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("arch", [arch for arch in LANGUAGE_MODELS if arch.endswith("_tiny")])
def test_a_batch_of_padding_trains_nothing_and_breaks_nothing(arch, recompute):
    model = randomise(smlp.build(arch, checkpoint_activations=recompute, **NARROW)).train()
    output = model(torch.full((2, 20), model.config.padding_idx))
    assert output.logits.isfinite().all()
    assert all(loss.item() == 0 for loss in output.aux_losses.values()), "padding is not routed, so it costs nothing"
    # as a trainer treats a batch that stands in for a missing one
    (output.logits.logsumexp(-1).sum() * 0 + sum(output.aux_losses.values())).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
