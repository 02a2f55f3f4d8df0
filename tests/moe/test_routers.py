"""Plans by hand; every token router within its block, one token at a time and with padding; BASE's shuffle."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_same
from sparse_references import feed_forward_expert, randomised, slow_top_k, top_k_draws

from smlp.config import unflatten
from smlp.errors import NaNError
from smlp.moe.plan import RoutingPlan, expert_capacity, slots
from smlp.moe.routers import BalancedRouter, HashRouter, LossFreeRouter, TopKRouter, balanced
from smlp.nn.blocks import sparse_block
from smlp.nn.state import ForwardContext

# Five tokens, best choice first: expert 0 is wanted by three tokens at once.
CHOICES = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 0], [2, 0]])


def table(plan):
    """(expert, token, which of its choices) of every assignment, in the plan's order."""
    return list(zip(plan.expert_A.tolist(), plan.token_A.tolist(), plan.rank_A.tolist(), strict=True))


def test_first_choices_queue_before_second_ones_and_earlier_tokens_before_later():
    plan = RoutingPlan.from_choices(CHOICES, num_experts=4, capacity=2)
    # expert 0: tokens 0 and 1, then full; expert 1: token 3, then token 0's second choice; expert 2: 4, then 1
    assert table(plan) == [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 3, 0), (2, 1, 1), (2, 4, 0)]
    assert plan.counts_E.tolist() == [2, 2, 2, 0] and plan.num_tokens == 5
    assert plan.dropped == {"capacity": 4} and torch.equal(plan.choice_NK, CHOICES)


def test_tokens_with_the_higher_priority_take_places_first():
    priority = torch.tensor([0.1, 0.2, 0.5, 0.4, 0.3])
    plan = RoutingPlan.from_choices(CHOICES, num_experts=4, capacity=2, priority_N=priority)
    # expert 0: tokens 2 and 1; expert 1: token 3, then token 2's second choice; expert 2: 4, then 1; none for token 0
    assert table(plan) == [(0, 1, 0), (0, 2, 0), (1, 2, 1), (1, 3, 0), (2, 1, 1), (2, 4, 0)]
    assert plan.dropped == {"capacity": 4}
    ties = RoutingPlan.from_choices(CHOICES, num_experts=4, capacity=2, priority_N=torch.ones(5))
    assert table(ties) == table(RoutingPlan.from_choices(CHOICES, num_experts=4, capacity=2))


def test_choices_given_up_beforehand_take_no_place():
    wanted = torch.ones(5, 2, dtype=torch.bool)
    wanted[0, 1] = False
    plan = RoutingPlan.from_choices(CHOICES, num_experts=4, capacity=2, wanted_NK=wanted)
    # token 2's second choice takes the place at expert 1 that token 0 gave up
    assert table(plan) == [(0, 0, 0), (0, 1, 0), (1, 2, 1), (1, 3, 0), (2, 1, 1), (2, 4, 0)]
    assert plan.dropped == {"capacity": 3, "second_expert": 1}


def test_without_a_limit_every_choice_has_a_place():
    plan = RoutingPlan.from_choices(CHOICES, num_experts=4)
    assert plan.counts_E.tolist() == [5, 3, 2, 0] and plan.dropped == {"capacity": 0}
    assert table(plan) == sorted(table(plan)) and len(table(plan)) == 10


def test_places_in_the_queues_of_experts():
    assert slots(torch.tensor([2, 0, 2, 2, 0, 1]), 4).tolist() == [0, 0, 1, 2, 1, 0]
    assert slots(torch.empty(0, dtype=torch.long), 3).tolist() == []


@pytest.mark.parametrize(
    ("factor", "num_choices", "num_tokens", "num_experts", "places"),
    [
        (1.0, 1, 8, 4, 2),
        (1.0, 1, 9, 4, 3),  # rounded up
        (1.25, 1, 8, 4, 3),
        (1.0, 2, 8, 4, 4),
        (1.1, 1, 100, 10, 11),  # 1.1 * 100 / 10 is a little more than 11 in floating point
        (0.01, 1, 8, 4, 1),  # at least one
        (1.0, 1, 0, 4, 1),
        (0.0, 2, 8, 4, None),  # no limit
    ],
)
def test_expert_capacity(factor, num_choices, num_tokens, num_experts, places):
    assert expert_capacity(factor, num_choices, num_tokens, num_experts) == places


ROUTERS = {
    "base": {"router": "base"},
    "base, shuffled": {"router": "base", "base_shuffle": True},
    "base, weight one": {"router": "base", "base_gate": "one", "base_offset_rate": 0.1},
    "hash": {"router": "hash"},
    "loss_free": {"router": "loss_free"},
    "loss_free, softmax": {"router": "loss_free", "loss_free_gate": "softmax"},
    "switch": {"router": "switch", "capacity_factor": 0.7, "router_jitter": 0.1, "router_z_weight": 0.1},
    "switch, by gate": {"router": "switch", "capacity_factor": 0.7, "drop_order": "gate"},
    "gshard, random": {"router": "gshard", "capacity_factor": 0.5},
    "gshard, sampled": {"router": "gshard", "capacity_factor": 0.7, "second_expert": "sampled"},
    "gshard, all, after drop": {
        "router": "gshard", "capacity_factor": 0.7, "second_expert": "all", "gate_normalisation": "after_drop"
    },
}  # fmt: skip
SMALL = {"vocab_size": 30, "max_tokens": 8, "embed_dim": 8, "ffn_dim": 10, "num_heads": 1, "num_experts": 4}
SMALL |= {"num_dense_layers": 1, "num_sparse_layers": 1, "dropout": 0.0, "load_balance_weight": 0.5}


def make_block(router, kind):
    config = unflatten({**SMALL, "sparse_block": kind, **ROUTERS[router]})
    block = randomised(sparse_block(config, layer_index=1)).train()
    if isinstance(block.token_moe.router, LossFreeRouter):
        block.token_moe.router.bias.value.copy_(torch.tensor([0.0, 0.2, -0.3, 0.4]))
    return block


def batch(lengths, num_tokens):
    """Hidden states and ids of sequences of these lengths, and where there are real tokens."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(lengths), num_tokens, 8, dtype=torch.double, generator=generator, requires_grad=True)
    ids = torch.randint(2, 30, x.shape[:2], generator=generator)
    return x, ids, torch.arange(num_tokens) < torch.tensor(lengths).unsqueeze(1)


def slow_update(token_moe, x_NH, ids_N, plan):
    """The update of real tokens and the losses, token by token; BASE keeps to the assignment of ``plan``."""
    router, experts = token_moe.router, token_moe.experts
    if isinstance(router, TopKRouter):
        draws = top_k_draws(router.settings, x_NH, SMALL["num_experts"])
        slow = slow_top_k(router, experts, x_NH, *draws, router.settings.capacity_factor)
        return slow.outputs, slow.aux_losses
    rows, expert_of = [], dict(zip(plan.token_A.tolist(), plan.expert_A.tolist(), strict=True))
    for i, x in enumerate(x_NH):
        if isinstance(router, HashRouter):
            rows.append(feed_forward_expert(experts, router.table[ids_N[i]].item(), x))
        elif isinstance(router, LossFreeRouter):
            scores = router.weight @ x
            gates = torch.sigmoid(scores) if router.by_sigmoid else scores.exp() / scores.exp().sum()
            best = max(range(len(gates)), key=lambda e: gates[e].item() + router.bias.value[e].item())
            rows.append(gates[best] * feed_forward_expert(experts, best, x))
        else:
            affinity = x @ router.centroids[expert_of[i]]
            alpha = torch.sigmoid(affinity) if router.weighs else 1 + 0 * affinity
            rows.append(alpha * feed_forward_expert(experts, expert_of[i], x))
    return torch.stack(rows), {}


@pytest.mark.parametrize("router", ROUTERS)
def test_settings_reach_the_layer(router):
    config = unflatten({**SMALL, "sparse_block": "transformer", **ROUTERS[router]})
    layer = sparse_block(config, layer_index=1).token_moe
    if router.startswith("base"):
        assert layer.router.shuffle == ("shuffled" in router)
        assert not layer.experts.w2.any(), "the layer starts as the identity"
    else:
        assert layer.experts.w2.any() and layer.experts.norm_weight is None
    if isinstance(layer.router, TopKRouter):
        settings = dataclasses.asdict(layer.router.settings)
        assert settings.pop("num_choices") == (2 if router.startswith("gshard") else 1)
        assert settings == {name: getattr(config, name) for name in settings}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("router", [router for router in ROUTERS if router != "hash"])
def test_nan_names_the_layer(router, training):
    layer, (x, ids, valid) = make_block(router, "transformer").train(training).token_moe, batch([8, 5], 8)
    x.detach_()[1, 4:] = float("nan")  # the last real token; padding does not count
    with pytest.raises(NaNError, match=r"layer 1 \(tMoE\): 1 of 13 tokens"):
        layer(x, ForwardContext(tokens_Bn=ids, valid_Bn=valid))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("kind", ["transformer", "smlp"])
def test_sparse_blocks_against_one_token_at_a_time(router, kind):
    block = make_block(router, kind)
    x, ids, valid = batch([8, 5, 0], 8)
    context = ForwardContext(tokens_Bn=ids, valid_Bn=valid)
    torch.manual_seed(4)
    outputs, aux_losses = block(x, context)
    plan = context.plans[block.token_moe]
    torch.manual_seed(4)
    mixed = block.mixing(x, ForwardContext(tokens_Bn=ids, valid_Bn=valid))
    normed = mixed
    if not router.startswith("base"):  # whose experts have norms of their own
        normed = F.layer_norm(mixed, (8,), block.norm.weight, block.norm.bias)
    update, slow_losses = slow_update(block.token_moe, normed[valid], ids[valid], plan)
    assert plan.num_tokens == 13 and sorted(aux_losses) == sorted(slow_losses)
    losses, slow_losses = ([losses[name] for name in sorted(losses)] for losses in (aux_losses, slow_losses))
    assert_same(
        torch.cat([outputs[valid].flatten(), *(loss.reshape(1) for loss in losses)]),
        torch.cat([(mixed[valid] + update).flatten(), *(loss.reshape(1) for loss in slow_losses)]),
        [x, *block.parameters()],
        1e-9,
    )
    unassigned = torch.ones(13, dtype=torch.bool)
    unassigned[plan.token_A] = False
    assert torch.equal(outputs[valid][unassigned], mixed[valid][unassigned]), "dropped tokens pass through"
    if not router.startswith("gshard"):
        assert unassigned.any() == router.startswith("switch")
    assert torch.equal(outputs[~valid], mixed[~valid]), "padding passes through"
    if router.startswith("base"):
        assert sorted(plan.counts_E.tolist()) == [3, 3, 3, 4]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("kind", ["transformer", "smlp", "gmlp_moe"])
def test_padding_changes_nothing(router, kind):
    block = make_block(router, kind)
    x, ids, valid = batch([5, 5, 5, 0], 8)
    results, plans = [], []
    for shorter in (slice(3), slice(4)):  # three sequences of five tokens, with and without padding in both directions
        rows = x[shorter, : 5 if shorter.stop == 3 else 8]
        context = ForwardContext(tokens_Bn=ids[shorter, : rows.size(1)])
        if shorter.stop == 4:
            context.valid_Bn = valid
        torch.manual_seed(6)
        outputs, aux_losses = block(rows, context)
        results.append(torch.cat([outputs[:3, :5].flatten(), *(loss.reshape(1) for loss in aux_losses.values())]))
        plans.append(context.plans[block.token_moe])
    assert plans[0].num_tokens == plans[1].num_tokens == 15 and plans[0].dropped == plans[1].dropped
    assert torch.equal(plans[0].token_A, plans[1].token_A) and torch.equal(plans[0].expert_A, plans[1].expert_A)
    gradient, *_ = assert_same(*results, [x, *block.parameters()], 1e-10)
    assert not gradient[:, 5:].any() and not gradient[3].any()


def test_shuffled_tokens_are_assigned_in_that_order_and_find_their_way_back(monkeypatch):
    seen = []
    monkeypatch.setattr(
        balanced, "balanced_assignment", lambda scores: seen.append(scores) or torch.arange(len(scores)) % 3
    )
    logits, order = torch.randn(7, 3), torch.tensor([4, 2, 6, 0, 5, 1, 3])
    plan = balanced.balanced_plan(logits, order)
    assert torch.equal(seen[0], logits[order])
    # the i-th in the order has expert i mod 3: tokens 4, 0 and 3 expert 0; 2 and 5 expert 1; 6 and 1 expert 2
    assert plan.token_A.tolist() == [0, 3, 4, 2, 5, 1, 6] and plan.expert_A.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_shuffling_decides_between_equals_only():
    generator = torch.Generator().manual_seed(0)
    planted_N = torch.randperm(24, generator=generator) % 4
    x_NH = torch.eye(4)[planted_N] * 5 + torch.rand(24, 4, generator=generator) * 0.1
    plans = []
    for shuffle in (False, True):
        router = BalancedRouter(4, 4, 1.0, shuffle).train()
        with torch.no_grad():
            router.centroids.copy_(torch.eye(4))
        plans.append([router(x_NH, None).plan for _ in range(3)])
        equals = [router(torch.zeros(24, 4), None).plan for _ in range(3)]
        assert all(plan.counts_E.tolist() == [6] * 4 for plan in equals)
        assert torch.equal(equals[0].token_A, equals[1].token_A) != shuffle
        before = torch.get_rng_state()
        assert router.eval()(x_NH, None).plan.counts_E.tolist() == [6] * 4
        assert torch.equal(before, torch.get_rng_state()), "no shuffle in evaluation"
    for plan in [*plans[0], *plans[1]]:
        assert torch.equal(plan.expert_A, planted_N[plan.token_A])
