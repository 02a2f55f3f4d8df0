"""Plans, dispatch, experts and sparse layers, by hand-worked cases and against one-token-at-a-time references."""

import pytest
import torch
import torch.nn.functional as F
from comparing import EXACT_LAYER, assert_same
from sparse_references import FixedRouter, RoundRobinRouter, ScalingExperts
from torch import nn

import smlp.errors
from smlp.moe.dispatch import LocalDispatcher, LocalFeatureDispatcher
from smlp.moe.experts import FeedForwardExperts, SpatialExperts
from smlp.moe.feature_layer import FeatureMoE
from smlp.moe.layer import TokenMoE
from smlp.moe.plan import RoutingPlan
from smlp.moe.routers import BalancedRouter
from smlp.nn.state import ForwardContext

EXACT = {"rtol": EXACT_LAYER, "atol": EXACT_LAYER}
NUM_EXPERTS = (1, 2, 7, 8, 32)


def test_a_plan_is_sorted_by_expert_then_token():
    plan = RoutingPlan.from_experts(torch.tensor([2, 0, 2, 0, 1, 2]), num_experts=4)
    assert plan.token_A.tolist() == [1, 3, 4, 0, 2, 5]
    assert plan.expert_A.tolist() == [0, 0, 1, 2, 2, 2]
    assert plan.counts_E.tolist() == [2, 1, 3, 0]
    assert (plan.num_tokens, plan.num_experts) == (6, 4)


@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
@pytest.mark.parametrize("num_tokens", [0, 1, 6, 31, 64])
@pytest.mark.parametrize("router", [RoundRobinRouter, FixedRouter])
def test_every_token_reaches_its_expert_and_returns(num_experts, num_tokens, router):
    layer = TokenMoE(router(num_experts), ScalingExperts(), "layer 0")
    x = torch.randn(1, num_tokens, 3, requires_grad=True)
    y, aux_losses = layer(x, ForwardContext())
    expert = torch.arange(num_tokens) % num_experts if router is RoundRobinRouter else torch.tensor(num_experts - 1)
    scale = (expert + 1.0).expand(num_tokens).unsqueeze(1)
    torch.testing.assert_close(y[0], x[0] * scale)
    assert aux_losses == {}
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient[0], scale.expand(-1, 3))


def test_combine_sums_assignments_and_leaves_dropped_tokens_at_zero():
    # token 0 twice, token 1 dropped, token 2 once
    plan = RoutingPlan(torch.tensor([0, 0, 2]), torch.tensor([0, 1, 1]), torch.tensor([1, 2]), num_tokens=3)
    dispatcher, x = LocalDispatcher(), torch.tensor([[1.0], [10.0], [100.0]])
    inputs, record = dispatcher.dispatch(x, plan)
    assert inputs.flatten().tolist() == [1, 1, 100] and record.counts == [1, 2]
    combined = dispatcher.combine(inputs, torch.tensor([0.5, 0.25, 2.0]), record)
    assert combined.flatten().tolist() == [0.75, 0, 200]


def test_feature_chunks_go_out_and_back_in_place():
    dispatcher, x = LocalFeatureDispatcher(), torch.arange(12.0).view(1, 2, 6)
    chunks, record = dispatcher.dispatch(x, 3)
    assert chunks[0, 1, 2].tolist() == [10, 11] and record.num_seqs == [1]
    assert torch.equal(dispatcher.combine(chunks, record), x)


def test_padding_is_not_routed_and_not_updated():
    layer = TokenMoE(RoundRobinRouter(2), ScalingExperts(), "layer 0")
    x = torch.ones(2, 3, 4)
    valid = torch.tensor([[True, True, False], [True, False, False]])
    context = ForwardContext(valid_Bn=valid)
    y, _ = layer(x, context)
    assert y[..., 0].tolist() == [[1, 2, 0], [1, 0, 0]]
    assert context.plans[layer].num_tokens == 3
    nothing, _ = layer(x, ForwardContext(valid_Bn=torch.zeros(2, 3, dtype=torch.bool)))
    assert torch.equal(nothing, torch.zeros_like(x))


def make_token_moe(num_experts, width=8, hidden=12, dtype=torch.double):
    torch.manual_seed(0)
    layer = TokenMoE(
        BalancedRouter(width, num_experts, init_gain=0.1),
        FeedForwardExperts(width, hidden, range(num_experts), "gelu"),
        name="layer 5 (tMoE)",
    ).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def token_moe_reference(layer, x_NH, expert_N):
    """alpha * FFN(LN(x)) of each token with its expert, one by one (BASE; Yu et al., 2022, 3.1)."""
    experts, rows = layer.experts, []
    for x, e in zip(x_NH, expert_N.tolist(), strict=True):
        alpha = torch.sigmoid(x @ layer.router.centroids[e])
        normed = F.layer_norm(x, x.shape, experts.norm_weight[e], experts.norm_bias[e])
        rows.append(alpha * (experts.w2[e] @ F.gelu(experts.w1[e] @ normed + experts.b1[e]) + experts.b2[e]))
    return torch.stack(rows)


@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
@pytest.mark.parametrize("training", [True, False])
def test_token_moe_against_the_reference(num_experts, training):
    layer = make_token_moe(num_experts).train(training)
    x = torch.randn(2, 9, 8, dtype=torch.double, requires_grad=True)
    context = ForwardContext()
    y, _ = layer(x, context)
    plan = context.plans[layer]
    expert_N = torch.empty(18, dtype=torch.long)
    expert_N[plan.token_A] = plan.expert_A
    affinity = x.detach().flatten(0, 1) @ layer.router.centroids.detach().t()
    if training:
        assert plan.counts_E.max() - plan.counts_E.min() <= 1
    else:
        assert torch.equal(expert_N, affinity.argmax(1))
    expected = token_moe_reference(layer, x.flatten(0, 1), expert_N).view_as(y)
    assert_same(y, expected, [x, *layer.parameters()], tolerance=EXACT_LAYER)


def test_greedy_routing_does_not_depend_on_the_batch():
    layer = make_token_moe(8).eval()
    x = torch.randn(4, 5, 8, dtype=torch.double)
    together, _ = layer(x, ForwardContext())
    alone = torch.cat([layer(row[None, None], ForwardContext())[0] for row in x.flatten(0, 1)]).view_as(x)
    torch.testing.assert_close(together, alone, **EXACT)


def test_a_layer_keeps_to_a_decision_it_is_given():
    layer = make_token_moe(4).train()
    x = torch.randn(2, 8, 8, dtype=torch.double)
    context = ForwardContext()
    layer(x, context)
    first = context.plans[layer]
    layer(x.flip(1), context)
    assert context.plans[layer] is first


@pytest.mark.parametrize("training", [True, False])
def test_nan_names_the_layer(training):
    layer = make_token_moe(4).train(training)
    x = torch.randn(1, 8, 8, dtype=torch.double)
    x[0, 3, 0] = float("nan")
    with pytest.raises(smlp.errors.NaNError, match=r"layer 5 \(tMoE\): 1 of 8 tokens"):
        layer(x, ForwardContext())


@pytest.mark.parametrize(
    ("num_experts", "kind"),
    [(1, "gated"), (2, "gated"), (7, "gated"), (8, "gated"), (1, "linear"), (4, "linear"), (4, "additive")],
)
def test_feature_moe_against_the_reference(num_experts, kind):
    """z_i * (tril(W_i) @ norm(z)_i + b_i), each chunk and position by itself (Yu et al., 2022, 3.2.1; equation 2)."""
    torch.manual_seed(0)
    width, max_tokens, num_tokens = 14 if num_experts == 7 else 16, 6, 5
    experts = SpatialExperts(max_tokens, range(num_experts), 0.1, 0.0)
    layer = FeatureMoE(width, num_experts, experts, kind=kind).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, num_tokens, width, dtype=torch.double, requires_grad=True)
    y = layer(x, ForwardContext())
    z = F.layer_norm(x, (width,), layer.norm.weight, layer.norm.bias)
    normed = F.layer_norm(z, (width,), layer.spatial_norm.weight, layer.spatial_norm.bias)
    chunk, columns = width // num_experts, []
    for feature in range(width):
        weight, bias = layer.experts.weight[feature // chunk], layer.experts.bias[feature // chunk]
        gates = [sum(weight[t, s] * normed[:, s, feature] for s in range(t + 1)) + bias[t] for t in range(num_tokens)]
        z_Bn, mixed_Bn = z[:, :, feature], torch.stack(gates, dim=1)
        columns.append({"gated": z_Bn * mixed_Bn, "linear": mixed_Bn, "additive": z_Bn + mixed_Bn}[kind])
    expected = torch.stack(columns, dim=2)
    assert_same(y, expected, [x, *layer.parameters()], tolerance=EXACT_LAYER)


def test_initial_values_do_not_depend_on_where_an_expert_lives():
    def experts(expert_ids):
        torch.manual_seed(7)
        feed_forward = FeedForwardExperts(4, 6, expert_ids, "gelu")
        spatial = SpatialExperts(5, expert_ids, 0.1, 0.0)
        return feed_forward, spatial, torch.rand(1)

    everywhere = experts(range(8))
    for first in (0, 4):
        here = experts(range(first, first + 4))
        assert torch.equal(here[0].w1, everywhere[0].w1[first : first + 4])
        assert torch.equal(here[1].weight, everywhere[1].weight[first : first + 4])
        assert torch.equal(here[2], everywhere[2]), "the number of local experts must not shift the random stream"
    assert not torch.equal(everywhere[0].w1[0], everywhere[0].w1[1])
    assert not torch.equal(everywhere[1].weight[0], everywhere[1].weight[1])
