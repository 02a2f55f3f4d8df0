"""Switch and GShard: gates by hand, layers one token at a time, and fairscale's gate on what both can express."""

import pytest
import torch
from comparing import assert_same
from fairscale.nn.moe import top2gate
from sparse_references import randomised, slow_top_k, top_k_draws

from smlp.moe.experts import FeedForwardExperts
from smlp.moe.layer import TokenMoE
from smlp.moe.plan import RoutingPlan
from smlp.moe.routers import TopKRouter, TopKSettings
from smlp.moe.routers.top_k import assignment_weights, load_balance_loss, router_z_loss, top_k_choices
from smlp.nn.state import ForwardContext

WIDTH, HIDDEN, NUM_EXPERTS = 6, 5, 4
SWITCH = {"num_choices": 1, "load_balance_weight": 0.7}
GSHARD = {"num_choices": 2, "load_balance_weight": 0.7}
BOTH = {"drop_order": "gate", "router_jitter": 0.3, "router_z_weight": 0.2}
CASES = {
    "switch": SWITCH,
    "switch, no limit": {**SWITCH, "capacity_factor": 0.0},
    "switch, room for all": {**SWITCH, "capacity_factor": 4.0},
    "switch, by gate": {**SWITCH, "capacity_factor": 0.5, **BOTH},
    "gshard, no limit": {**GSHARD, "capacity_factor": 0.0, "router_z_weight": 0.2},
    "gshard, by gate": {**GSHARD, "capacity_factor": 0.5, **BOTH},
} | {
    f"gshard, {second}, {normalise}, {order}": {
        **GSHARD, "capacity_factor": 0.6, "second_expert": second, "gate_normalisation": normalise, "drop_order": order
    }
    for second in ("random", "sampled", "all")
    for normalise in ("before_drop", "after_drop")
    for order in ("position", "gate")
}  # fmt: skip


def make(num_experts=NUM_EXPERTS, **settings):
    router = TopKRouter(WIDTH, num_experts, TopKSettings(**settings))
    experts = FeedForwardExperts(WIDTH, HIDDEN, range(num_experts), "gelu", as_in_base=False)
    return randomised(TokenMoE(router, experts, "layer 1 (tMoE)"))


def tokens(num_seqs=2, num_tokens=7):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_seqs, num_tokens, WIDTH, dtype=torch.double, generator=generator, requires_grad=True)


def flat(outputs, aux_losses):
    """Outputs and losses in one vector, losses by name."""
    return torch.cat([outputs.flatten(), *(aux_losses[name].reshape(1) for name in sorted(aux_losses))])


def decided(plan):
    """(token, choice) pairs with a place."""
    return sorted(zip(plan.token_A.tolist(), plan.rank_A.tolist(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_training_against_one_token_at_a_time(name):
    layer, x, context = make(**CASES[name]).train(), tokens(), ForwardContext()
    settings = layer.router.settings
    torch.manual_seed(3)
    outputs, aux_losses = layer(x, context)
    x_NH = x.flatten(0, 1)
    torch.manual_seed(3)
    slow = slow_top_k(
        layer.router, layer.experts, x_NH, *top_k_draws(settings, x_NH, NUM_EXPERTS), settings.capacity_factor
    )
    assert sorted(aux_losses) == sorted(slow.aux_losses)
    assert_same(flat(outputs, aux_losses), flat(slow.outputs, slow.aux_losses), [x, *layer.parameters()], 1e-9)
    plan = context.plans[layer]
    assert decided(plan) == slow.placed
    assert plan.dropped["capacity"] == len(slow.full) and plan.dropped.get("second_expert", 0) == len(slow.skipped)
    if "no limit" in name or "room" in name:
        assert not slow.full
    else:
        assert slow.full, "the case is meant to drop tokens"
    if layer.router.settings.num_choices == 2:
        assert bool(slow.skipped) == (settings.second_expert == "random")
    lost = sorted(set(range(x_NH.size(0))) - {token for token, _ in slow.placed})
    assert not outputs.flatten(0, 1)[lost].any(), "a token without a place gets no update"


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_evaluation_against_one_token_at_a_time(num_choices, factor):
    layer = make(num_choices=num_choices, eval_capacity_factor=factor, router_jitter=0.3, router_z_weight=0.1).eval()
    x, context = tokens(), ForwardContext()
    before = torch.get_rng_state()
    outputs, aux_losses = layer(x, context)
    assert torch.equal(before, torch.get_rng_state()) and aux_losses == {}
    x_NH = x.flatten(0, 1)
    slow = slow_top_k(layer.router, layer.experts, x_NH, torch.ones_like(x_NH), None, factor)
    assert_same(outputs.flatten(0, 1), slow.outputs, [x, *layer.parameters()], 1e-9)
    plan = context.plans[layer]
    assert decided(plan) == slow.placed and plan.dropped == {"capacity": len(slow.full)}
    assert bool(slow.full) == bool(factor), "nothing is dropped unless it is asked for"


def test_best_and_second_best_by_hand():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0], [-1.0, -3.0, -2.0]])
    assert top_k_choices(logits, 1).tolist() == [[1], [0], [0]]
    assert top_k_choices(logits, 2).tolist() == [[1, 2], [0, 1], [0, 2]]
    noise = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
    assert top_k_choices(logits, 2, noise).tolist() == [[1, 0], [0, 2], [0, 1]], "noise moves second choices only"
    assert top_k_choices(logits[:, :1], 2).tolist() == [[0], [0], [0]], "one expert is one choice"


def test_one_expert_has_places_for_one_choice_of_each_token():
    layer, context = make(num_experts=1, num_choices=2, capacity_factor=0.5).train(), ForwardContext()
    layer(tokens(1, 8), context)
    assert context.plans[layer].token_A.tolist() == [0, 1, 2, 3]


def test_weights_by_hand():
    gates = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    # token 0 keeps both of its experts, token 1 only its second one
    plan = RoutingPlan(
        torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1]), torch.tensor([2, 1, 0]), 2,
        choice_NK=torch.tensor([[0, 1], [2, 0]]), rank_A=torch.tensor([0, 1, 1]),
    )  # fmt: skip
    before = assignment_weights(gates, plan, "before_drop")
    torch.testing.assert_close(before, torch.tensor([0.6 / 0.9, 0.2 / 0.8, 0.3 / 0.9]))
    after = assignment_weights(gates, plan, "after_drop")
    torch.testing.assert_close(after, torch.tensor([0.6 / 0.9, 1.0, 0.3 / 0.9]))


def test_losses_by_hand():
    gates = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    balance = load_balance_loss(gates, torch.tensor([0, 0, 1]))
    assert float(balance) == pytest.approx(2 * (2 / 3 * 0.6 + 1 / 3 * 0.4))
    even = load_balance_loss(torch.full((8, 4), 0.25), torch.arange(8) % 4)
    one = load_balance_loss(torch.eye(4)[torch.zeros(8, dtype=torch.long)], torch.zeros(8, dtype=torch.long))
    assert (float(even), float(one)) == pytest.approx((1, 4))
    scores = torch.tensor([[0.0, 0.0], [3.0, 1.0]]).log1p()  # sums of exponentials: 2 and 6
    assert float(router_z_loss(scores)) == pytest.approx((0.693147**2 + 1.791759**2) / 2, rel=1e-5)


@pytest.mark.parametrize(
    "settings", [{"num_choices": 1, "load_balance_weight": 0.0}, {"num_choices": 1, "load_balance_weight": 0.5}]
)
def test_only_losses_with_a_weight_are_returned(settings):
    _, aux_losses = make(**settings).train()(tokens(), ForwardContext())
    assert list(aux_losses) == (["load_balance"] if settings["load_balance_weight"] else [])


def second_choices(policy, num_tokens=20_000):
    """Routing of many tokens whose scores are 0, -1 and -3."""
    router = TopKRouter(1, 3, TopKSettings(num_choices=2, capacity_factor=0.0, second_expert=policy)).train()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[0.0], [-1.0], [-3.0]]))
    torch.manual_seed(0)
    return router(torch.ones(num_tokens, 1), None).plan


def test_a_random_second_expert_is_kept_in_proportion_to_its_gate():
    plan = second_choices("random")
    share = 1 - plan.dropped["second_expert"] / plan.num_tokens
    assert share == pytest.approx(2 * 0.26894, abs=0.02)  # exp(-1) / (1 + exp(-1)) = 0.26894
    assert plan.counts_E.tolist()[0] == plan.num_tokens and not plan.counts_E[2]


def test_a_sampled_second_expert_is_drawn_by_gate():
    plan = second_choices("sampled")
    share = plan.counts_E / plan.num_tokens
    # exp(-1) / (exp(-1) + exp(-3)) = 0.8808
    torch.testing.assert_close(share, torch.tensor([1.0, 0.8808, 0.1192]), atol=0.015, rtol=0)
    assert "second_expert" not in plan.dropped
    assert second_choices("all").counts_E.tolist() == [plan.num_tokens, plan.num_tokens, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gate_and_its_jitter_are_computed_in_float32(dtype):
    router = TopKRouter(64, 64, TopKSettings(num_choices=1, router_jitter=0.01)).train().to(dtype)
    with torch.no_grad():
        router.weight.copy_(torch.eye(64))
    routing = router(torch.ones(500, 64, dtype=dtype), None)  # scores are the jitter itself
    scores = routing.logits_NE
    assert scores.dtype == routing.weight_A.dtype == routing.aux_losses["load_balance"].dtype == torch.float32
    assert 0.99 <= scores.min() < 0.9905 and 1.0095 < scores.max() <= 1.01
    assert abs(scores.mean() - 1) < 2e-4


def top2gating_without_noise(monkeypatch, logits_NE):
    monkeypatch.setattr(top2gate, "gumbel_rsample", lambda shape, device: torch.zeros(shape, device=device))
    l_aux, combine_NEC, dispatch_NEC = top2gate.top2gating(logits_NE)
    return l_aux, combine_NEC.sum(dim=2), dispatch_NEC


def skewed_logits(num_tokens, num_experts, skew):
    """Scores of a batch; with a skew the first experts get more tokens than they have places for."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    return (logits - skew * torch.arange(num_experts)).requires_grad_()


def route(logits_NE, **settings):
    """Our router on given scores."""
    num_experts = logits_NE.size(1)
    router = TopKRouter(num_experts, num_experts, TopKSettings(load_balance_weight=1.0, **settings)).train()
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
    return router(logits_NE, None)


SHAPES = [(8, 2), (12, 4), (64, 8), (6, 6)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("skew", [0.0, 0.5, 3.0])
def test_top_2_agrees_with_fairscale(monkeypatch, shape, skew):
    logits_NE = skewed_logits(*shape, skew)
    their_aux, their_weight_NE, their_dispatch_NEC = top2gating_without_noise(monkeypatch, logits_NE)
    routing = route(logits_NE, num_choices=2, second_expert="all", gate_normalisation="after_drop")
    plan = routing.plan
    weight_NE = torch.zeros(shape).index_put((plan.token_A, plan.expert_A), routing.weight_A)
    torch.testing.assert_close(weight_NE, their_weight_NE, rtol=1e-5, atol=1e-7)
    sent_NE = torch.zeros(shape, dtype=torch.bool).index_put((plan.token_A, plan.expert_A), torch.tensor(True))
    assert torch.equal(sent_NE, their_dispatch_NEC.any(dim=2))
    assert torch.equal(plan.counts_E, their_dispatch_NEC.any(dim=2).sum(dim=0))
    assert (plan.dropped["capacity"] > 0) == (plan.token_A.numel() < 2 * shape[0])
    our_aux = routing.aux_losses["load_balance"]
    torch.testing.assert_close(their_aux, our_aux / shape[1] ** 2)
    coefficients = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    for ours, theirs in ((our_aux / shape[1] ** 2, their_aux), (weight_NE, their_weight_NE)):
        (our_gradient,) = torch.autograd.grad((ours * coefficients).sum(), logits_NE, retain_graph=True)
        (their_gradient,) = torch.autograd.grad((theirs * coefficients).sum(), logits_NE, retain_graph=True)
        torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-4, atol=1e-6)
    if skew == 3.0 and shape[1] > 2:
        assert plan.dropped["capacity"] > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("skew", [0.0, 0.5, 3.0])
def test_top_1_agrees_with_fairscales_first_choices(monkeypatch, shape, skew):
    logits_NE = skewed_logits(*shape, skew)
    _, _, their_dispatch_NEC = top2gating_without_noise(monkeypatch, logits_NE)
    first_N = logits_NE.argmax(dim=1)
    theirs_N = their_dispatch_NEC.any(dim=2)[torch.arange(shape[0]), first_N]  # whether it has a place there
    # their capacity is 2N/E for first and second choices together, and first ones come before second ones
    plan = route(logits_NE, num_choices=1, capacity_factor=2.0).plan
    assert plan.token_A.sort().values.tolist() == theirs_N.nonzero().squeeze(1).tolist()
    assert torch.equal(plan.expert_A, first_N[plan.token_A])
    assert plan.dropped["capacity"] == int((~theirs_N).sum())
    if skew == 3.0 and shape[1] > 2:
        assert plan.dropped["capacity"] > 0


@pytest.mark.parametrize(("training", "evaluation"), [(1.0, 0.0), (0.0, 2.0), (0.0, 0.0)])
def test_later_tokens_matter_where_capacity_is_limited(training, evaluation):
    """A leak test excuses nothing else."""
    router = TopKRouter(4, 2, TopKSettings(1, capacity_factor=training, eval_capacity_factor=evaluation))
    assert (router.train().looks_ahead(), router.eval().looks_ahead()) == (training > 0, evaluation > 0)
