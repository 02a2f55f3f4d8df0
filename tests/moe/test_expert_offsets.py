"""Offsets of experts, which follow loads: by the paper's algorithm, in evaluation, over phases of a training."""

import copy

import pytest
import torch

import smlp
from smlp.evaluation.leak import leak_test, randomise
from smlp.moe.routers import BalancedRouter, ExpertOffsets, LossFreeRouter, TopKRouter, TopKSettings
from smlp.moe.routers.hashed import random_table

SMALL = {"vocab_size": 40, "max_tokens": 16, "embed_dim": 16, "ffn_dim": 16, "num_dense_layers": 1}
SMALL |= {"num_sparse_layers": 2, "num_experts": 4, "dropout": 0.0}


def tokens_of(count, seed=0):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)) + 0.5


def slow_biases(router, updates, rate):
    """Wang et al., 2024, algorithm 1: for each batch of tokens, one at a time, then for each expert."""
    bias, weight = [0.0] * 4, router.weight.detach().double()
    for micro_batches in updates:
        loads = [0] * 4
        for x in torch.cat(micro_batches).double():
            gates = torch.sigmoid(weight @ x)
            loads[max(range(4), key=lambda e: float(gates[e]) + bias[e])] += 1
        mean = sum(loads) / 4
        bias = [b + rate * ((load < mean) - (load > mean)) for b, load in zip(bias, loads, strict=True)]
    return bias


def test_biases_move_once_an_update_as_in_the_paper():
    router = LossFreeRouter(6, 4, rate=0.02).train()
    updates = [[tokens_of(24, seed), tokens_of(17, seed + 100)] for seed in range(30)]
    want = slow_biases(router, updates, 0.02)
    for micro_batches in updates:
        before = router.bias.value.clone()
        for x in micro_batches:
            router(x, None)
        assert torch.equal(router.bias.value, before), "constant within an update"
        router.bias.adjust(router.bias.take())
    assert router.bias.value.tolist() == pytest.approx(want, abs=1e-6) and max(want) > 0.05


@pytest.mark.parametrize(("num_experts", "mean"), [(8, 49), (6, 49), (7, 103), (12, 100)])
def test_an_expert_with_exactly_its_share_stays(num_experts, mean):
    """1 - load * (E / total) is 1e-16 for many of these."""
    offsets, loads_E = ExpertOffsets(num_experts, rate=0.01, by_sign=True), torch.full((num_experts,), float(mean))
    loads_E[0], loads_E[1] = mean + 5, mean - 5
    offsets.adjust(torch.cat([loads_E, torch.ones(1)]).double())
    assert offsets.value.sign().tolist() == [-1, 1, *[0] * (num_experts - 2)]


def test_routers_of_ones_own_are_told_how_far_the_training_is(monkeypatch):
    model, told = smlp.build("smlp_tiny", **SMALL, router="switch"), []
    for block in model.blocks[1:]:
        block.token_moe.router.__class__ = type(
            "Own", (torch.nn.Module,), {"follow": lambda self, share: told.append(share)}
        )
    model.follow(0.25)
    assert told == [0.25, 0.25]


def test_weights_are_the_gates_without_biases():
    router = LossFreeRouter(6, 4, rate=0.1)
    router.bias.value[2] = 10.0
    routing = router(tokens_of(9), None)
    assert routing.plan.expert_A.tolist() == [2] * 9
    assert torch.allclose(routing.weight_A, torch.sigmoid(tokens_of(9) @ router.weight[2]))


@pytest.mark.parametrize(("by_sign", "scale"), [(True, 1.0), (False, 1.0), (False, 100.0)])
def test_they_even_out_loads(by_sign, scale):
    scores_NE = scale * (torch.rand(4000, 8, generator=torch.Generator().manual_seed(1)) + torch.linspace(0, 1, 8))
    offsets = ExpertOffsets(8, rate=0.02, by_sign=by_sign)
    for part in scores_NE.repeat(4, 1).split(80):
        offsets.count(offsets(part).argmax(1), part)
        offsets.adjust(offsets.take())
    shares = [torch.bincount(some.argmax(1), minlength=8) / 4000 for some in (scores_NE, offsets(scores_NE))]
    assert shares[0].max() > 0.4 and shares[1].max() < 0.2


def test_an_expert_never_loses_more_than_its_rate_allows():
    offsets = ExpertOffsets(4, rate=0.5, by_sign=False)
    offsets.adjust(torch.tensor([10.0, 0.0, 0.0, 0.0, 30.0]))  # a mean spread of 3; expert 0 has four times its share
    assert offsets.value.tolist() == [-1.5, 1.5, 1.5, 1.5]
    offsets.adjust(torch.zeros(5))
    assert offsets.value.tolist() == [-1.5, 1.5, 1.5, 1.5], "no tokens, no step"


def test_nothing_is_counted_in_evaluation_nor_for_a_plan_nor_where_the_router_is_frozen():
    router, x = LossFreeRouter(6, 4, 0.1, freeze_after=0.5), tokens_of(20)
    plan = router.eval()(x, None).plan
    assert not router.bias.take().any()
    router.train()(x, None, plan)
    assert not router.bias.take().any()
    router(x, None)
    assert router.bias.take()[:-1].sum() == 20 and not router.bias.take().any()
    router.follow(0.5)
    router(x, None)
    assert not router.bias.take().any()


def test_evaluation_of_base_adds_offsets_that_training_does_not_use():
    router, x = BalancedRouter(6, 4, 1.0, offset_rate=0.1), tokens_of(40)
    trained = router.train()(x, None).plan
    with torch.no_grad():
        router.offsets.value[1] = 100.0
    assert torch.equal(router(x, None).plan.expert_A, trained.expert_A)
    evaluated = router.eval()(x, None)
    assert evaluated.plan.expert_A.tolist() == [1] * 40
    assert torch.allclose(evaluated.weight_A, torch.sigmoid(x @ router.centroids[1])), "weights are without offsets"


def test_a_warm_up_routes_by_ids_until_its_end_in_evaluation_too():
    table, x, ids = random_table(30, 4, seed=3), tokens_of(40), torch.arange(40) % 30
    router = BalancedRouter(6, 4, 1.0, warmup=0.25, table_V=table).train()
    for progress, warms in ((0.0, True), (0.24, True), (0.25, False), (0.1, True)):
        router.follow(progress)
        for mode in (True, False):
            router.train(mode)
            routing = router(x, ids)
            by_id = torch.equal(routing.plan.expert_A, table[ids][routing.plan.token_A])
            assert by_id == warms and router.looks_ahead() == (mode and not warms)
            alphas = torch.sigmoid((x @ router.centroids.T)[routing.plan.token_A, routing.plan.expert_A])
            assert torch.allclose(routing.weight_A, alphas)
    again = BalancedRouter(6, 4, 1.0, warmup=0.25, table_V=random_table(30, 4, seed=9)).eval()
    again.load_state_dict(router.state_dict())
    assert torch.equal(again(x, ids).plan.expert_A, router.eval()(x, ids).plan.expert_A), "a checkpoint says so"


@pytest.mark.parametrize(
    "router",
    [
        LossFreeRouter(6, 4, 0.1, freeze_after=0.5),
        BalancedRouter(6, 4, 1.0, freeze_after=0.5),
        TopKRouter(6, 4, TopKSettings(1), freeze_after=0.5),
    ],
    ids=["loss_free", "base", "switch"],
)
def test_a_frozen_router_gets_zeros_and_passes_gradients_on(router):
    (parameter,) = router.train().parameters()
    for progress, is_frozen in ((0.49, False), (0.5, True)):
        router.follow(progress)
        x, parameter.grad = tokens_of(12).requires_grad_(), None
        router(x, None).weight_A.square().sum().backward()
        assert router.is_frozen == is_frozen and parameter.grad.any() != is_frozen and x.grad.any()


def test_half_precision_keeps_small_steps():
    offsets = ExpertOffsets(4, rate=0.001, by_sign=True).bfloat16()
    for _ in range(1000):
        offsets.adjust(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0]))
    assert offsets.value.dtype == torch.float32
    assert copy.deepcopy(offsets).double().half().value.tolist() == pytest.approx([-1, 1, 1, 1], rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"router": "loss_free"}, {"base_offset_rate": 0.1}, {"base_warmup": 0.5}],
    ids=["loss_free", "offsets", "warm-up"],
)
def test_no_later_token_is_seen_with_offsets(settings):
    model = randomise(smlp.build("smlp_tiny", **SMALL, **settings))
    for module in model.modules():
        if isinstance(module, ExpertOffsets):
            module.value.copy_(torch.tensor([0.3, -0.2, 0.1, 0.5]))
    for report in leak_test(model, dtypes=(torch.float32,), positions=[1, 7, 15]):
        assert report.passed and (report.mode == "training" or not report.leaks), report
        assert report.expected == (report.mode == "training" and "base_offset_rate" in settings)


def test_a_model_adjusts_all_its_offsets_at_once():
    model = smlp.build("smlp_tiny", **SMALL, base_offset_rate=0.1).train()
    tokens = torch.randint(4, 40, (3, 16), generator=torch.Generator().manual_seed(1))
    values = [module.value for module in model.modules() if isinstance(module, ExpertOffsets)]
    model(tokens)
    model.forget_loads()
    model.adjust_offsets()
    assert len(values) == 2 and not any(value.any() for value in values)
    model(tokens)
    model.adjust_offsets()
    assert all(value.any() for value in values)
