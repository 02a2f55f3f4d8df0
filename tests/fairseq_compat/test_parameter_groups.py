"""Rates and weight decays of kinds of parameters: which is which, and what a step does to each."""

from types import SimpleNamespace

import pytest
import torch

import smlp
from smlp.fairseq_compat.parameter_groups import MATRIX, SPATIAL, VECTOR, divide_steps, roles_of
from smlp.ops.fast_paths import reference_ops

SMALL = {"vocab_size": 20, "max_tokens": 8, "embed_dim": 8, "ffn_dim": 12}
SPARSE = {**SMALL, "num_dense_layers": 1, "num_sparse_layers": 1, "num_experts": 2}
MODELS = {
    "smlp_tiny": {**SPARSE, "smlp_feature_scale": 0.1, "smlp_projection_dim": 2, "router": "switch"},
    "base_lm_tiny": SPARSE,
    "gmlp_moe_tiny": {**SPARSE, "spatial_weights": "toeplitz"},
    "gmlp_lm_tiny": {**SMALL, "num_dense_layers": 1, "num_heads": 2},
    "dense_lm_tiny": {**SMALL, "num_dense_layers": 1, "num_heads": 2, "transformer_attention": "relative"},
}
#: names that end so are matrices; those with SPATIAL_NAMES are spatial, and all the rest are vectors
MATRICES = (
    *("embedding.weight", "proj_in.weight", "proj_out.weight", "qkv.weight", "out.weight", "fc1.weight", "fc2.weight"),
    *("w1", "w2", "w_in", "w_out", "router.weight", "router.centroids", "projection.0.weight", "projection.1.weight"),
    *("proj_qkv.weight",),
)
SPATIAL_NAMES = ("gating.heads.weight", "feature_moe.experts.weight", "experts.gating.weight")


@pytest.mark.parametrize("arch", MODELS)
def test_roles(arch):
    model = smlp.build(arch, **MODELS[arch])
    roles = dict(roles_of(model))
    assert len(roles) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        want = VECTOR if not name.endswith(MATRICES) else MATRIX
        assert roles[parameter] == (SPATIAL if name.endswith(SPATIAL_NAMES) else want), name
    assert (SPATIAL in roles.values()) == (arch not in ("base_lm_tiny", "dense_lm_tiny"))


@pytest.fixture
def adam():
    from fairseq.optim.adam import Adam

    from smlp.fairseq_compat import adam

    if not hasattr(Adam.step, "__wrapped__"):
        adam.apply()
    return Adam


def options(**given):
    return SimpleNamespace(**{"no_decay_norms": False, "spatial_lr_factor": 1.0, "spatial_weight_decay": None, **given})


def slow_adamw(parameter, gradients, lr, decay):
    """Loshchilov and Hutter, 2019, in fairseq's form, from no moments."""
    first = second = torch.zeros_like(parameter)
    for step, grad in enumerate(gradients, start=1):
        first, second = 0.9 * first + 0.1 * grad, 0.98 * second + 0.02 * grad**2
        size = lr * (1 - 0.98**step) ** 0.5 / (1 - 0.9**step)
        parameter = parameter - lr * decay * parameter - size * first / (second.sqrt() + 1e-8)
    return parameter


GIVEN = {
    "no decay of norms": ({"no_decay_norms": True}, {VECTOR: (0.01, 0.0)}),
    "spatial rate": ({"spatial_lr_factor": 0.25}, {SPATIAL: (0.0025, 0.3)}),
    "spatial decay": ({"spatial_weight_decay": 0.05}, {SPATIAL: (0.01, 0.05)}),
    "all": (
        {"no_decay_norms": True, "spatial_lr_factor": 3.0, "spatial_weight_decay": 0.0},
        {VECTOR: (0.01, 0.0), SPATIAL: (0.03, 0.0)},
    ),
}


@pytest.mark.parametrize("steps", ["ours", "fairseq's"])
@pytest.mark.parametrize("name", GIVEN)
def test_each_kind_follows_its_rate_and_decay(adam, name, steps):
    given, want = GIVEN[name]
    model = smlp.build("smlp_tiny", **MODELS["smlp_tiny"])
    parameters, roles = list(model.parameters()), dict(roles_of(model))
    optimizer = adam(parameters, lr=0.01, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.3)
    format_before = [(key, value) for key, value in optimizer.state_dict()["param_groups"][0].items()]
    divide_steps(SimpleNamespace(optimizer=optimizer), model, parameters, options(**given))
    before, generator = [p.detach().clone() for p in parameters], torch.Generator().manual_seed(1)
    gradients = [[torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(3)]
    for of_step in gradients:
        for parameter, grad in zip(parameters, of_step, strict=True):
            parameter.grad = grad
        if steps == "ours":
            optimizer.step()
        else:
            with reference_ops():
                optimizer.step()
    for number, (parameter, start) in enumerate(zip(parameters, before, strict=True)):
        lr, decay = want.get(roles[parameter], (0.01, 0.3))
        slow = slow_adamw(start.double(), [of_step[number].double() for of_step in gradients], lr, decay)
        torch.testing.assert_close(parameter.detach().double(), slow, rtol=1e-5, atol=1e-6)
    (group,) = optimizer.state_dict()["param_groups"]
    assert [(key, value) for key, value in group.items()] == format_before, "checkpoints are as without"
    (group,) = optimizer.param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in parameters]


def test_momentum_follows_the_rate_of_its_own_part():
    """fairseq's NAG scales it by the change of the rate since the step before: here there is none."""
    from fairseq.optim.nag import NAG

    ends = {}
    for factor in (1.0, 4.0):
        torch.manual_seed(1)
        model = smlp.build("gmlp_lm_tiny", **MODELS["gmlp_lm_tiny"])
        parameters, roles = list(model.parameters()), dict(roles_of(model))
        optimizer = NAG(parameters, lr=0.01 / factor, momentum=0.9)
        divide_steps(SimpleNamespace(optimizer=optimizer), model, parameters, options(spatial_lr_factor=factor))
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        ends[factor] = [parameter.detach() for parameter in parameters if roles[parameter] == SPATIAL]
    for one, other in zip(*ends.values(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_frozen_router_stays_as_it_is(adam):
    model = smlp.build("smlp_tiny", **{**MODELS["smlp_tiny"], "router_freeze": 0.5})
    parameters = list(model.parameters())
    optimizer = adam(parameters, lr=0.1, weight_decay=0.3)
    divide_steps(SimpleNamespace(optimizer=optimizer), model, parameters, options())
    gate = next(p for name, p in model.named_parameters() if name.endswith("router.weight"))
    for progress, moves in ((0.0, True), (0.5, False)):
        model.follow(progress)
        before = [p.detach().clone() for p in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter, old in zip(parameters, before, strict=True):
            assert torch.equal(parameter, old) != (moves or parameter is not gate)


def test_the_schedule_sets_the_rate_of_all(adam):
    model = smlp.build("gmlp_lm_tiny", **MODELS["gmlp_lm_tiny"])
    parameters = list(model.parameters())
    optimizer = adam(parameters, lr=0.1, weight_decay=0.0)
    divide_steps(SimpleNamespace(optimizer=optimizer), model, parameters, options(spatial_lr_factor=0.5))
    optimizer.param_groups[0]["lr"] = 0.002
    spatial, other = model.blocks[0].gating.heads.weight, model.blocks[0].proj_in.weight
    before = [p.detach().clone() for p in (spatial, other)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    steps = [(old - p).mean().item() for old, p in zip(before, (spatial, other), strict=True)]
    assert steps == pytest.approx([0.001, 0.002], rel=1e-4)


def test_one_flat_tensor_is_refused(adam):
    model = smlp.build("gmlp_lm_tiny", **MODELS["gmlp_lm_tiny"])
    flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    optimizer = SimpleNamespace(optimizer=adam([flat], lr=0.1))
    with pytest.raises(smlp.UserError, match="--fp16-no-flatten-grads"):
        divide_steps(optimizer, model, list(model.parameters()), options(no_decay_norms=True))
    divide_steps(optimizer, model, list(model.parameters()), options())


def test_what_has_no_effect_is_said(adam, caplog):
    model = smlp.build("dense_lm_tiny", **MODELS["dense_lm_tiny"])
    optimizer = SimpleNamespace(optimizer=adam(list(model.parameters()), lr=0.1))
    divide_steps(optimizer, model, list(model.parameters()), options(spatial_lr_factor=0.5))
    assert "there are no spatial weights" in caplog.text
